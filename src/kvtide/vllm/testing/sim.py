"""Walks through all configurations, as many steps as asked for, and says what happened.

``python -m kvtide.vllm.testing.sim --steps 200000 --seed 1`` or ``make sim``. Every walk is repeated by its
configuration, seed and length; a walk that ends badly prints the command that repeats it.
"""

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from kvtide.testing.faulty import KINDS
from kvtide.testing.lane_faults import TROUBLES
from kvtide.testing.virtual_prober import FATES
from kvtide.transfer.lane_calls import Kind as CallKind
from kvtide.vllm.testing.configuration import CONFIGURATIONS, DEMOTIONS, Configuration, named
from kvtide.vllm.testing.days import SORTS, WEATHERS
from kvtide.vllm.testing.draws import FAMILIES
from kvtide.vllm.testing.groups import Kind
from kvtide.vllm.testing.neighbours import DEEDS
from kvtide.vllm.testing.promises import HangError, LeakError, WrongBytesError
from kvtide.vllm.testing.report import Report
from kvtide.vllm.testing.walk import Walk

STEPS = 240_000
"""Of all configurations together: under three minutes on two cores."""

WALK_STEPS = 1250
"""Of one walk, at most; then an engine is built anew."""

STEP_CPU_S = 20.0
"""A step that computes so long never ends."""

TIERS = ("disk", "memory", "shared")

CALLS = frozenset({CallKind.READ, CallKind.WRITE})

LOADED_KINDS = [kind for kind in Kind if kind not in (Kind.RING, Kind.REPLAY)]

MUST_HAPPEN = (
    *(f"copy: {kind}" for kind in KINDS),
    *(f"day: {sort}" for sort in SORTS),
    "preemption",
    "flush",
    "job: store",
    "job: load",
    "load behind a store",
    "late answer",
    "cancelled unbegun",
    "cancelled begun",
    "past its deadline",
    "wait timed out",
    "released",
    "ended well long after it was cancelled",
    "slept beside a wedged copy",
    "load given up",
    "blocks held behind a wedged load, others ran",
    "device filled behind a wedged load",
    "asleep",
    "idle engine drains",
    "abort: waiting",
    "abort: running",
    "abort: preempted",
    "abort: ran, and loads again",
    "abort: waiting_for_remote_kvs",
    "reset: device done",
    "reset: device refused",
    "reset: connector",
    "reset: connector, load under way",
    "reset: connector, store under way",
    "new weights",
    "reset: running",
    "reset: running refused",
    "reset: running, device alone",
    "pause: paused_all",
    "pause: paused_new",
    "sleep: requests aborted",
    "sleep: requests kept",
    "sleep: with a load in flight",
    "sleep: refused",
    "sibling failed",
    "events about host memory",
    "announcements checked",
    "time jumps",
    "results early",
    "ask: stem",
    "ask: session",
    "ask: repeat",
    "ask: again",
    "ask: one token",
    "ask: long",
    "ask: longer than the host pool",
    "ask: filler",
    "ask: new",
    "ask: prompt_logprobs",
    "ask: skip_reading_prefix_cache",
    "ask: priority",
    "ask: of a sibling",
    "ask: adapter or salt",
    "engine: lazy",
    "ask: stored whole",
    *(f"engine: {family}" for family in FAMILIES),
    *(f"loaded words: {kind.value}" for kind in LOADED_KINDS),
    "engine: sibling before",
    "engine: sibling after",
    "ask: limits",
    "prompts loaded together",
    "hit again",
    "answer hit by the next turn",
    "load checked",
    "cached blocks checked",
    "stored chunks checked",
    "books checked",
    "counted: evicted_chunks",
    "counted: failed_load_requests",
    "counted: deferred_lookups",
    "counted: skipped_store_chunks|pool_full",
    "counted: skipped_store_chunks|queue_full",
    "counted: skipped_store_chunks|below_threshold",
    *(f"tiers: {weather}" for weather in WEATHERS),
    *(f"call: {kind.name.lower()} {name}" for name, able in TROUBLES.items() for kind in CALLS & able),
    *(f"engine: disk {demotion}" for demotion in DEMOTIONS),
    *(f"hit again from below: {demotion}" for demotion in DEMOTIONS),
    *(f"engine: {tier} {where}" for tier in ("memory", "shared") for where in ("below the disk", "alone")),
    "job: demote",
    "job: promote",
    "lane: read in part",
    "lane: read told late",
    "lane: read cancelled",
    "lane: read voided by a reset",
    "lane: write in part",
    "lane: write told late",
    "lane: write voided by a reset",
    "lane: open",
    "lane: full",
    "lane: out for late calls",
    "record damaged",
    "record removed",
    "reset: connector, promote under way",
    "reset: connector, demote under way",
    "reset: tiers keep what they hold",
    "restart: killed",
    "restart: in order",
    "restart: same weights",
    "restart: other weights",
    "restart: promote under way",
    "restart: demote under way",
    "hit again from below, after a restart",
    "hit again from below, pushed out",
    "tokens due from below",
    "chunks below checked",
    *(f"counted: tier_{what}_chunks|disk" for what in ("stored", "hit", "evicted", "lost", "found")),
    "counted: tier_skipped_chunks|disk,queue_full",
    *(f"counted: tier_{what}_chunks|shared" for what in ("stored", "hit", "evicted", "lost", "found")),
    *(f"question: {fate}" for fate in FATES),
    "question: nobody to ask",
    "question: nobody waits any more",
    "counted: tier_probes_late|shared",
    "told: there",
    "told: absent",
    "asked again after a while",
    "held back for an answer",
    *(f"neighbour {deed}" for deed in DEEDS),
    *(f"store: several {what} in one call" for what in ("asked for", "read", "written")),
    "store: a lead that begins within the prompt",
    "store: evicted",
    "store: corrupt record found",
    "hit again from shared, after a restart",
    "hit again from shared, pushed out",
)
"""A simulation in which one of these did not happen proves less than it says."""


