"""Estimates in words: what more memory would bring, what less would cost, and what to take.

Two standard errors on either side of a gain are its error bar: 95 of 100 such bars have the truth in them.
More memory is advised only where a gain lies outside its bar, less only where the loss is small all over its
bar: what is not known is no reason to buy, and none to save. Knows no server and no page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvtide.adviser.reading import Estimate, TierEstimates
from kvtide.metrics import HOST
from kvtide.transfer.memory import humanised

STANDARD_ERRORS = 2
WORTH_POINTS = 1.0
"""So many more hits of 100 tokens a doubling has to bring, by default, to be worth its memory."""

SMALL_POINTS = 1.0
"""A difference below that for each doubling is hardly any."""

SHORTEST_S = 0.0005
"""Below that a time has not changed."""

_NAMES = {0.25: "a quarter of", 0.5: "half", 2.0: "twice", 4.0: "four times"}


class Verdict(Enum):
    """What is known of the difference that a size makes."""

    DIFFERS = "differs"
    ALIKE = "alike"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to take.

    Attributes:
        times: The size, as a multiple of the one that is there.
        sentence: That, and why.
    """

    times: float
    sentence: str


def bar_of(estimate: Estimate) -> float:
    """Give half the length of a gain's error bar, in points."""
    return STANDARD_ERRORS * estimate.error_points


def verdict_of(estimate: Estimate) -> Verdict:
    """Judge a size against the one that is there."""
    gain, bar = abs(estimate.gain_points), bar_of(estimate)
    if gain + bar < SMALL_POINTS * abs(math.log2(estimate.times)):
        return Verdict.ALIKE
    return Verdict.DIFFERS if gain > bar else Verdict.UNCLEAR


def sentence_of(tier: TierEstimates, estimate: Estimate) -> str:
    """Say what another size of a tier would do.

    Args:
        tier: The tier, with an estimate for the size it has.
        estimate: One of its others.
    """
    with_it = f"With {times_in_words(estimate.times)} {noun_of(tier.tier)}{_size(tier, estimate.times)}"
    gain = f"{estimate.gain_points:+.1f} ± {bar_of(estimate):.1f} points of token hits"
    later = _later(tier, estimate)
    verdict = verdict_of(estimate)
    if verdict is Verdict.UNCLEAR:
        return f"{with_it}: nothing can be said; {gain}, so there may be no difference."
    if verdict is Verdict.ALIKE:
        return f"{with_it}: hardly any difference; {gain}{later}."
    return f"{with_it}: {gain}{later}."


def now_in_words(tier: TierEstimates) -> str:
    """Say what a tier has and hits, if it says anything yet."""
    size = "" if tier.size_bytes is None else f" ({humanised(tier.size_bytes)})"
    with_it = f"With the {noun_of(tier.tier)} there is{size}"
    if tier.now is None:
        return f"{with_it}: nothing can be said yet."
    first = "" if tier.now.first_token_s is None else f", first token p50 {_seconds(tier.now.first_token_s)}"
    return f"{with_it}: {tier.now.hit_points:.1f} of 100 prompt tokens are hits{first}."


def advice_on(tier: TierEstimates, worth_points: float = WORTH_POINTS) -> Advice | None:
    """Find the smallest size from which on more does not pay; None where nothing can be said at all.

    Args:
        tier: The tier.
        worth_points: Points of token hits that each doubling has to bring.
    """
    now, noun = tier.now, noun_of(tier.tier)
    if now is None or len(tier.estimates) < 2:
        return None
    best = _largest_that_pays(tier.estimates, now, worth_points)
    bound = f"{worth_points:g} {'point' if worth_points == 1 else 'points'}"
    if best is not now:
        size = _size_or_times(tier, best)
        if best is tier.estimates[-1]:
            why = f"each doubling up to there brings {bound} or more; what lies beyond is not known"
        else:
            known = _as_far_as_is_clear(tier, best, worth_points)
            why = f"from there on a doubling brings less than {bound}{known}"
        return Advice(best.times, f"Take {size} of {noun}: {why}.{_but_later(now, best)}")
    for less in tier.estimates:
        if less.times < 1 and _most_lost(less) < _due(less, worth_points):
            why = f"it loses less than {bound} for each halving"
            return Advice(less.times, f"{_size_or_times(tier, less)} of {noun} would do: {why}.")
    if any(_is_open(one, worth_points) for one in tier.estimates if one is not now):
        return Advice(1.0, f"Leave the {noun} as it is until more requests were seen: not all is clear yet.")
    return Advice(
        1.0,
        f"Leave the {noun} as it is: more brings less than {bound} for each doubling, and less costs more.",
    )


