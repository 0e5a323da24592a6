"""What the command line says, and where.

Results go to stdout, all else to stderr, so that a result can be piped. Knows the terminal; does not know
settings or vLLM.
"""

import logging
from importlib.metadata import version
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

from kvtide.errors import KVTideError

MAX_WIDTH = 100
WRONG = 2  # the exit code of a command that was given something wrong


def own_version() -> str:
    """Say which kvtide this is, as its package says it."""
    return version("kvtide")


def note(text: str) -> None:
    """Say one line to whoever watches; never part of a result."""
    typer.echo(f"kvtide: {text}", err=True)


def refuse(error: KVTideError) -> NoReturn:
    """End the command with the error's own words."""
    typer.secho(f"kvtide: {error}", err=True, fg=typer.colors.RED)
    raise typer.Exit(WRONG)


def show(table: Table) -> None:
    """Print a table on stdout, never wider than MAX_WIDTH columns."""
    console = Console(highlight=False)
    console.print(table, width=min(console.width, MAX_WIDTH))


class _Notes(logging.Handler):
    """Passes warnings on as notes; looks up stderr each time, as whoever captures it replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def warnings_as_notes() -> None:
    """Show warnings of the package on stderr. Safe to call again."""
    logger = logging.getLogger("kvtide")
    if not any(isinstance(handler, _Notes) for handler in logger.handlers):
        logger.addHandler(_Notes(logging.WARNING))
