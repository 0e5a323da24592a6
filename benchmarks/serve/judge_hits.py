"""What the samples with hits say: kvtide against vLLM's own connector, whose copies are the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.frame.bars import Bar, at_least
from benchmarks.frame.machine import QUIET_CORES
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Sample, UnfitError, Verdict
from benchmarks.frame.rounds import undisturbed, whole_rounds
from benchmarks.frame.statistics import median, ratio_interval, ratio_of_medians
from benchmarks.serve.checks import check_idle, quiet_note
from benchmarks.serve.vocabulary import (
    ARMS,
    CONNECTED,
    HALF,
    LOADS,
    LONG,
    MIN_ROUNDS,
    MOST,
    NO_HITS,
    SHARES,
    STOCK,
    WARM,
    WITH,
    WITHOUT,
)

NO_WORSE = 0.98
THROUGHPUT_BARS = {WARM: NO_WORSE, LONG: 1.1}
NAMES = {WARM: "short prompts", LONG: "32k-token contexts"}


@dataclass(frozen=True, slots=True)
class _Arm:
    """What an arm did, round by round.

    Attributes:
        ttft_s: The batch's median.
        tokens_per_s: Generated tokens over the batch's wall time.
        cpu_s: Per generated token.
    """

    ttft_s: list[float]
    tokens_per_s: list[float]
    cpu_s: list[float]

    def __str__(self) -> str:
        return (
            f"TTFT {1e3 * median(self.ttft_s):,.0f} ms, {median(self.tokens_per_s):.4g} tokens/s,"
            f" {1e3 * median(self.cpu_s):.3g} CPU ms a token"
        )


def judge_hits(part: str, samples: Sequence[Sample]) -> Verdict:
    """Compare TTFT and throughput of one part.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    for sample in samples:
        _check(part, sample)
    found: dict[int, dict[str, _Arm]] = {}
    notes = []
    for share in SHARES:
        of_share = [sample for sample in samples if sample["share"] == share]
        rounds = whole_rounds(of_share, ARMS if share == NO_HITS else CONNECTED)
        if not rounds and share != MOST:
            continue
        used = rounds
        if share == MOST:
            if len(rounds) < MIN_ROUNDS:
                raise UnfitError(
                    f"{NAMES[part]}: {len(rounds)} rounds; {MIN_ROUNDS} are needed: is the machine busy?"
                )
            quiet = undisturbed(rounds, QUIET_CORES)
            used = quiet if len(quiet) >= MIN_ROUNDS else rounds
            notes.append(quiet_note(NAMES[part], "rounds", len(rounds), len(quiet)))
        found[share] = {arm: _arm([one[arm] for one in used]) for arm in used[0]}
    bars = _bars(part, found[MOST])
    return Verdict(bars, (*notes, *_intervals(part, found[MOST]), *_notes(part, found)), _plots(part, found))


def _check(part: str, sample: Sample) -> None:
    load, where = LOADS[part], f"{part}, round {sample['round']}, {sample['arm']}"
    share = 0 if sample["arm"] == WITHOUT else sample["share"]
    expected = load.requests * load.prefix_tokens(share)
    if sample["cached_tokens"] != expected:
        raise UnfitError(f"{where}: {sample['cached_tokens']} tokens were hits; {expected} should be")
    if sample["output_tokens"] != load.requests * load.output_tokens:
        raise UnfitError(f"{where}: {sample['output_tokens']} tokens; the arms did not do the same work")
    if len(sample["ttft_s"]) != load.requests:
        raise UnfitError(f"{where}: {len(sample['ttft_s'])} requests; {load.requests} were asked")
    if sample["preemptions"]:
        raise UnfitError(f"{where}: requests lost their blocks; something else would be measured")
    check_idle(sample)


def _arm(samples: Sequence[Sample]) -> _Arm:
    return _Arm(
        [median(one["ttft_s"]) for one in samples],
        [one["output_tokens"] / one["wall_s"] for one in samples],
        [one["cpu_s"] / one["output_tokens"] for one in samples],
    )


def _bars(part: str, arms: Mapping[str, _Arm]) -> tuple[Bar, Bar]:
    ours, stock = arms[WITH], arms[STOCK]
    where = f"{NAMES[part]}, {MOST} % hits"
    return (
        at_least(
            f"{where}, stock's TTFT p50 over kvtide's", ratio_of_medians(stock.ttft_s, ours.ttft_s), NO_WORSE
        ),
        at_least(
            f"{where}, throughput over stock's",
            ratio_of_medians(ours.tokens_per_s, stock.tokens_per_s),
            THROUGHPUT_BARS[part],
        ),
    )


def _intervals(part: str, arms: Mapping[str, _Arm]) -> tuple[str, ...]:
    ours, stock = arms[WITH], arms[STOCK]
    ttft = ratio_interval(stock.ttft_s, ours.ttft_s)
    speed = ratio_interval(ours.tokens_per_s, stock.tokens_per_s)
    cpu = ratio_of_medians(ours.cpu_s, stock.cpu_s)
    return (
        f"{NAMES[part]}, {MOST} % hits, 95 % intervals: TTFT {ttft[0]:.3f} to {ttft[1]:.3f},"
        f" throughput {speed[0]:.3f} to {speed[1]:.3f}; CPU seconds per token {cpu:.3f} of stock's",
    )


def _notes(part: str, found: Mapping[int, Mapping[str, _Arm]]) -> list[str]:
    return [
        f"{NAMES[part]}, {share} % hits, {arm}: {told}"
        for share, arms in found.items()
        for arm, told in arms.items()
    ]


def _plots(part: str, found: Mapping[int, Mapping[str, _Arm]]) -> tuple[Plot, ...]:
    if not {NO_HITS, HALF} <= found.keys():
        return ()

    def lines(value: str, factor: float) -> tuple[Line, ...]:
        drawn = []
        for arm in ARMS:
            # Without a connector nothing comes back: whatever was stored, it computes all.
            rows = [found[NO_HITS if arm == WITHOUT else share][arm] for share in SHARES]
            drawn.append(Line(arm, SHARES, [factor * median(getattr(row, value)) for row in rows]))
        return tuple(drawn)

    return (
        Plot(f"{NAMES[part]}: median TTFT", "hits, % of prompt tokens", "ms", lines("ttft_s", 1e3)),
        Plot(f"{NAMES[part]}: throughput", "hits, % of prompt tokens", "tokens/s", lines("tokens_per_s", 1)),
    )
