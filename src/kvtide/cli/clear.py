"""``kvtide clear``: records are removed from the folder of a disk tier, by model, generation or age.

Knows what is meant, and shows it. What removing takes is ``kvtide.tiers.removal``'s.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvtide.cli.folders import (
    JsonOption,
    PathArgument,
    bar,
    counted,
    in_doubt,
    model_of,
    print_json,
    refusing,
    seconds_of,
    short,
    show_under,
    table,
    tell,
    tell_what_was_left_aside,
    written,
)
from kvtide.cli.options import NO_METAVAR
from kvtide.errors import ConfigError, TierUnavailableError
from kvtide.tiers.removal import Selected, Wanted, clear_everything, forget, forget_model, held, select, trim
from kvtide.tiers.survey import DiskFolder, number_of, opened
from kvtide.transfer.memory import humanised

EPILOG = """Examples:

* `kvtide clear /var/cache/kvtide --older-than 7d --dry-run` says what would go
* `kvtide clear /var/cache/kvtide --fingerprint 3f9a21` removes one model; kvtide inspect names them
* `kvtide clear /var/cache/kvtide --fingerprint 3f9a21 --generation 2` and of that one generation
* `kvtide clear /var/cache/kvtide --all` empties the folder

What is given narrows together. It is not undone: what was removed is computed again when it is asked for.
"""


def clear(
    path: PathArgument,
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Records of this fingerprint: its first digits, as many as tell."),
    ] = None,
    generation: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Records of this generation.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Records written longer ago: 90s, 15m, 12h, 7d, 2w.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", metavar=NO_METAVAR, help="All of it, damaged or not.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar=NO_METAVAR, help="Say what would go, and remove nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove records from the folder of a disk tier: by fingerprint, generation or age, or all of them.

    Refused while an instance uses the folder, except as --dry-run. The space goes back to the file system,
    where that can have holes in files; elsewhere the next instance uses it.

    Exit code 0: done. 2: it could not be done, and nothing was removed unless the message says so.
    """
    with refusing(as_json):
        wanted = _wanted(fingerprint, generation, older_than, everything)
        with _folder(path, dry_run) as folder:
            with bar("looking for records", folder.record_count()) as tick:
                selected = select(folder, wanted, tick)
            before_bytes = folder.slab_bytes
            if not dry_run:
                _remove(folder, selected, wanted, everything)
                after_bytes = _slab_bytes(path)
            else:
                after_bytes = before_bytes
            if as_json:
                print_json(as_plain(folder, selected, dry_run, before_bytes, after_bytes))
            else:
                tell_what_was_left_aside(folder)
                _print(folder, selected, dry_run, before_bytes, after_bytes)


def as_plain(
    folder: DiskFolder, selected: Selected, dry_run: bool, before_bytes: int, after_bytes: int
) -> dict[str, Any]:
    """Put what was, or would be, removed into plain types for JSON."""
    return {
        "ok": True,
        "path": str(folder.path),
        "dry_run": dry_run,
        "removed": [
            {
                "fingerprint": fingerprint.hex(),
                "model": known.model if (known := folder.models.get(fingerprint)) else None,
                "generation": number_of(generation),
                "doubtful": in_doubt(generation),
                "records": holding.record_count,
                "chunks": holding.chunk_count,
                "bytes": holding.byte_count,
            }
            for (fingerprint, generation), holding in sorted(selected.holdings.items())
        ],
        "slab_bytes_before": before_bytes,
        "slab_bytes_after": after_bytes,
    }


def _wanted(
    fingerprint: str | None, generation: int | None, older_than: str | None, everything: bool
) -> Wanted:
    narrowed = fingerprint is not None or generation is not None or older_than is not None
    if everything and narrowed:
        raise ConfigError("--all", True, "give it alone, or leave it out")
    if not everything and not narrowed:
        hint = "say what should go: --fingerprint, --generation, --older-than, or --all"
        raise ConfigError("kvtide clear", None, hint)
    prefix = (fingerprint or "").lower()
    if fingerprint is not None and (not prefix or set(prefix) - set("0123456789abcdef")):
        hint = "give the first digits of one, in hexadecimal; kvtide inspect shows them"
        raise ConfigError("--fingerprint", fingerprint, hint)
    before_s = None if older_than is None else time.time() - seconds_of(older_than)
    return Wanted(prefix, generation, before_s)


@contextlib.contextmanager
def _folder(path: Path, dry_run: bool) -> Iterator[DiskFolder]:
    with opened(path) if dry_run else held(path) as folder:
        yield folder


def _remove(folder: DiskFolder, selected: Selected, wanted: Wanted, everything: bool) -> None:
    if everything:
        clear_everything(folder)
        return
    with bar("removing records", sum(map(len, selected.places.values()))) as tick:
        for rank in folder.ranks:
            places = selected.places.get(rank.rank, [])
            if not places:
                continue
            try:
                forget(rank, places, tick)
            except TierUnavailableError as error:
                hint = f"kvtide verify {quote(str(folder.path))} --discard puts that right"
                raise TierUnavailableError(f"{error}; not all was removed, and {hint}") from None
            trim(rank, selected.highest)
    if wanted == Wanted(wanted.fingerprint_prefix):
        forget_model(folder, wanted.fingerprint_prefix)


def _slab_bytes(path: Path) -> int:
    with opened(path) as folder:
        return folder.slab_bytes


def _print(
    folder: DiskFolder, selected: Selected, dry_run: bool, before_bytes: int, after_bytes: int
) -> None:
    if selected.holdings:
        rows = table(["model", "fingerprint", "generation"], ["records", "chunks", "bytes"])
        for (fingerprint, generation), holding in sorted(selected.holdings.items()):
            rows.add_row(
                escape(model_of(folder, fingerprint)),
                short(fingerprint),
                written(generation),
                f"{holding.record_count:,}",
                f"{holding.chunk_count:,}",
                humanised(holding.byte_count),
            )
        show_under("Would be removed" if dry_run else "Removed", rows)
    count = sum(holding.record_count for holding in selected.holdings.values())
    tell("would go" if dry_run else "removed", counted(count, "record"))
    if not dry_run:
        tell("slabs", f"{humanised(after_bytes)}, where there were {humanised(before_bytes)}")
