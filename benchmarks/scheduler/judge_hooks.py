"""What the samples of the hooks say: rows 1a to 1e, and the slowest hook.

Pure. Knows which hooks a row counts and which work every sample has to be of; samples of other work are
refused. How they were taken is not known here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.frame.bars import Bar, at_most
from benchmarks.frame.plots import Bars
from benchmarks.frame.registry import Sample, UnfitError, Verdict
from benchmarks.frame.statistics import median, ratio_of_medians, spread
from benchmarks.scheduler.judge_calls import LIMIT_MS, slowest
from benchmarks.scheduler.vocabulary import (
    ARMS,
    CHAT_REQUESTS,
    DECODE,
    FILLING_A_CHUNK,
    FULL,
    FULL_SHARE,
    LARGE,
    LOAD,
    LONG_CHUNKS,
    NATIVE,
    OURS,
    SMALL,
    STORE,
    TOKENS_PER_BLOCK,
    WAITING,
    WAITING_CHANGED,
    WAITING_REQUESTS,
    hooks_of,
)

MIN_ROUNDS = 7
EVICTED_SHARE = 0.9  # of what is stored into a full pool, over all rounds
STORED_SLACK = 0.1  # of the chunks that a decode step stores
GROWTH = 1.5
ALLOWANCE_US = 20.0

LOOKUP_HOOKS = frozenset({"on_new_request", "get_num_new_matched_tokens"})
STATISTICS_HOOKS = frozenset({"get_external_cache_hit_sources"})


@dataclass(frozen=True, slots=True)
class Timed:
    """One row of the table.

    Attributes:
        name: For the bar.
        row: Of which samples.
        resident_chunks: Of the pools.
        prompt_only: Whether generated chunks stay out of them.
        bar: Ours over vLLM's, at most.
        only: Hooks that count; all when empty.
        without: Hooks that do not count.
        demanded: Hooks without which a sample is of something else.
    """

    name: str
    row: str
    resident_chunks: int
    prompt_only: bool
    bar: float
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    demanded: frozenset[str] = frozenset({"build_connector_meta"})

    def us(self, sample: Sample) -> float:
        """Add up the calls that count."""
        calls: Mapping[str, Sequence[float]] = sample["hooks_us"]
        missing = self.demanded - set(calls)
        if missing:
            raise UnfitError(f"{self.name}: {sample['arm']} never called {', '.join(sorted(missing))}")
        return sum(
            sum(times)
            for hook, times in calls.items()
            if hook not in self.without and (not self.only or hook in self.only)
        )


_ASKED = frozenset({"get_num_new_matched_tokens"})
_COPY = frozenset({"build_connector_meta", "update_connector_output"})


def _rows(size: int, label: str) -> tuple[Timed, ...]:
    return (
        Timed(f"1a lookup, {label}", LOAD, size, False, 1 / 100, only=LOOKUP_HOOKS, demanded=LOOKUP_HOOKS),
        Timed(
            f"1b load, {label}", LOAD, size, False, 1 / 20, without=LOOKUP_HOOKS | STATISTICS_HOOKS,
            demanded=_COPY | {"update_state_after_alloc"},
        ),
        Timed(
            f"1c store, pool full, {label}", STORE, size, False, 1 / 20,
            without=LOOKUP_HOOKS | STATISTICS_HOOKS, demanded=_COPY,
        ),
        Timed(f"1d decode step, all stored, {label}", DECODE, size, False, 1 / 5),
        Timed(f"1e 64 waiting, {label}", WAITING, size, False, 1 / 100, demanded=_ASKED),
        Timed(
            f"1e the same, pool changed, {label}", WAITING_CHANGED, size, False, 1 / 100,
            demanded=_ASKED,
        ),
    )  # fmt: skip


ROWS = (
    *_rows(SMALL, "10k chunks"),
    *_rows(LARGE, "1M chunks"),
    Timed("1d decode step, prompts stored, 10k chunks", DECODE, SMALL, True, 1 / 5),
)
GROWING = ("1a lookup", "1b load", "1c store, pool full")

WORK: Mapping[str, Mapping[str, int]] = {
    LOAD: {
        "asked": 1, "later": 0, "matched_tokens": LONG_CHUNKS * TOKENS_PER_BLOCK,
        "loaded_chunks": LONG_CHUNKS, "stored_chunks": 0,
    },
    STORE: {"asked": 1, "matched_tokens": 0, "loaded_chunks": 0, "stored_chunks": LONG_CHUNKS},
    DECODE: {"asked": 0, "running": CHAT_REQUESTS, "loaded_chunks": 0},
    WAITING: {"asked": WAITING_REQUESTS, "later": WAITING_REQUESTS, "loaded_chunks": 0, "stored_chunks": 0},
    WAITING_CHANGED: {
        "asked": WAITING_REQUESTS, "later": WAITING_REQUESTS, "loaded_chunks": 0, "stored_chunks": 0,
    },
}  # fmt: skip
"""What every sample of a row has done, in either arm."""


def judge_hooks(samples: Sequence[Sample]) -> Verdict:
    """Compare the arms, row by row.

    Raises:
        UnfitError: The samples are not of the work they should be of.
    """
    _check_pools(samples)
    found: dict[str, dict[str, list[float]]] = {}
    bars: list[Bar] = []
    notes: list[str] = []
    for timed in ROWS:
        arms = _samples_of(timed, samples)
        us = {arm: [timed.us(sample) for sample in arms[arm]] for arm in ARMS}
        found[timed.name] = us
        bars.append(at_most(timed.name, ratio_of_medians(us[OURS], us[NATIVE]), timed.bar))
        notes.append(_note(timed, us, arms))
    for name in GROWING:
        small = median(found[f"{name}, 10k chunks"][OURS])
        large = median(found[f"{name}, 1M chunks"][OURS])
        bars.append(at_most(f"{name}: 1M over 10k chunks", large / (GROWTH * small + ALLOWANCE_US), 1.0))
    bar, slow = _slowest(samples)
    return Verdict((*bars, bar), (*notes, *slow), (_plot(found),))


def _check_pools(samples: Sequence[Sample]) -> None:
    pools = {(one["arm"], one["resident_chunks"]) for one in samples if one["row"] == FULL}
    for arm in ARMS:
        for size in (SMALL, LARGE):
            if (arm, size) not in pools:
                raise UnfitError(f"{arm}: no pool of {size} chunks was filled")
    for one in samples:
        if one["row"] == FULL and not FULL_SHARE <= one["chunks"] / one["resident_chunks"] <= 1:
            raise UnfitError(f"{one['arm']}: {one['chunks']} chunks in a pool of {one['resident_chunks']}")


def _samples_of(timed: Timed, samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Pick the samples of a row, and check that both arms did the same work in the same rounds."""
    arms: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
    for one in samples:
        if one["row"] != timed.row:
            continue
        if (one["resident_chunks"], one["prompt_only"]) != (timed.resident_chunks, timed.prompt_only):
            continue
        if one["arm"] not in arms:
            raise UnfitError(f"{timed.name}: a sample of {one['arm']}")
        _check_work(timed, one)
        arms[one["arm"]].append(one)
    turns = {arm: sorted(one["round"] for one in found) for arm, found in arms.items()}
    if turns[OURS] != turns[NATIVE]:
        raise UnfitError(f"{timed.name}: the arms did not take the same turns")
    if len(set(turns[OURS])) < MIN_ROUNDS:
        raise UnfitError(f"{timed.name}: {len(set(turns[OURS]))} rounds; {MIN_ROUNDS} are needed")
    if timed.row == STORE:
        _check_evictions(timed, arms)
    if timed.row == DECODE:
        _check_generated(timed, arms)
    return arms


