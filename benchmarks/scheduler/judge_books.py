"""What the samples of the books say: weight, garbage collection, the slowest call, and scattered slots.

Pure. Refuses samples of books that were not full, of work that was not done, of an hour without evictions.
"""

from collections.abc import Mapping, Sequence

from benchmarks.frame.bars import Bar, at_least, at_most
from benchmarks.frame.plots import Bars
from benchmarks.frame.registry import Sample, UnfitError, Verdict
from benchmarks.frame.statistics import median
from benchmarks.scheduler.judge_calls import LIMIT_MS, slowest
from benchmarks.scheduler.vocabulary import CATALOG, FULL_SHARE, LARGE, OURS, RUN_CHUNKS, SESSIONS, books_of

CHUNK_BYTES: Mapping[int, int] = {32: 80, 1: 300}
"""Bytes a chunk at most, by the chunks of a run."""
COLLECTION_MS = 20.0
SLOTS_PER_RUN = 64.0

MIN_COLLECTIONS = 5
MIN_LOADS = 300


def judge_catalog(samples: Sequence[Sample]) -> Verdict:
    """Judge a million chunks, by how long the runs are that they came in.

    Raises:
        UnfitError: The longest or the shortest runs are missing, or books were not filled and used as they
            should be.
    """
    found = {one["run_chunks"]: one for one in samples if one["row"] == CATALOG}
    if not set(CHUNK_BYTES) <= set(found) <= set(RUN_CHUNKS):
        raise UnfitError(f"books of runs of {sorted(found)} chunks; {sorted(CHUNK_BYTES)} are needed")
    runs = [run for run in RUN_CHUNKS if run in found]
    for one in found.values():
        _check_books(one)
    weights = {run: found[run]["grown_bytes"] / found[run]["chunks"] for run in runs}
    bars: list[Bar] = [
        at_most(f"bytes a chunk, runs of {run}", weights[run], limit) for run, limit in CHUNK_BYTES.items()
    ]
    notes: list[str] = []
    for run in runs:
        added_ms = median(found[run]["collections_after_ms"]) - median(found[run]["collections_before_ms"])
        bars.append(at_most(f"full garbage collection longer by ms, runs of {run}", added_ms, COLLECTION_MS))
    for run in runs:
        call = slowest(samples, books_of(run), OURS)
        bars.append(at_most(f"slowest call of a primitive, ms, runs of {run}", call.ms, LIMIT_MS))
        notes.append(f"runs of {run}: {weights[run]:.0f} bytes a chunk; slowest call: {call.text}")
    return Verdict(tuple(bars), tuple(notes), (_plot(weights),))


def _check_books(one: Sample) -> None:
    name = books_of(one["run_chunks"])
    if one["capacity"] != LARGE or not FULL_SHARE <= one["chunks"] / LARGE <= 1:
        raise UnfitError(f"{name}: {one['chunks']} chunks of {one['capacity']}; they have to be {LARGE}")
    if one["found_share"] < FULL_SHARE:
        raise UnfitError(f"{name}: only {one['found_share']:.0%} of what was stored is found")
    # Whoever keeps a little free has evicted some of it before.
    if not one["stored_chunks"] or abs(one["evicted_chunks"] / one["stored_chunks"] - 1) > 0.5:
        raise UnfitError(f"{name}: {one['evicted_chunks']} chunks evicted for {one['stored_chunks']} stored")
    if one["stored_chunks"] != one["wanted_chunks"]:
        raise UnfitError(f"{name}: {one['stored_chunks']} of {one['wanted_chunks']} chunks were stored")
    for when in ("collections_before_ms", "collections_after_ms"):
        if len(one[when]) < MIN_COLLECTIONS:
            raise UnfitError(f"{name}: {len(one[when])} collections; {MIN_COLLECTIONS} are needed")


def judge_hour(samples: Sequence[Sample]) -> Verdict:
    """Judge how scattered the slots are that sessions read.

    Raises:
        UnfitError: Nothing was read, or the pool was not full and evicting.
    """
    hours = [one for one in samples if one["row"] == SESSIONS]
    if len(hours) != 1:
        raise UnfitError(f"{len(hours)} hours of sessions; one is needed")
    (hour,) = hours
    loads = hour["late_loads"]
    if hour["full_at_s"] is None or hour["full_at_s"] > hour["hour_s"] / 2:
        raise UnfitError(f"the pool was full after {hour['full_at_s']} s of {hour['hour_s']}")
    if not hour["late_evicted_chunks"]:
        raise UnfitError("nothing was evicted in the last quarter of the hour")
    if len(loads) < MIN_LOADS:
        raise UnfitError(f"{len(loads)} loads in the last quarter of the hour; {MIN_LOADS} are needed")
    slots, runs = sum(load[0] for load in loads), sum(load[1] for load in loads)
    hits = hour["hit_tokens"] / hour["prompt_tokens"]
    note = (
        f"{hour['turns']} turns of {hour['sessions']} sessions, {hour['running_mean']:.0f} running at a time,"
        f" mean prompt {hour['prompt_tokens'] / hour['turns']:,.0f} tokens, {hits:.1%} of them hits; pool of"
        f" {hour['capacity']:,} chunks, full after {hour['full_at_s'] / 60:.0f} min; {len(loads)} loads in"
        " the last quarter; of all that is there at the end"
        f" {hour['resident_slots'] / max(hour['resident_runs'], 1):.1f} slots a run"
    )
    return Verdict((at_least("slots a contiguous run, as loaded", slots / runs, SLOTS_PER_RUN),), (note,))


def _plot(weights: Mapping[int, float]) -> Bars:
    return Bars(
        "Books of a million chunks",
        "bytes a chunk",
        tuple(f"runs of {run}" for run in weights),
        (("kvtide", tuple(weights.values())),),
    )
