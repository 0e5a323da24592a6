"""What the demo is doing right now, for whoever waits.

Knows stages, steps and the clock. On a terminal it is a live line per stage; elsewhere, as in a log of CI,
it is a plain line as each stage begins and ends, and one now and then in between. Writes to standard error:
standard output is for results.
"""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

PLAIN_EVERY_S = 15.0


class Display:
    """Progress of named stages, as a context."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._started_s = time.monotonic()
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[now]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._plain_s = self._started_s

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end_stage()
        self._progress.stop()

    def stage(self, name: str, step_count: int) -> None:
        """Begin a stage of ``step_count`` steps; the one before it is over."""
        self._end_stage()
        self._stage = name
        self._task = self._progress.add_task(name, total=step_count, now="")
        self._plain(f"{name} ...")

    def now(self, what: str) -> None:
        """Say what is going on within the stage."""
        if self._task is not None:
            self._progress.update(self._task, now=what)

    def step(self) -> None:
        """One step of the stage is done."""
        if self._task is not None:
            self._progress.advance(self._task)
            if time.monotonic() - self._plain_s >= PLAIN_EVERY_S:
                task = self._progress.tasks[self._progress.task_ids.index(self._task)]
                self._plain(f"{self._stage}: {task.completed:.0f} of {task.total:.0f}")

    def _end_stage(self) -> None:
        if self._task is not None:
            task = self._progress.tasks[self._progress.task_ids.index(self._task)]
            self._progress.update(self._task, now="", completed=task.total)
            self._plain(f"{self._stage}: done")
            self._task = None

    def _plain(self, line: str) -> None:
        self._plain_s = time.monotonic()
        if not self._console.is_terminal:
            elapsed_s = self._plain_s - self._started_s
            self._console.print(f"[{elapsed_s:5.0f} s] {line}", markup=False, highlight=False)
