"""``kvtide replay --html FILE``: what can be refused before the replay is, and the page after it.

Knows the option; what the page looks like is in ``kvtide.sim.page``.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.output import note
from kvtide.errors import ConfigError

BEGINNING = b"<!doctype html>"
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write a page with curves and tables, too.", show_default=False
    ),
]


def refuse_page(path: Path) -> None:
    """Refuse now what would be refused once all is replayed, and what nobody can have meant.

    Raises:
        ConfigError: Nobody can write there, something else is there, or what draws is not installed.
    """
    from kvtide.sim.charts import plotly_objects

    plotly_objects()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("--html", str(path), "give a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("--html", str(path), "give a file that can be written to")
    # A shell makes several names of *.jsonl, and the first of them would be the page.
    if path.is_file() and path.stat().st_size and not _is_page(path):
        raise ConfigError("--html", str(path), "give a new file, or a page to write over; this is none")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(BEGINNING)).lower() == BEGINNING


def show_page(path: Path, figures: Mapping[str, object]) -> None:
    """Write what ``--json`` prints as a page, and say where it is.

    Raises:
        ConfigError: It cannot be drawn.
        OSError: It cannot be written.
    """
    from kvtide.sim import page
    from kvtide.sim.curves import curves_of

    command = shlex.join(["kvtide", *sys.argv[1:]])
    page.write_page(path, curves_of({**figures, "command": command}))
    note(f"wrote {path}")
