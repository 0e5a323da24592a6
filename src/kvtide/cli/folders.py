"""What the verbs on a folder of the disk tier have in common: how they are told, and how they tell.

Knows ages, names and bars. Does not know what lies in a folder.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtide.cli.options import NO_METAVAR
from kvtide.cli.output import MAX_WIDTH, WRONG, note, refuse, show
from kvtide.errors import ConfigError, KVTideError
from kvtide.tiers.rank_folder import RankFolder
from kvtide.tiers.records import DOUBTFUL
from kvtide.tiers.survey import DiskFolder, number_of

INTERRUPTED = 130
"""The exit code of a command that somebody stopped, as a shell has it; 1 would mean that there is damage."""

SHOWN_DIGITS = 12
"""Of a fingerprint, so many are shown to people."""

BAR_AFTER_S = 1.0
BAR_EVERY_S = 0.1

_AGE = re.compile(r"(\d{1,9})\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

PathArgument = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="The folder that the setting `disk` names.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar=NO_METAVAR, help="Print JSON for programs.")]


@contextlib.contextmanager
def refusing(as_json: bool) -> Iterator[None]:
    """End the command with 2 and the error's own words, as JSON where that was asked for."""
    try:
        yield
    except KeyboardInterrupt:
        note("stopped")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise
    except (KVTideError, OSError) as error:
        if as_json:
            print_json({"ok": False, "errors": [_plain(error)]})
            raise typer.Exit(WRONG) from None
        refuse(error if isinstance(error, KVTideError) else KVTideError(str(error)))


def print_json(found: dict[str, Any]) -> None:
    """Print a result for programs."""
    typer.echo(json.dumps(found, indent=2))


def tell(word: str, text: str, colour: str | None = None) -> None:
    """Print a line of a result, behind a word that says what it is about; a long one is folded."""
    width = min(Console().width, MAX_WIDTH)
    folded = fill(
        f"{word:<8} {text}",
        width,
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
    typer.secho(folded, fg=colour)


def tell_what_was_left_aside(folder: DiskFolder) -> None:
    """Name on stderr what is in the folder and was not used."""
    for line in folder.left_aside[:8]:
        note(f"left aside: {printable(line)}")
    if folder.left_aside[8:]:
        note(f"left aside: and {len(folder.left_aside) - 8} more")


def trouble_of(rank: RankFolder) -> str:
    """Say what is wrong with an index, once all records were listed."""
    return f"{rank.path.name}/{printable(rank.index_trouble or '')}"


def printable(text: str, length: int = 200) -> str:
    """Make text that somebody else wrote fit for a terminal."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def model_of(folder: DiskFolder, fingerprint: bytes) -> str:
    """Name the model that a fingerprint is of."""
    known = folder.models.get(fingerprint)
    return printable(known.model, 64) if known is not None and known.model else "a model not named"


def short(fingerprint: bytes) -> str:
    """Write a fingerprint for people: what ``--fingerprint`` takes."""
    return fingerprint.hex()[:SHOWN_DIGITS]


def in_doubt(generation: int) -> bool:
    """Whether records of a generation are served by nobody but the process that wrote them."""
    return bool(generation & DOUBTFUL)


def written(generation: int, served: set[int] | None = None) -> str:
    """Write a generation for people, and that it has ended when it is known and not among those served."""
    if served and generation not in served:
        return f"{number_of(generation)}, ended"
    return f"{number_of(generation)}, in doubt" if in_doubt(generation) else str(number_of(generation))


def counted(count: int, word: str) -> str:
    """Write ``1 record``, ``2,000 records``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def spans(numbers: Iterable[int]) -> str:
    """Write numbers for people: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def age(seconds: float) -> str:
    """Write an age for people: ``3 d``. A clock that was set back makes nothing younger than now."""
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def seconds_of(text: str) -> float:
    """Read an age: ``90s``, ``15m``, ``12h``, ``7d``, ``2w``.

    Raises:
        ConfigError: It is none.
    """
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError("--older-than", text, "give a number and s, m, h, d or w: 7d is seven days")
    return int(found[1]) * _SECONDS[found[2]]


@contextlib.contextmanager
def bar(doing: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show on stderr how far a command is, once it has taken a while, if somebody watches.

    Args:
        doing: What, for people.
        total: Of what is told to the function this yields; None where it is not known.
    """
    console = Console(stderr=True)
    columns = (TextColumn(doing), BarColumn(24), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
    with contextlib.ExitStack() as shown:
        progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        task = progress.add_task(doing, total=total, shown="")
        begun_s = told_s = time.monotonic()
        done = 0

        def tick(count: int) -> None:
            nonlocal done, told_s
            done += count
            now_s = time.monotonic()
            if now_s < max(begun_s + BAR_AFTER_S, told_s + BAR_EVERY_S):
                return
            if told_s == begun_s:
                shown.enter_context(progress)
            told_s = now_s
            of = f"{done:,} of {total:,}" if total is not None else f"{done:,}"
            progress.update(task, completed=done, shown=of)

        yield tick


def table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Make a table that is narrow enough for 80 columns: first names, which may be folded, then numbers."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in names:
        made.add_column(column, overflow="fold")
    for column in numbers:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def show_under(heading: str, rows: Table) -> None:
    """Print a table, or a heading alone where the table has no rows."""
    typer.secho(fill(heading, min(Console().width, MAX_WIDTH)), bold=True)
    if rows.row_count:
        show(rows)
    typer.echo()


def _plain(error: Exception) -> dict[str, Any]:
    if isinstance(error, ConfigError):
        return {"setting": error.setting, "value": error.value, "hint": error.hint}
    return {"setting": None, "value": None, "hint": str(error)}
