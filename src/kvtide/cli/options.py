"""Every setting as an option of a command, derived from ``KVTideConfig``.

Knows how a setting is spelt on the command line. Does not know values: they are passed on as they were
written, and ``kvtide.config`` judges them the same way wherever they come from.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from kvtide.config import ENVIRONMENT_PREFIX, KVTideConfig
from kvtide.transfer.memory import humanised

PANEL = "Settings of kvtide"
METAVARS = {"disk": "FOLDER", "record_trace": "FILE", "promotion_share": "SHARE", "tiers": "JSON"}
NO_METAVAR = " "  # without one, typer writes <bool> behind a flag, which takes no value


def option_of(setting: str) -> str:
    """Spell a setting as an option: ``host_memory`` is ``--host-memory``."""
    return "--" + setting.replace("_", "-")


def environment_name_of(setting: str) -> str:
    """Spell a setting as an environment variable: ``host_memory`` is ``KVTIDE_HOST_MEMORY``."""
    return ENVIRONMENT_PREFIX + setting.upper()


def written(value: object) -> str:
    """Write a setting's value as a person would: sizes with their unit, flags as true and false."""
    if isinstance(value, ByteSize):
        return humanised(value)
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every setting.

    Args:
        function: Takes ``settings``, the settings that were given, by name and as they were written.

    Returns:
        A command for typer with the options of ``function`` and those of the settings.
    """
    own = [p for p in inspect.signature(function).parameters.values() if p.name != "settings"]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        given = {name: values.pop(name) for name in KVTideConfig.model_fields}
        function(settings={name: value for name, value in given.items() if value is not None}, **values)

    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, field)
        )
        for name, field in KVTideConfig.model_fields.items()
    ]
    # typer reads both of these, and both would otherwise describe ``function``.
    command.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in own + options}
    return command


def _annotation(name: str, field: FieldInfo) -> Any:
    flag = field.annotation is bool
    spelling = option_of(name)
    if flag:
        spelling += f"/--no-{spelling.removeprefix('--')}"
    option = typer.Option(
        spelling,
        help=f"{field.description} {_default(field)}",
        metavar=NO_METAVAR if flag else _metavar(name, field),
        show_default=False,
        rich_help_panel=PANEL,
    )
    return Annotated[bool | None if flag else str | None, option]


def _default(field: FieldInfo) -> str:
    return "Required." if field.is_required() else f"Default: {written(field.default)}."


def _metavar(name: str, field: FieldInfo) -> str:
    if field.annotation is ByteSize:
        return "SIZE"
    if name.endswith("_s"):
        return "SECONDS"
    if name in METAVARS:
        return METAVARS[name]
    return "N" if field.annotation is int else "NAME"
