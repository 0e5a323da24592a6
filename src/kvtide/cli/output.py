"""What the command line says, and where.

Results go to stdout, all else to stderr, so that a result can be piped. Knows the terminal; does not know
settings or vLLM.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

from kvtide.errors import KVTideError

MAX_WIDTH = 100
WRONG = 2  # the exit code of a command that was given something wrong
UNREAD = 141
"""The exit code of a command whose reader has gone, as a shell has it; 1 would mean that there is damage."""


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


class _Stdout(Console):
    """One that lets whoever calls know that nobody reads on, instead of ending the process with 1."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def show(table: Table) -> None:
    """Print a table on stdout, never wider than MAX_WIDTH columns."""
    console = _Stdout(highlight=False)
    console.print(table, width=min(console.width, MAX_WIDTH))


@contextlib.contextmanager
def quiet_when_unread() -> Iterator[None]:
    """End the command without a word when whoever read its output has gone, as ``head`` does."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                # Here rather than when Python ends, which would complain on stderr.
                sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # rich, with which typer writes help, makes an exit with 1 of it.
        if not (isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)):
            raise
        _leave_the_rest_to_nobody()
        raise typer.Exit(UNREAD) from None


def _leave_the_rest_to_nobody() -> None:
    # What is left in their buffers is written when Python ends.
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())


class _Notes(logging.Handler):
    """Passes warnings on as notes; looks up stderr each time, as whoever captures it replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def warnings_as_notes() -> None:
    """Show warnings of the package on stderr. Safe to call again."""
    logger = logging.getLogger("kvtide")
    if not any(isinstance(handler, _Notes) for handler in logger.handlers):
        logger.addHandler(_Notes(logging.WARNING))