def _check_work(timed: Timed, sample: Sample) -> None:
    for name, wanted in WORK[timed.row].items():
        if sample[name] != wanted:
            raise UnfitError(
                f"{timed.name}, {sample['arm']}, round {sample['round']}: {name} is {sample[name]},"
                f" not {wanted}"
            )


def _check_generated(timed: Timed, arms: Mapping[str, Sequence[Sample]]) -> None:
    """Check what the steps have stored: as many chunks as were filled, in most steps and in all of them."""
    wanted = 0 if timed.prompt_only else FILLING_A_CHUNK
    for arm, found in arms.items():
        stored = [one["stored_chunks"] for one in found]
        mean = sum(stored) / len(stored)
        if median(stored) != wanted or abs(mean - wanted) > STORED_SLACK * wanted:
            raise UnfitError(
                f"{timed.name}, {arm}: the steps stored {median(stored):g} chunks (median), {mean:g} (mean),"
                f" not {wanted}"
            )


def _check_evictions(timed: Timed, arms: Mapping[str, Sequence[Sample]]) -> None:
    """Check that making room is in what was timed; whoever keeps a little free may do it in another call."""
    for arm, found in arms.items():
        stored = sum(one["stored_chunks"] for one in found)
        evicted = sum(one["evicted_chunks"] for one in found)
        if evicted < EVICTED_SHARE * stored:
            raise UnfitError(f"{timed.name}, {arm}: {evicted} chunks evicted for {stored} stored")
        if median([one["evicted_chunks"] for one in found]) < EVICTED_SHARE / 2 * LONG_CHUNKS:
            raise UnfitError(f"{timed.name}, {arm}: in most rounds what was timed evicted next to nothing")


