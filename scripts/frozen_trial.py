#!/usr/bin/env python3
"""Freeze what lies below host memory under a loaded engine, and look whether anybody notices.

Two real vLLM engines with SmolLM2-135M and kvtide, one of them with a tier below host memory, get the same
requests in turn, a few of them running at any time. First many prompts are computed, so that on the one side
they are in the tier and on neither side in memory. Then what is behind the tier stops answering, is killed,
or becomes slow, as its kind says. From then on half of all requests begin like a prompt that only the tier
has.

Bars: time to first token, 95th percentile, at most 1.10 times that of the engine without the tier, in the
same run; no hook of the connector above 5 ms; no request fails. A hook's time is the wall's less what its
thread was ready to run and had no core (as the kernel counts it): waiting for a disk, a server or a lock
counts, neighbours do not. Ends with 0 when every bar is met, 1 when one is missed, 2 when one could not be
judged.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.frame.machine import environment  # noqa: E402
from benchmarks.frame.models import model_folder  # noqa: E402
from benchmarks.frame.registry import UnfitError as NoModelError  # noqa: E402
from frozen.judge import UnfitError, judge  # noqa: E402
from frozen.kinds import DISKS, KINDS, STORES, Kind  # noqa: E402
from frozen.shown import lines, table  # noqa: E402
from frozen.trial import rounds_of  # noqa: E402

OUT = ROOT / "build" / "frozen"
MET, MISSED, COULD_NOT = 0, 1, 2
WIDTH = 100

screen = Console(stderr=True, highlight=False)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_kinds(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help="one of those below, disks or stores; all stores without one"
    )
    parser.add_argument("--requests", type=int, default=300, help="at least so many a side (300)")
    parser.add_argument("--model", type=Path, help="a model's folder, instead of SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for reports and the engines' logs")
    parser.add_argument("--json", action="store_true", help="print what came out as JSON instead of a table")
    parser.add_argument("--is-inside", action="store_true", help=argparse.SUPPRESS)
    read = parser.parse_args(words)
    read.kinds = [name for word in read.kinds or ["stores"] for name in GROUPS.get(word, (word,))]
    for name in read.kinds:
        if name not in KINDS:
            parser.error(f"there is no {name}: there are {', '.join(KINDS)}")
    return read


def _progress() -> Progress:
    return Progress(console=screen, disable=not screen.is_terminal)


GROUPS = {"disks": tuple(DISKS), "stores": tuple(STORES)}


def _kinds() -> str:
    return "kinds:\n" + "\n".join(f"  {name:24}{kind.asks}" for name, kind in KINDS.items())


def tried(name: str, kind: Kind, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Run one trial; says what came out, or why it could not be judged."""
    out = options.out / name
    out.mkdir(parents=True, exist_ok=True)
    if kind.own_network and not options.is_inside:
        return _tried_inside(name, options, model)
    report: dict[str, Any] = {"kind": name}
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix="medium-") as folder, _progress() as bar:
            task = bar.add_task(name)

            def tell(text: str, done: int, total: int) -> None:
                bar.update(task, description=f"{name}: {text}", completed=done, total=total)
                if not screen.is_terminal:  # a log gets a line a step, a terminal a bar
                    screen.print(f"{name} {done}/{total} {text}", markup=False)

            medium = kind.make(Path(folder).resolve())
            report["medium"] = medium.name
            try:
                rounds = rounds_of(medium, model, out, options.requests, tell)
            finally:
                medium.close()
        # What is then refused can be looked at as well.
        report["rounds"] = [asdict(one) for one in rounds]
        report |= judge(rounds).record()
    except (UnfitError, RuntimeError, OSError) as error:
        report["unfit"] = str(error) or type(error).__name__
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _tried_inside(name: str, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Run one trial as a whole in a network of its own."""
    from kvtide.testing.servers.mooncake import in_own_network

    words = [sys.executable, __file__, name, "--is-inside", "--requests", str(options.requests)]
    words += ["--model", str(model.resolve()), "--out", str(options.out.resolve()), "--json"]
    path = options.out / name / "report.json"
    path.unlink(missing_ok=True)
    done = subprocess.run(in_own_network(words), stdout=subprocess.DEVNULL, check=False)
    if not path.exists():
        return {"kind": name, "unfit": f"its process ended with {done.returncode}"}
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def main() -> int:
    """Run the trials and return the exit code."""
    options = arguments()
    # Whoever is ended leaves no servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        model = model_folder(options.model, lambda text: screen.print(text, markup=False))
    except NoModelError as error:
        screen.print(f"frozen: {error}", markup=False)
        return COULD_NOT
    reports = []
    for name in options.kinds:
        reports.append(tried(name, KINDS[name], options, model))
        for line in lines(reports[-1]):
            screen.print(line, markup=False, soft_wrap=True)
    if options.json:
        shown = {one.pop("kind"): {key: one[key] for key in one if key != "rounds"} for one in reports}
        print(json.dumps({"format": 1, "environment": environment(), "kinds": shown}, indent=1))
    else:
        console = Console(highlight=False)
        console.print(table(reports), width=max(WIDTH, console.width))
    if any("unfit" in one for one in reports):
        return COULD_NOT
    return MET if all(one["passed"] for one in reports) else MISSED


if __name__ == "__main__":
    sys.exit(main())
