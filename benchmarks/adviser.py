"""What a running server says of other sizes of its memory, beside a replay of a cache of that size.

The ghosts are fed request by request, as a server feeds them, with the bounds a server has; then what they
say is held against replays of the same requests through the production host tier. There is no clock in it,
so neighbours do not matter but for the processor time, which is told and not judged. Knows the traces and
what was promised; ghosts are ``kvtide.adviser``, replays ``kvtide.sim``.
"""

import os
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.frame.bars import Bar, at_most
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.policies import DEFAULT_FOLDER, FOLDER_VARIABLE, TRACES

if TYPE_CHECKING:
    from kvtide.sim.accesses import Accesses

POLICY = "adaptive"
FRACTIONS = ("0.02", "0.04", "0.08", "0.16", "0.32")
"""Sizes of the cache that is advised on, as shares of the different blocks."""

OTHERS = ("0.5", "2", "4")
WHOLE, SAMPLED = "whole", "sampled"
SAMPLED_SHARE = 0.3
SALTS = (1, 2)
"""Each draws other sessions."""

BAR_POINTS = 1.5
STANDARD_ERRORS = 2
FIRST_REQUESTS = {"conversation": 4000, "synthetic": 4000, "agentic": 1000}
"""Of each trace, when all benchmarks are run."""

_SERIES = {
    "shown_points": "ghost_hit_points",
    "gain_points": "ghost_gain_points",
    "error_points": "ghost_error_points",
}


class Cell(NamedTuple):
    """A piece of work: a replay of a cache of some size, or the ghosts of one.

    Attributes:
        kind: ``replay``, ``whole`` or ``sampled``.
        chunk_count: Of the cache.
        salt: Of the hashes; 0 for those of the trace.
    """

    kind: str
    chunk_count: int
    salt: int = 0