def _note(timed: Timed, us: Mapping[str, Sequence[float]], arms: Mapping[str, Sequence[Sample]]) -> str:
    whole = {arm: [one["schedule_us"] + one["update_us"] for one in found] for arm, found in arms.items()}
    of_steps = ratio_of_medians(whole[OURS], whole[NATIVE])
    text = (
        f"{timed.name}: {_times(us[OURS])} us, vLLM's {_times(us[NATIVE])} us:"
        f" 1/{1 / ratio_of_medians(us[OURS], us[NATIVE]):.3g}. Whole step {_whole(whole[OURS])} ms,"
        f" vLLM's {_whole(whole[NATIVE])} ms: {of_steps:.2f}"
    )
    if timed.row == DECODE and not timed.prompt_only:
        stores = {arm: median([one["stores"] for one in found]) for arm, found in arms.items()}
        text += f". Stores in a step: {stores[OURS]:g}, vLLM's {stores[NATIVE]:g}"
    if timed.row == STORE:
        evicted = {arm: median([one["evicted_chunks"] for one in found]) for arm, found in arms.items()}
        text += f". Evicted {evicted[OURS]:.0f}, vLLM's {evicted[NATIVE]:.0f} chunks"
    return text


def _times(us: Sequence[float]) -> str:
    found = spread(us)
    digits = 0 if found.median >= 100 else 1
    return f"{found.median:,.{digits}f} ({found.low:,.{digits}f} to {found.high:,.{digits}f})"


def _whole(us: Sequence[float]) -> str:
    return f"{median(us) / 1e3:.2f}"


def _slowest(samples: Sequence[Sample]) -> tuple[Bar, list[str]]:
    notes: list[str] = []
    found: dict[str, float] = {}
    for arm in ARMS:
        works = [hooks_of(SMALL, False), hooks_of(LARGE, False), hooks_of(SMALL, True)]
        ms, text, of = max((one.ms, one.text, of) for of in works for one in [slowest(samples, of, arm)])
        found[arm] = ms
        notes.append(f"slowest call of a hook, {arm}: {text}; {of}")
    return at_most("slowest call of a hook, ms", found[OURS], LIMIT_MS), notes


def _plot(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Bars:
    return Bars(
        "Time in the connector's hooks",
        "microseconds, median",
        tuple(found),
        tuple((arm, tuple(median(us[arm]) for us in found.values())) for arm in (NATIVE, OURS)),
        log_x=True,
    )
