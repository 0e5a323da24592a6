"""What kvtide's shared tiers reach of what each store's own client reaches.

The same records are put and got through the production lane and tier, and by as many threads of the store's
own client, in turn. Knows what is compared and what was promised; the arms and the processes they take turns
in are in ``storage``.
"""

import itertools
from collections.abc import Sequence

from benchmarks.frame.bars import Bar, at_least
from benchmarks.frame.children import in_child
from benchmarks.frame.machine import QUIET_CORES
from benchmarks.frame.plots import Bars
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.frame.rounds import undisturbed, whole_rounds
from benchmarks.frame.statistics import median, ratio_interval, ratio_of_medians
from benchmarks.storage.store_names import (
    ARMS,
    DIRECTIONS,
    FILES,
    GET,
    PUT,
    RADOSGW,
    RECORD_BYTES,
    THREADS,
    WORK,
)
from benchmarks.storage.vocabulary import OURS, PLAIN, size_name

BAR = 0.85
MIN_ROUNDS = 7
LIMIT_S = 600.0  # of each; a quiet machine takes 10 to 40
SHOWN = "is shown and has no bar; make bench ONLY=stores measures it"
"""Why what is left out among all benchmarks is left out."""

LABELS = {OURS: "kvtide", PLAIN: f"its own client, {THREADS} threads"}

Rounds = list[dict[str, Sample]]
Row = tuple[str, int, str]
"""Kind of store, bytes of a record, direction."""


