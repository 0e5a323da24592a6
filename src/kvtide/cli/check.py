"""``kvtide check``: whether these settings would do here.

Knows how to ask about settings, this machine's memory and the vLLM that is installed, without starting or
importing any of it. Does not know the model: what its weights and the engine's own pool take comes on top.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvtide.cli import transfer_config
from kvtide.cli.check_stores import Store, ask_stores
from kvtide.cli.check_stores import as_plain as stores_as_plain
from kvtide.cli.options import NO_METAVAR, with_settings, written
from kvtide.cli.output import WRONG, note, show
from kvtide.cli.unanswered import UnansweredError, mount_of, within
from kvtide.config import KVTideConfig, Resolved, resolve
from kvtide.errors import ConfigError
from kvtide.tiers.disk_folder import DiskRoom, room_at
from kvtide.transfer.memory import MemoryLimit, available_host_bytes, check_budget, humanised
from kvtide.vllm.compat import RANGE_HINT, InstalledVLLM, Support, installed_vllm

logger = logging.getLogger(__name__)

DISK_LIMIT_S = 5.0
"""So long a file system may take to say what is free."""


def require_vllm() -> InstalledVLLM:
    """Return the installed vLLM; warn where it is unproven.

    Raises:
        ConfigError: None is installed, or one that is not supported.
    """
    installed = installed_vllm()
    if installed is None:
        raise ConfigError("vllm", None, "not installed: pip install 'kvtide[cpu]' or 'kvtide[cuda]'")
    if installed.support is Support.UNSUPPORTED:
        raise ConfigError(installed.distribution, installed.version, f"not supported: {RANGE_HINT}")
    if installed.support is Support.UNPROVEN:
        logger.warning("vLLM %s is not proven: %s", installed.version, RANGE_HINT)
    return installed


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found out. A part is None when its question could not be asked or answered."""

    settings: Resolved | None
    memory: MemoryLimit | None
    disk: DiskRoom | None
    stores: tuple[Store, ...]
    vllm: InstalledVLLM | None
    errors: tuple[ConfigError, ...]


@with_settings
def check(
    settings: dict[str, object],
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE_OR_JSON",
            help="What --kv-transfer-config would be, or only the settings in it; or vLLM's YAML file.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=NO_METAVAR, help="Print JSON for programs.")
    ] = False,
) -> None:
    """Validate settings without starting anything, and show where each one comes from.

    Stores that the settings name are asked whether they answer.

    Exit code 0: they would do here. 2: something is wrong, and is named.
    """
    findings = find_out(settings, config, os.environ)
    if as_json:
        typer.echo(json.dumps(as_plain(findings), indent=2))
    else:
        _print(findings)
    if findings.errors:
        raise typer.Exit(WRONG)


def find_out(
    command_line: Mapping[str, object], config: str | None, environment: Mapping[str, str]
) -> Findings:
    """Ask every question and collect what is wrong: one mistake does not hide the next."""
    errors: list[ConfigError] = []
    stores: list[Store] = []
    resolved = memory = disk = vllm = None
    try:
        transfer = transfer_config.from_file_or_json(config) if config is not None else {}
        resolved = resolve(command_line, transfer_config.extra_config_of(transfer), environment)
    except ConfigError as error:
        errors.append(error)
    try:
        memory = available_host_bytes()
        if resolved is not None:
            check_budget(resolved.config.host_memory, 0, memory)
    except OSError as error:
        note(f"how much memory is free cannot be told here: {error}")
    except ConfigError as error:
        errors.append(error)
    try:
        if resolved is not None and resolved.config.disk:
            disk = _disk_room(resolved.config.disk)
    except ConfigError as error:
        errors.append(error)
    if resolved is not None:
        stores, wrong = ask_stores(resolved.config)
        errors += wrong
    try:
        vllm = installed_vllm()
        if vllm is not None:
            require_vllm()
    except ConfigError as error:
        errors.append(error)
    return Findings(resolved, memory, disk, tuple(stores), vllm, tuple(errors))


def _disk_room(folder: str) -> DiskRoom:
    try:
        return within(DISK_LIMIT_S, lambda: room_at(Path(folder)))
    except UnansweredError:
        where = mount_of(folder) or "its file system"
        hint = f"cannot be used: {where} has not answered for {DISK_LIMIT_S:g} s; look at that mount"
        raise ConfigError("disk", folder, hint) from None


def as_plain(findings: Findings) -> dict[str, Any]:
    """Put findings into plain types for JSON; sizes in bytes."""
    resolved, memory, vllm = findings.settings, findings.memory, findings.vllm
    return {
        "ok": not findings.errors,
        "errors": [{"setting": e.setting, "value": e.value, "hint": e.hint} for e in findings.errors],
        "settings": resolved
        and {
            name: {"value": value, "origin": resolved.origins[name]}
            for name, value in resolved.config.model_dump().items()
        },
        "memory": memory
        and {
            "free_bytes": memory.bytes,
            "total_bytes": memory.total_bytes,
            "limit": memory.binding.value,
        },
        "disk": findings.disk
        and {
            "folder": findings.disk.folder,
            "free_bytes": findings.disk.free_bytes,
            "total_bytes": findings.disk.total_bytes,
        },
        "stores": stores_as_plain(findings.stores),
        "vllm": vllm
        and {
            "distribution": vllm.distribution,
            "version": vllm.version,
            "support": vllm.support.name.lower(),
        },
    }


def _print(findings: Findings) -> None:
    if findings.settings is not None:
        show(_table(findings.settings))
    vllm, memory = findings.vllm, findings.memory
    if vllm is not None:
        typer.echo(f"vLLM     {vllm.version} ({vllm.distribution}): {vllm.support.value}")
    elif not any(error.setting == "vllm" for error in findings.errors):
        typer.echo("vLLM     not installed here: settings only")
    if memory is not None:
        typer.echo(f"memory   {memory}")
    if findings.disk is not None and findings.settings is not None:
        _print_disk(findings.disk, findings.settings.config)
    for store in findings.stores:
        if store.answer is not None:
            typer.echo(f"store    {store.name}: {store.answer}")
    for error in findings.errors:
        typer.secho(f"wrong    {error}", fg=typer.colors.RED)
    if not findings.errors:
        typer.secho("fine     these settings would do here", fg=typer.colors.GREEN)


def _print_disk(disk: DiskRoom, config: KVTideConfig) -> None:
    typer.echo(
        f"disk     {humanised(disk.free_bytes)} of {humanised(disk.total_bytes)} are free at {disk.folder}"
    )
    if disk.free_bytes < config.disk_limit + config.disk_reserve:
        limit, reserve = humanised(config.disk_limit), humanised(config.disk_reserve)
        typer.echo(
            f"         less than disk_limit and disk_reserve ({limit} and {reserve}): the tier stays smaller"
        )


def _table(resolved: Resolved) -> Table:
    table = Table(title="Effective settings", title_justify="left")
    table.add_column("setting", style="bold")
    table.add_column("value", justify="right")
    table.add_column("from")
    for name in type(resolved.config).model_fields:
        origin = resolved.origins[name]
        table.add_row(name, written(getattr(resolved.config, name)), origin)
    return table