Wanted = tuple[str, int, int, str]
"""One walk: its configuration, seed and length, and tiers that it has for certain, empty for any or none."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A walk that ended badly.

    Attributes:
        configuration: Its name.
        seed: Its seed.
        steps: Its length.
        kind: ``wrong bytes``, ``hangs`` or ``leaks``.
        text: What happened.
        tiers: That every walk had to have, if any.
    """

    configuration: str
    seed: int
    steps: int
    kind: str
    text: str
    tiers: str = ""

    @property
    def command(self) -> str:
        """Repeats it."""
        return (
            f"python -m kvtide.vllm.testing.sim --configuration {self.configuration} --seed {self.seed}"
            f" --steps {self.steps} --walk-steps {self.steps}"
        ) + (f" --tiers {self.tiers}" if self.tiers else "")


@dataclass(slots=True)
class Total:
    """What all walks saw."""

    report: Report = field(default_factory=Report)
    failures: list[Failure] = field(default_factory=list)

    def last_line(self) -> str:
        """Everything that matters."""
        kinds = Counter(failure.kind for failure in self.failures)
        report = self.report
        return (
            f"steps {report.steps}, requests {report.requests}, loads {report.loads}, faults {report.faults},"
            f" wrong bytes {kinds['wrong bytes']}, hangs {kinds['hangs']}, leaks {kinds['leaks']}"
        )


def walk(configuration: str, seed: int, steps: int, tiers: str = "") -> tuple[Report, Failure | None]:
    """Walk once; a bad end is a value."""
    report, failed = Report(), partial(Failure, configuration, seed, steps, tiers=tiers)
    try:
        one = Walk(named(configuration), seed, tiers)
        report = one.report
        with _watched(report):
            one.run(steps)
    except WrongBytesError as error:
        return report, failed("wrong bytes", _told(error))
    except LeakError as error:
        return report, failed("leaks", _told(error))
    except Exception as error:
        # An engine that dies leaves every request hanging.
        return report, failed("hangs", _told(error))
    return report, None