def judge(samples: Sequence[Sample]) -> Verdict:
    """Compare the arms, store by store.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    try:
        absent = {one["kind"]: one["absent"] for one in samples if "absent" in one}
        taken = [one for one in samples if "absent" not in one]
        kinds = _kinds(taken, absent)
        _check(taken)
        found = {
            (kind, size, what): _rounds(taken, (kind, size, what))
            for kind in kinds
            for size in RECORD_BYTES
            for what in WORK[kind].directions
        }
        quiet = {row: undisturbed(every, QUIET_CORES) for row, every in found.items()}
        used = {row: quiet[row] if len(quiet[row]) >= MIN_ROUNDS else found[row] for row in found}
        bars = tuple(_bar(row, rounds) for row, rounds in used.items() if row[2] in WORK[row[0]].judged)
        notes = [f"NOT MEASURED: {kind}: {why}" for kind, why in absent.items()]
        notes += [_quiet_note(found, quiet), *(_note(row, rounds) for row, rounds in used.items())]
        plots = tuple(_plot(what, used) for what in DIRECTIONS)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None
    return Verdict(bars, tuple(notes), plots)


def _kinds(taken: Sequence[Sample], absent: dict[str, str]) -> list[str]:
    """List the stores that were measured; one that is neither measured nor absent was lost on the way."""
    there = {one["kind"] for one in taken}
    due = set(WORK) - set(absent) - (set() if RADOSGW in absent else {FILES})
    if there != due:
        raise UnfitError(f"samples of {', '.join(sorted(there ^ due))}: lost, or too many")
    if not any(WORK[kind].judged for kind in there):
        raise UnfitError("no store could be measured")
    return [kind for kind in WORK if kind in there]


def _check(samples: Sequence[Sample]) -> None:
    for sample in samples:
        where = f"{sample['kind']}, {size_name(sample['record_bytes'])}, {sample['what']}, {sample['arm']}"
        if sample["what"] == GET and sample["wrong_chunks"]:
            raise UnfitError(f"{where}: {sample['wrong_chunks']} records were not what had been put")
        if sample["threads"] != THREADS:
            raise UnfitError(f"{where}: {sample['threads']} threads; the bar is about {THREADS}")
        work, byte_count = WORK[sample["kind"]], sample["byte_count"]
        if byte_count < work.moved_bytes(sample["what"]) or byte_count % work.byte_count:
            raise UnfitError(f"{where}: {byte_count} bytes are another amount of work")


def _rounds(samples: Sequence[Sample], row: Row) -> Rounds:
    """Sort the samples of one row into rounds."""
    found = whole_rounds(
        [one for one in samples if (one["kind"], one["record_bytes"], one["what"]) == row], ARMS
    )
    due = min(MIN_ROUNDS, WORK[row[0]].rounds)
    if len(found) < due:
        raise UnfitError(f"{_name(row)}: {len(found)} rounds; {due} are needed")
    amounts = {one["byte_count"] for round_ in found for one in round_.values()}
    if len(amounts) > 1:
        raise UnfitError(f"{_name(row)}: samples of {', '.join(map(str, sorted(amounts)))} bytes")
    return found


def _name(row: Row) -> str:
    kind, size, what = row
    return f"{kind}, {size_name(size)}, {what}"


def _bar(row: Row, rounds: Rounds) -> Bar:
    ours, plain = _walls(rounds, OURS), _walls(rounds, PLAIN)
    return at_least(f"{_name(row)}: kvtide / its own client", ratio_of_medians(plain, ours), BAR)


def _quiet_note(found: dict[Row, Rounds], quiet: dict[Row, Rounds]) -> str:
    judged = [row for row in found if row[2] in WORK[row[0]].judged]
    loud = [f"{_name(row)} ({len(quiet[row])})" for row in judged if len(quiet[row]) < MIN_ROUNDS]
    if not loud:
        return f"of each row that has a bar {MIN_ROUNDS} rounds or more were undisturbed, and these count"
    return (
        f"NOT A QUIET MACHINE: fewer than {MIN_ROUNDS} rounds were undisturbed, so all count, in"
        f" {'; '.join(loud)}; a missed bar may be the neighbours'"
    )


def _walls(rounds: Rounds, arm: str) -> list[float]:
    return [one[arm]["wall_s"] for one in rounds]


def _speed(rounds: Rounds, arm: str) -> float:
    return median([one[arm]["byte_count"] / one[arm]["wall_s"] / 1e9 for one in rounds])


def _cpu_s_per_gib(rounds: Rounds, arm: str) -> float:
    return median([one[arm]["all_cpu_s"] / one[arm]["byte_count"] * 2**30 for one in rounds])


def _note(row: Row, rounds: Rounds) -> str:
    ours, plain = _walls(rounds, OURS), _walls(rounds, PLAIN)
    low, high = ratio_interval(plain, ours)
    speeds, cpu = (
        " and ".join(f"{figure(rounds, arm):.2f}" for arm in ARMS) for figure in (_speed, _cpu_s_per_gib)
    )
    shown = "" if row[2] in WORK[row[0]].judged else " (no bar)"
    return (
        f"{_name(row)}{shown}: {ratio_of_medians(plain, ours):.3f} ({low:.3f} to {high:.3f} in 95 % of"
        f" resamples); GB/s {speeds}; CPU s/GiB, the server's included, {cpu}; {len(rounds)} rounds"
    )


def _plot(what: str, used: dict[Row, Rounds]) -> Bars:
    rows = {row: rounds for row, rounds in used.items() if row[2] == what}
    return Bars(
        "Records put" if what == PUT else "Records got",
        "GB/s, median",
        tuple(f"{kind}, {size_name(size)}" for kind, size, _ in rows),
        tuple((LABELS[arm], tuple(_speed(rounds, arm) for rounds in rows.values())) for arm in ARMS),
    )


@benchmark(
    "stores",
    asks="How much of what a store's own client reaches does its tier reach?",
    about_s=124,
    alone_s=240,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Let the arms take turns, each store in a process of its own; files only where there is no radosgw."""
    brief = not bench.alone
    left_out = {kind for kind, work in WORK.items() if not work.rounds_of(brief)}
    due = [kind for kind in WORK if kind not in left_out]
    steps = sum(1 + len(RECORD_BYTES) * (1 + WORK[kind].rounds_of(brief)) for kind in due if kind != FILES)
    done = itertools.count()
    samples: list[Sample] = [{"kind": kind, "absent": SHOWN} for kind in sorted(left_out)]
    for kind in due:
        if kind == FILES and not any(one["kind"] == RADOSGW and "absent" in one for one in samples):
            continue
        work = WORK[kind]
        found = in_child(
            "benchmarks.storage.stores_child:measure_store",
            (
                kind,
                str(bench.folder / "stores"),
                THREADS,
                RECORD_BYTES,
                work.byte_count,
                work.rounds_of(brief),
                work.gets,
            ),
            bench.folder / "stores.log",
            lambda text: bench.progress(text, min(next(done), steps), steps),
            LIMIT_S,
        )
        samples += [one for one in found if "absent" in one or one["what"] in work.directions]
    return samples
