"""What the samples of the part without hits say: kvtide against an engine without a connector."""

from collections.abc import Mapping, Sequence

from benchmarks.frame.bars import at_least, at_most
from benchmarks.frame.machine import QUIET_CORES
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Sample, UnfitError, Verdict
from benchmarks.frame.rounds import undisturbed, whole_rounds
from benchmarks.frame.statistics import median_lower_bound, paired_ratios, ratio_of_medians, spread
from benchmarks.serve.checks import check_idle, quiet_note
from benchmarks.serve.vocabulary import COLD_ARMS, MIN_ROUNDS, WITH, WITHOUT

THROUGHPUT_BAR = 0.98
LOWER_BOUND_BAR = 0.95
CPU_BAR = 1.02


def judge_cold(samples: Sequence[Sample]) -> Verdict:
    """Compare throughput and processor time, pair by pair.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    pairs = whole_rounds(samples, COLD_ARMS)
    for pair in pairs:
        _check(pair)
    if len(pairs) < MIN_ROUNDS:
        raise UnfitError(f"no hits: {len(pairs)} pairs; {MIN_ROUNDS} are needed: is the machine busy?")
    quiet = undisturbed(pairs, QUIET_CORES)
    used = quiet if len(quiet) >= MIN_ROUNDS else pairs
    speeds = {arm: [one[arm]["output_tokens"] / one[arm]["wall_s"] for one in used] for arm in COLD_ARMS}
    costs = {arm: [one[arm]["cpu_s"] / one[arm]["output_tokens"] for one in used] for arm in COLD_ARMS}
    ratios = paired_ratios(speeds[WITH], speeds[WITHOUT])
    cost_ratios = paired_ratios(costs[WITH], costs[WITHOUT])
    bars = (
        at_least("no hits, throughput against none, median of pairs", spread(ratios).median, THROUGHPUT_BAR),
        at_least("no hits, lower bound of that median", median_lower_bound(ratios), LOWER_BOUND_BAR),
        at_most(
            "no hits, CPU seconds per token against none",
            ratio_of_medians(costs[WITH], costs[WITHOUT]),
            CPU_BAR,
        ),
    )
    notes = (
        quiet_note("no hits", "pairs", len(pairs), len(quiet)),
        f"no hits: throughput ratio of pairs: {spread(ratios)}",
        f"no hits: CPU ratio of pairs: {spread(cost_ratios)}",
        *(
            f"no hits, {arm}: {spread(speeds[arm])} tokens/s, {spread(costs[arm])} CPU s/token"
            for arm in COLD_ARMS
        ),
    )
    return Verdict(bars, notes, (_plot(ratios, cost_ratios),))


def _check(pair: Mapping[str, Sample]) -> None:
    index = pair[WITH]["round"]
    for arm, sample in pair.items():
        if sample["cached_tokens"]:
            raise UnfitError(f"round {index}, {arm}: {sample['cached_tokens']} tokens were hits; none may be")
        check_idle(sample)
    if pair[WITH]["output_tokens"] != pair[WITHOUT]["output_tokens"]:
        raise UnfitError(f"round {index}: the arms did not do the same work")
    if not pair[WITH]["stored_chunks"] or not pair[WITH]["evicted_chunks"]:
        raise UnfitError(f"round {index}: kvtide did not store and evict; nothing would be measured")


def _plot(ratios: Sequence[float], cost_ratios: Sequence[float]) -> Plot:
    places = list(range(1, len(ratios) + 1))
    return Plot(
        "No hits: with kvtide / without, in the same pair",
        "pair",
        "ratio",
        (
            Line("throughput", places, ratios, joined=False),
            Line("CPU seconds per token", places, cost_ratios, joined=False),
        ),
        (("throughput at least", THROUGHPUT_BAR), ("CPU at most", CPU_BAR)),
    )
