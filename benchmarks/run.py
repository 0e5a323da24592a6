"""Runs benchmarks: ``make bench``, or one of them with ``make bench ONLY=name``.

Knows the command line and what is shown while it runs; what is measured is in the files beside this one.
"""

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# Started as a script, Python looks beside this file; the package is one folder up.
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

from benchmarks.frame.machine import environment, wait_quiet  # noqa: E402
from benchmarks.frame.page import page, summary  # noqa: E402
from benchmarks.frame.registry import Bench, Benchmark, Registry, Sample, UnfitError, discover  # noqa: E402
from benchmarks.frame.results import Result, as_json, judged, judged_again, write  # noqa: E402

OUT = ROOT / "build" / "bench"
WIDTH = 100
START_QUIET_S = 5.0
ALL_MET, MISSED, COULD_NOT = 0, 1, 2

screen = Console(stderr=True, highlight=False)

HELP = """Measure kvtide and hold the figures against what was promised.

Every benchmark compares things that take turns on the same machine in the same run, and promises a ratio,
not a figure: machines differ, ratios much less. A bar that is missed on a machine where others are at work
may be theirs; the run says so when it was not alone.

What is left behind, in --out: results.json (raw samples, bars, the machine), index.html (the same with
pictures, one file), and logs of the engines.

Exit code: 0 every bar was met, 1 a bar was missed, 2 something could not be measured.

Examples:

  benchmarks/run.py --list

  benchmarks/run.py --only serving     (one by name may take longer than among all)

  benchmarks/run.py --judge build/bench/results.json     (no measuring: the samples of an earlier run)
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def main(
    only: Annotated[list[str] | None, typer.Option(help="Run this one. Can be given again.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Say which there are, and run none.")] = False,
    as_text: Annotated[
        bool, typer.Option("--json", help="Print results.json on stdout instead of a table.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for what is left behind.")] = OUT,
    model: Annotated[
        Path | None, typer.Option(help="A model's folder, instead of SmolLM2-135M, which is fetched once.")
    ] = None,
    judge: Annotated[
        Path | None, typer.Option(help="Measure nothing; judge the samples of this results.json anew.")
    ] = None,
) -> None:
    registry = discover()
    if show_list:
        _list(registry)
        return
    given = Bench(out, model, lambda text, done, total: None, alone=bool(only))
    try:
        chosen = [registry.get(name) for name in only or []] or registry.all()
        machine, results = _judge(judge, registry) if judge else _measure(chosen, registry, given)
    except (KeyError, UnfitError) as error:
        screen.print(f"bench: {error.args[0]}", style="red", markup=False)
        raise typer.Exit(COULD_NOT) from None
    text = as_json(machine, results)
    if judge is None:
        write(out / "results.json", text)
        write(out / "index.html", page(machine, results))
    if as_text:
        sys.stdout.write(text)
    else:
        _show(results)
        if judge is None:
            print(f"\n{out / 'results.json'}\n{out / 'index.html'}")
    raise typer.Exit(_exit_code(results))


def _list(registry: Registry) -> None:
    for one in registry.all():
        print(f"{one.name:16} {one.about_s:4.0f} s, alone {one.alone_s:4.0f} s  {one.asks}")


def _judge(path: Path, registry: Registry) -> tuple[Mapping[str, object], list[Result]]:
    return judged_again(path, registry)


def _measure(
    chosen: Sequence[Benchmark], registry: Registry, bench: Bench
) -> tuple[Mapping[str, object], list[Result]]:
    bench.folder.mkdir(parents=True, exist_ok=True)
    machine = environment()
    quiet = wait_quiet(START_QUIET_S)
    if not quiet:
        screen.print("bench: others are at work on this machine; figures will be rough", style="yellow")
    results = [_run(one, registry, bench) for one in chosen]
    return {**machine, "quiet_at_start": quiet}, results


def _run(one: Benchmark, registry: Registry, bench: Bench) -> Result:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[name]}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    began_s = time.monotonic()
    with Progress(*columns, console=screen) as progress:
        task = progress.add_task("", total=None, name=one.name)

        def tell(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)
            if not screen.is_terminal:
                # A log gets a line a step; a terminal gets a bar.
                screen.print(
                    f"[{time.monotonic() - began_s:4.0f} s] {one.name} {done}/{total} {text}", markup=False
                )

        try:
            samples: tuple[Sample, ...] = tuple(one.measure(replace(bench, progress=tell)))
        except UnfitError as error:
            return Result(one.name, one.asks, time.monotonic() - began_s, (), None, str(error))
        except Exception as error:
            # The others' figures are not lost because this one is broken.
            screen.print(traceback.format_exc(), markup=False)
            reason = f"{type(error).__name__}: {error}"
            return Result(one.name, one.asks, time.monotonic() - began_s, (), None, reason)
    return judged(registry, one.name, one.asks, time.monotonic() - began_s, samples)


def _show(results: Sequence[Result]) -> None:
    table = Table(title="Benchmarks: what was promised, and what came out", title_justify="left")
    for name, justify in (("benchmark", "left"), ("what", "left"), ("ratio", "right"), ("bar", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left")
    table.add_column("")
    for result in results:
        for bar in result.bars:
            verdict = "[green]met[/green]" if bar.met else "[red]MISSED[/red]"
            table.add_row(
                result.name, bar.name, f"{bar.ratio:.3f}", f"{bar.sense.value} {bar.bar:g}", verdict
            )
    console = Console(highlight=False)
    console.print(table, width=min(console.width, WIDTH))
    for result in results:
        for note in result.verdict.notes if result.verdict else (f"NOT JUDGED: {result.unfit}",):
            console.print(f"{result.name}: {note}", markup=False)
    console.print(summary(results))


def _exit_code(results: Sequence[Result]) -> int:
    if any(result.verdict is None for result in results):
        return COULD_NOT
    return ALL_MET if all(bar.met for result in results for bar in result.bars) else MISSED


if __name__ == "__main__":
    app()