@contextmanager
def _watched(report: Report) -> Iterator[None]:
    """Have a walk end that computes and computes and never comes to its next step."""
    seen = -1

    def look(number: int, frame: object) -> None:
        nonlocal seen
        if report.steps == seen:
            raise HangError(f"step {seen} has computed for {STEP_CPU_S:.0f} s")
        seen = report.steps

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, STEP_CPU_S, STEP_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _told(error: Exception) -> str:
    lines = traceback.format_exception(error)
    return "".join(lines[-6:]).rstrip()


def plan(
    configurations: Sequence[Configuration], seed: int, steps: int, walk_steps: int, tiers: str = ""
) -> Iterator[Wanted]:
    """Share out the steps."""
    left = {one.name: -(-steps // len(configurations)) for one in configurations}
    while left:
        for name in list(left):
            length = min(walk_steps, left[name])
            yield name, seed, length, tiers
            left[name] -= length
            if left[name] <= 0:
                del left[name]
        seed += 1


def simulate(walks: Iterable[Wanted], processes: int) -> Total:
    """Run the walks, telling how it goes."""
    total, began_s, told_s = Total(), time.monotonic(), time.monotonic()
    for report, failure in _results(list(walks), processes):
        total.report.add(report)
        if failure is not None:
            total.failures.append(failure)
            print(f"{failure.kind}: {failure.configuration}, seed {failure.seed}")
            print(failure.text)
            print(f"repeat with: {failure.command}", flush=True)
        if time.monotonic() - told_s > 10:
            told_s = time.monotonic()
            print(f"{told_s - began_s:6.0f} s  {total.last_line()}", flush=True)
    seconds = time.monotonic() - began_s
    print(f"{total.report.steps / max(seconds, 1e-9):.0f} steps a second, {seconds:.0f} s")
    return total


def _results(walks: list[Wanted], processes: int) -> Iterator[tuple[Report, Failure | None]]:
    if processes < 2 or len(walks) < 2:
        for one in walks:
            yield walk(*one)
        return
    # Forked: importing vLLM takes longer than many walks.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _quiet) as pool:
        for future in as_completed([pool.submit(walk, *one) for one in walks]):
            yield future.result()


def _quiet() -> None:
    """What goes wrong on purpose is not worth a line each time."""
    for name in ("vllm", "kvtide"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    import torch

    torch.set_num_threads(1)


def show(total: Total) -> None:
    """Print how often everything happened."""
    happened = total.report.happened
    for name in sorted({*happened, *MUST_HAPPEN}):
        print(f"  {name:48s} {happened[name]:10d}")
    share = total.report.token_steps / max(1, total.report.steps)
    print(f"steps that scheduled tokens: {100 * share:.0f} %, tokens hit: {total.report.hit_tokens}")
    never = [name for name in MUST_HAPPEN if not happened[name]]
    if never:
        print(f"never happened: {', '.join(never)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m kvtide.vllm.testing.sim", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of all configurations together")
    parser.add_argument("--seed", type=int, default=1, help="of the first walk of each configuration")
    parser.add_argument("--configuration", action="append", help="one of --list; may be given several times")
    parser.add_argument("--walk-steps", type=int, default=WALK_STEPS, help="length of a walk, at most")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tiers", default="", choices=TIERS, help="every walk has such ones, chance or not")
    parser.add_argument("--list", action="store_true", help="name the configurations and end")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(one.name for one in CONFIGURATIONS))
        return 0
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of names are walked through in another order each time otherwise.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "kvtide.vllm.testing.sim", *sys.argv[1:]])
    _quiet()
    chosen = [named(name) for name in asked.configuration] if asked.configuration else CONFIGURATIONS
    print(
        f"{len(chosen)} configurations, seed {asked.seed}, {asked.steps} steps, {asked.processes} processes"
    )
    walks = plan(chosen, asked.seed, asked.steps, asked.walk_steps, asked.tiers)
    total = simulate(walks, asked.processes)
    show(total)
    for failure in total.failures:
        print(f"{failure.kind}: {failure.command}")
    print(total.last_line())
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