def _due(estimate: Estimate, worth_points: float) -> float:
    """Say how many points the step from the size that is there has to bring, or to cost."""
    return worth_points * abs(math.log2(estimate.times))


def _most_lost(less: Estimate) -> float:
    return bar_of(less) - less.gain_points


def _is_open(one: Estimate, worth_points: float) -> bool:
    """Whether a size that is not taken could still turn out to be worth it."""
    due = _due(one, worth_points)
    if one.times > 1:
        return one.gain_points + bar_of(one) >= due
    return -one.gain_points - bar_of(one) < due


def _largest_that_pays(estimates: Sequence[Estimate], now: Estimate, worth_points: float) -> Estimate:
    """Go up from size to size as long as some larger one pays, skipping those that alone would not."""
    best = now
    while True:
        larger = (one for one in estimates if one.times > best.times)
        pays = next((one for one in larger if _pays(best, one, worth_points)), None)
        if pays is None:
            return best
        best = pays


def _pays(small: Estimate, large: Estimate, worth_points: float) -> bool:
    """Whether the step from one size to another is worth it, and outside its error bar."""
    gain = large.gain_points - small.gain_points
    worth = worth_points * math.log2(large.times / small.times)
    return gain >= worth and gain > _step_bar(small, large)


def _step_bar(small: Estimate, large: Estimate) -> float:
    """Half the error bar of what lies between two gains.

    Sessions that gain from four times the size gain from twice as well: with a correlation of a half or more
    the difference errs by no more than the worse of the two.
    """
    return STANDARD_ERRORS * max(small.error_points, large.error_points)


def _as_far_as_is_clear(tier: TierEstimates, best: Estimate, worth_points: float) -> str:
    for one in tier.estimates:
        if one.times <= best.times:
            continue
        most = one.gain_points - best.gain_points + _step_bar(best, one)
        if most >= worth_points * math.log2(one.times / best.times):
            return ", as far as is clear yet"
    return ""


def _but_later(now: Estimate, best: Estimate) -> str:
    """Warn of hits that save work and no time, as those of a very small model."""
    if now.first_token_s is None or best.first_token_s is None:
        return ""
    if best.first_token_s - now.first_token_s < SHORTEST_S:
        return ""
    return " But first tokens come no sooner: here a token is not loaded faster than it is computed."


def noun_of(tier: str) -> str:
    """Name a tier in a sentence."""
    return "host memory" if tier == HOST else tier


def times_in_words(times: float) -> str:
    """Write ``twice the``; of the size that is there, ``the``."""
    return "the" if times == 1 else f"{_NAMES.get(times, f'{times:g} times')} the"


def _size(tier: TierEstimates, times: float) -> str:
    return "" if tier.size_bytes is None else f" ({humanised(int(times * tier.size_bytes))})"


def _size_or_times(tier: TierEstimates, estimate: Estimate) -> str:
    if tier.size_bytes is not None:
        return humanised(int(estimate.times * tier.size_bytes))
    return f"{estimate.times:g} times the size"


def _later(tier: TierEstimates, estimate: Estimate) -> str:
    """Say how much sooner or later the first token comes."""
    if tier.now is None or tier.now.first_token_s is None or estimate.first_token_s is None:
        return ""
    change_s = estimate.first_token_s - tier.now.first_token_s
    if abs(change_s) < SHORTEST_S:
        return ", first token p50 as now"
    return f", first token p50 {'+' if change_s > 0 else '-'}{_seconds(abs(change_s))}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 0.1 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
