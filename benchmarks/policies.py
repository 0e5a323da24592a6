"""What the adaptive policy hits of recorded traces, beside the other policies and the best that is possible.

Every policy at every size is a replay through the production host tier; there is no clock in it and nothing
at random, so neighbours do not matter. Knows the traces and what was promised; replays are ``kvtide.sim``.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.frame.bars import Bar, at_least
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark

FOLDER_VARIABLE = "KVTIDE_TRACES"
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "traces"

# Below the folder; and the tokens of a block where the trace has smaller ones.
TRACES: Mapping[str, tuple[str, int | None]] = {
    "conversation": ("mooncake/conversation.jsonl.gz", None),
    "synthetic": ("mooncake/synthetic.jsonl.gz", None),
    "agentic": ("weka-agentic-coding", 512),
}
FRACTIONS = ("0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.4")
FRACTIONS_AMONG_ALL = FRACTIONS[:5]
"""At the largest ones policies differ least."""

ADAPTIVE, LRU, OPTIMUM = "adaptive", "lru", "optimum"
RIVALS = (LRU, "arc", "s3fifo", "second_sight")

UNDER_LRU_BAR = -0.5
UNDER_BEST_BAR = -1.5
GAP_POINTS = 10
"""Points between LRU and the optimum from which on it is told how much of them is gained."""

Row = Mapping[str, Sample]
"""Of one size of one trace, the sample of each policy."""


def judge(samples: Sequence[Sample]) -> Verdict:
    """Hold the adaptive policy against the others, trace by trace, at the size where it does worst.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    try:
        absent = {one["trace"]: one["absent"] for one in samples if "absent" in one}
        taken = [one for one in samples if "absent" not in one]
        found = {trace: _rows(taken, trace) for trace in TRACES if trace not in absent}
        if not found:
            raise UnfitError(f"no trace could be replayed: {'; '.join(absent.values()) or 'no samples'}")
        bars = tuple(bar for trace, rows in found.items() for bar in _bars(trace, rows))
        notes = [f"NOT MEASURED: {trace}: {why}" for trace, why in absent.items()]
        notes += [note for trace, rows in found.items() for note in _notes(trace, rows)]
        plots = tuple(_plot(trace, rows) for trace, rows in found.items())
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None
    return Verdict(bars, tuple(notes), plots)


def _rows(samples: Sequence[Sample], trace: str) -> dict[str, Row]:
    """Sort the samples of a trace by size and policy."""
    measured = {*FRACTIONS_AMONG_ALL, *(one["fraction"] for one in samples if one["trace"] == trace)}
    rows: dict[str, dict[str, Sample]] = {fraction: {} for fraction in FRACTIONS if fraction in measured}
    for one in samples:
        if one["trace"] == trace:
            if one["policy"] in rows[one["fraction"]]:
                raise UnfitError(f"{trace}, {one['fraction']}: {one['policy']} twice")
            rows[one["fraction"]][one["policy"]] = one
    for fraction, row in rows.items():
        where = f"{trace}, {fraction}"
        missing = {ADAPTIVE, *RIVALS, OPTIMUM} - set(row)
        if missing:
            raise UnfitError(f"{where}: no sample of {', '.join(sorted(missing))}")
        if len({(one["capacity"], one["access_count"]) for one in row.values()}) > 1:
            raise UnfitError(f"{where}: the policies were not asked for the same")
        most = row[OPTIMUM]["hit_count"]
        better = [name for name, one in row.items() if one["hit_count"] > most]
        if better:
            raise UnfitError(f"{where}: {', '.join(better)} hit more than is possible")
    return rows


def _hits(sample: Sample) -> float:
    """Hits of 100 blocks that were asked for."""
    return 100 * sample["hit_count"] / sample["access_count"]


def _writes(sample: Sample) -> float:
    return 100 * sample["stored_count"] / sample["access_count"]


def _best(row: Row) -> str:
    return max(RIVALS, key=lambda name: _hits(row[name]))


def _bars(trace: str, rows: Mapping[str, Row]) -> tuple[Bar, Bar]:
    over_lru = {one: _hits(row[ADAPTIVE]) - _hits(row[LRU]) for one, row in rows.items()}
    over_best = {one: _hits(row[ADAPTIVE]) - _hits(row[_best(row)]) for one, row in rows.items()}
    worst, worse = min(over_lru, key=over_lru.__getitem__), min(over_best, key=over_best.__getitem__)
    return (
        at_least(
            f"{trace}: hits of 100, adaptive less lru, least at {_percent(worst)}",
            over_lru[worst],
            UNDER_LRU_BAR,
        ),
        at_least(
            f"{trace}: hits of 100, adaptive less {_best(rows[worse])}, the best of {len(RIVALS)}, least at"
            f" {_percent(worse)}",
            over_best[worse],
            UNDER_BEST_BAR,
        ),
    )