def judge(samples: Sequence[Sample]) -> Verdict:
    """Hold what was said against what would have been, trace by trace.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    try:
        absent = {one["trace"]: one["absent"] for one in samples if "absent" in one}
        found = {
            trace: [one for one in samples if one["trace"] == trace]
            for trace in TRACES
            if trace not in absent
        }
        if not found:
            raise UnfitError(f"no trace could be replayed: {'; '.join(absent.values()) or 'no samples'}")
        bars = tuple(_bar(trace, _whole(trace, rows)) for trace, rows in found.items())
        notes = [f"NOT MEASURED: {trace}: {why}" for trace, why in absent.items()]
        notes += [note for trace, rows in found.items() for note in _notes(trace, rows)]
        plots = tuple(_plot(trace, rows) for trace, rows in found.items())
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None
    return Verdict(bars, tuple(notes), plots)


def _whole(trace: str, rows: Sequence[Sample]) -> dict[tuple[str, str], Sample]:
    """Sort what a server would say of a trace by size and times."""
    found: dict[tuple[str, str], Sample] = {}
    for one in rows:
        if one["kind"] == WHOLE:
            key = one["fraction"], one["times"]
            if key in found:
                raise UnfitError(f"{trace}: {key[1]} times {key[0]} twice")
            if one["shown_points"] is None:
                raise UnfitError(f"{trace}: {key[1]} times {key[0]}: too few requests to say anything")
            if not (one["access_count"] > 0 and 0 < one["judged_requests"] <= one["request_count"]):
                raise UnfitError(f"{trace}: {key[1]} times {key[0]}: nothing was asked for")
            found[key] = one
    missing = {(fraction, times) for fraction in FRACTIONS for times in OTHERS} - set(found)
    if missing:
        fraction, times = min(missing)
        raise UnfitError(f"{trace}: no sample of {times} times {fraction}")
    return found


def _off(sample: Sample) -> float:
    """Give the distance from the replay, in points: of the counters, or of what is shown of late requests."""
    return max(
        abs(sample["counted_points"] - sample["replay_points"]),
        abs(sample["shown_points"] - sample["replay_late_points"]),
    )


def _bar(trace: str, found: Mapping[tuple[str, str], Sample]) -> Bar:
    fraction, times = max(found, key=lambda key: _off(found[key]))
    worst = found[fraction, times]
    return at_most(
        f"{trace}: points between what is said and a replay, most at {times} times {_percent(fraction)}",
        _off(worst),
        BAR_POINTS,
    )


def _notes(trace: str, rows: Sequence[Sample]) -> list[str]:
    whole = [one for one in rows if one["kind"] == WHOLE]
    sampled = [one for one in rows if one["kind"] == SAMPLED]
    first = whole[0]
    sizes = ", ".join(
        f"{_percent(one['fraction'])} ({one['chunk_count']:,})" for one in whole if one["times"] == "2"
    )
    notes = [f"{trace}: {first['request_count']:,} requests; share of the different blocks (blocks): {sizes}"]
    for times in OTHERS:
        of_times = [one for one in whole if one["times"] == times]
        for what, name in (("said", "shown_points"), ("replay", "replay_late_points")):
            figures = " ".join(f"{one[name]:6.2f}" for one in of_times)
            notes.append(f"{trace}: hits of 100 at {times:3} times: {what:6} {figures}")
    shares = " ".join(f"{one['share']:6.1%}" for one in whole if one["times"] == "2")
    notes.append(f"{trace}: sessions that are followed:      {shares}")
    if sampled:
        off = [_off_sampled(one) for one in sampled]
        sure = [one for one in sampled if one["gain_points"] is not None and one["error_points"] is not None]
        covered = sum(_off_gain(one) <= STANDARD_ERRORS * one["error_points"] for one in sure)
        notes.append(
            f"{trace}: {SAMPLED_SHARE:.0%} of the sessions: hits off by {median(off):.2f} points (median),"
            f" {max(off):.2f} (most); {covered} of {len(sure)} gains within two standard errors"
        )
    costs = sorted({one["cell"]: one["cpu_us_per_request"] for one in whole}.values())
    notes.append(
        f"{trace}: processor time of four ghosts, microseconds a request: {costs[0]:.0f} to {costs[-1]:.0f}"
    )
    return notes


def _off_sampled(sample: Sample) -> float:
    return abs(float(sample["counted_points"] - sample["replay_points"]))


def _off_gain(sample: Sample) -> float:
    return abs(float(sample["gain_points"] - sample["replay_gain_points"]))


def _percent(fraction: str) -> str:
    return f"{100 * float(fraction):g} %"


def _plot(trace: str, rows: Sequence[Sample]) -> Plot:
    whole = sorted((one for one in rows if one["kind"] == WHOLE), key=_size_of)
    sampled = sorted((one for one in rows if one["kind"] == SAMPLED), key=_size_of)
    lines = [
        Line("replay", [_size_of(one) for one in whole], [one["replay_points"] for one in whole]),
        Line(
            "said", [_size_of(one) for one in whole], [one["counted_points"] for one in whole], joined=False
        ),
    ]
    if sampled:
        name = f"said of {SAMPLED_SHARE:.0%}"
        sizes = [_size_of(one) for one in sampled]
        lines.append(Line(name, sizes, [one["counted_points"] for one in sampled], joined=False))
    return Plot(
        f"{trace}: hits that ghosts promise, and what a replay of that size hits",
        "size, % of the different blocks",
        "hits, % of the blocks asked for",
        tuple(lines),
        log_x=True,
    )


def _size_of(sample: Sample) -> float:
    return 100 * float(sample["fraction"]) * float(sample["times"])


@benchmark(
    "adviser",
    asks="Is what a server says of other sizes of its memory what a cache of that size would have hit?",
    about_s=60,
    alone_s=450,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Advise on every trace that is there."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    samples: list[Sample] = []
    for index, (trace, (path, block_tokens)) in enumerate(TRACES.items()):
        bench.progress(f"{trace}: reading", 100 * index, 100 * len(TRACES))
        if (folder / path).exists():
            samples += _advised(bench, trace, folder / path, block_tokens, 100 * index)
        else:
            samples.append({"trace": trace, "absent": f"{path} is not in {folder}: set {FOLDER_VARIABLE}"})
    return samples


def _advised(bench: Bench, trace: str, path: Path, block_tokens: int | None, done: int) -> list[Sample]:
    from itertools import islice

    from kvtide.sim.accesses import accesses_of
    from kvtide.sim.fractions import capacity_of
    from kvtide.sim.processes import available_cores, spread
    from kvtide.sim.traces import TraceOptions, read_trace

    requests = read_trace(path, options=TraceOptions(block_tokens))
    accesses = accesses_of(islice(requests, None if bench.alone else FIRST_REQUESTS[trace]))
    sizes = {one: capacity_of(one, accesses.unique_count) for one in FRACTIONS}
    cells = [Cell(kind, size, salt) for size in sizes.values() for kind, salt in _kinds(bench.alone)]
    cells += [
        Cell("replay", size)
        for size in sorted({int(float(times) * size) for size in sizes.values() for times in ("1", *OTHERS)})
    ]
    found: dict[Cell, Any] = {}
    jobs = min(available_cores(), len(cells))
    with closing(spread(_work, accesses, cells, jobs, lambda: None)) as ended:
        for index, outcome in ended:
            found[cells[index]] = outcome
            text = f"{trace}: {len(FRACTIONS)} sizes, their ghosts and replays"
            bench.progress(text, done + 100 * len(found) // len(cells), 100 * len(TRACES))
    return [
        _sample(trace, accesses, fraction, Cell(kind, size, salt), times, found)
        for fraction, size in sizes.items()
        for kind, salt in _kinds(bench.alone)
        for times in OTHERS
    ]


def _kinds(alone: bool) -> list[tuple[str, int]]:
    """Say with what the ghosts of a size are fed: a part of a trace is too short to be sampled."""
    return [(WHOLE, 0), *((SAMPLED, salt) for salt in SALTS if alone)]


def _sample(
    trace: str, accesses: "Accesses", fraction: str, cell: Cell, times: str, found: Mapping[Cell, Any]
) -> dict[str, Any]:
    said = found[cell]
    now, other = (found[Cell("replay", int(float(one) * cell.chunk_count))] for one in ("1", times))
    asked = (accesses.starts[1:] - accesses.starts[:-1]).tolist()
    # The gauges are of the last requests of the sample, which are so many of all.
    late = min(len(asked), round(said["judged_requests"] / said["share"]))
    replayed, replayed_now = 100 * sum(other) / sum(asked), 100 * sum(now) / sum(asked)
    return {
        "trace": trace,
        "kind": cell.kind,
        "cell": f"{cell.kind} {cell.chunk_count} {cell.salt}",
        "fraction": fraction,
        "times": times,
        "chunk_count": cell.chunk_count,
        "access_count": sum(asked),
        "request_count": len(asked),
        "judged_requests": said["judged_requests"],
        "share": said["share"],
        "counted_points": said["counted_points"][times],
        "shown_points": said["shown_points"].get(times),
        "gain_points": said["gain_points"].get(times),
        "error_points": said["error_points"].get(times),
        "replay_points": replayed,
        "replay_gain_points": replayed - replayed_now,
        "replay_late_points": 100 * sum(other[-late:]) / max(1, sum(asked[-late:])),
        "cpu_us_per_request": said["cpu_us_per_request"],
    }


# In a process of its own ---------------------------------------------------------------------------


def _work(accesses: "Accesses", cell: Cell) -> Any:
    if cell.kind == "replay":
        return _replayed(accesses, cell.chunk_count)
    return _said(accesses, cell)


def _replayed(accesses: "Accesses", chunk_count: int) -> list[int]:
    """Replay a cache of a size; returns the hits of each request, those that ask for nothing included."""
    from kvtide.sim.manager_only import manager_of, replay

    recorded = _Recorded(manager_of(POLICY, chunk_count))
    outcome = replay(accesses, recorded)  # type: ignore[arg-type]
    hits = iter(recorded.hits.tolist())
    asks = (accesses.starts[1:] > accesses.starts[:-1]).tolist()
    found = [next(hits) if one else 0 for one in asks]
    if sum(found) != outcome.hit_count:
        raise UnfitError("the hits of the requests are not those of the replay")
    return found


class _Recorded:
    """A manager that notes what each lookup has found."""

    def __init__(self, manager: object) -> None:
        self._manager = manager
        self.hits = array("q")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def lookup(self, run: object, ctx: object) -> Any:
        found = self._manager.lookup(run, ctx)  # type: ignore[attr-defined]
        self.hits.append(found.ready_count)
        return found


def _said(accesses: "Accesses", cell: Cell) -> dict[str, Any]:
    """Feed the ghosts of a cache of a size; returns what they say in the end."""
    from xxhash import xxh3_64_digest

    from kvtide.adviser.ghosts import Ghosts
    from kvtide.adviser.tier_ghosts import sizes_of
    from kvtide.advising import Arrival, GhostPlan, GhostTier, fingerprints
    from kvtide.metrics import HOST

    if cell.salt:
        salted = [xxh3_64_digest(one, seed=cell.salt) for one in accesses.hashes]
        accesses = replace(accesses, hashes=salted)
    tier = GhostTier(HOST, POLICY, cell.chunk_count)
    plan = GhostPlan(accesses.block_tokens, (tier,))
    if cell.kind == SAMPLED:
        plan = replace(plan, most_chunks=int(SAMPLED_SHARE * sum(sizes_of(tier, cell.chunk_count))))
    ghosts = Ghosts(plan)
    cpu_s = 0.0
    prompts = accesses.prompts()
    for visit, size in enumerate((accesses.starts[1:] - accesses.starts[:-1]).tolist()):
        # A prompt without a full block is told, too.
        hashes = next(prompts)[1] if size else []
        chunks = fingerprints(hashes, 0, size, 1)
        arrival = Arrival(
            visit, float(accesses.arrivals_s[visit]), max(1, size * accesses.block_tokens), chunks
        )
        began_s = time.thread_time()
        ghosts.feed(arrival)
        cpu_s += time.thread_time() - began_s
    answers = ghosts.answers()
    times = ("1", *OTHERS)
    queried = answers["ghost_queried_tokens|"]
    return {
        "share": answers["ghost_sampled_share|"],
        "judged_requests": answers["ghost_judged_requests|"],
        "counted_points": {one: 100 * answers[f"ghost_hit_tokens|{HOST},{one}"] / queried for one in times},
        "cpu_us_per_request": 1e6 * cpu_s / max(1, accesses.request_count),
    } | {
        name: {one: answers[key] for one in times if (key := f"{series}|{HOST},{one}") in answers}
        for name, series in _SERIES.items()
    }