def _notes(trace: str, rows: Mapping[str, Row]) -> list[str]:
    names = [name for name in next(iter(rows.values())) if name != OPTIMUM]
    sizes = ", ".join(f"{_percent(one)} ({row[LRU]['capacity']:,})" for one, row in rows.items())
    notes = [f"{trace}: share of the different blocks (blocks): {sizes}"]
    notes += [
        f"{trace}: hits of 100: {name:12} {' '.join(f'{_hits(row[name]):6.2f}' for row in rows.values())}"
        for name in (*names, OPTIMUM)
    ]
    notes += [
        f"{trace}: writes of 100: {name:10} {' '.join(f'{_writes(row[name]):6.1f}' for row in rows.values())}"
        for name in (LRU, ADAPTIVE)
    ]
    gained = {
        one: (_hits(row[ADAPTIVE]) - _hits(row[LRU])) / (_hits(row[OPTIMUM]) - _hits(row[LRU]))
        for one, row in rows.items()
        if _hits(row[OPTIMUM]) - _hits(row[LRU]) >= GAP_POINTS
    }
    told = ", ".join(f"{share:+.0%} at {_percent(one)}" for one, share in gained.items())
    notes.append(
        f"{trace}: of what the optimum has over lru, adaptive gains"
        f" {told or 'nothing that would count: nowhere is it'}"
        f"{'' if told else f' {GAP_POINTS} points'}"
    )
    return notes


def _percent(fraction: str) -> str:
    return f"{100 * float(fraction):g} %"


def _plot(trace: str, rows: Mapping[str, Row]) -> Plot:
    sizes = [100 * float(one) for one in rows]
    names = (ADAPTIVE, *RIVALS, OPTIMUM)  # more lines than there are colours could not be told apart
    return Plot(
        f"{trace}: what a cache of each size hits",
        "size, % of the different blocks",
        "hits, % of the blocks asked for",
        tuple(Line(name, sizes, [_hits(row[name]) for row in rows.values()]) for name in names),
        log_x=True,
    )


@benchmark(
    "policies",
    asks="What does the adaptive policy hit, beside the others and the best that is possible?",
    about_s=65,
    alone_s=130,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Replay every trace that is there; as one of all benchmarks, with the policies that bars are about."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    samples: list[Sample] = []
    for index, (trace, (path, block_tokens)) in enumerate(TRACES.items()):
        bench.progress(f"{trace}: reading", 100 * index, 100 * len(TRACES))
        if (folder / path).exists():
            samples += _replayed(bench, trace, folder / path, block_tokens, 100 * index)
        else:
            samples.append({"trace": trace, "absent": f"{path} is not in {folder}: set {FOLDER_VARIABLE}"})
    return samples


def _replayed(bench: Bench, trace: str, path: Path, block_tokens: int | None, done: int) -> list[Sample]:
    from kvtide.sim.accesses import accesses_of
    from kvtide.sim.fractions import known, sweep
    from kvtide.sim.traces import TraceOptions, read_trace

    accesses = accesses_of(read_trace(path, options=TraceOptions(block_tokens)))
    # The slowest first: whoever is begun last should not be waited for.
    judged = (ADAPTIVE, *RIVALS, OPTIMUM)
    policies = (*judged, *(name for name in known() if name not in judged)) if bench.alone else judged
    fractions = FRACTIONS if bench.alone else FRACTIONS_AMONG_ALL
    due = len(policies) * len(fractions) * max(1, accesses.request_count)
    gone = told = 0

    def passed(count: int) -> None:
        nonlocal gone, told
        gone += count
        if 100 * gone // due > told:
            told = 100 * gone // due
            text = f"{trace}: {len(policies)} policies, {len(fractions)} sizes"
            bench.progress(text, done + told, 100 * len(TRACES))

    found = sweep(accesses, policies, fractions, passed=passed)
    return [
        {
            "trace": trace,
            "policy": policy,
            "fraction": fraction,
            "capacity": found.capacities[fraction],
            "unique_count": found.unique_count,
            "access_count": outcome.access_count,
            "hit_count": outcome.hit_count,
            "stored_count": outcome.stored_count,
            "evicted_count": outcome.evicted_count,
        }
        for policy, outcomes in found.outcomes.items()
        for fraction, outcome in outcomes.items()
    ]
