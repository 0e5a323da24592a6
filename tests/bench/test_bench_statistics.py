"""The numbers behind a bar, from samples whose answer is known beforehand."""

import math

import numpy as np
import pytest
from benchmarks.frame.bars import Bar, Sense, at_least, at_most
from benchmarks.frame.statistics import (
    median,
    median_lower_bound,
    paired_ratios,
    ratio_interval,
    ratio_of_medians,
    spread,
)
from hypothesis import given, settings
from hypothesis import strategies as st

NUMBERS = st.lists(st.floats(0.01, 100), min_size=1, max_size=30)


@pytest.mark.parametrize("count", [1, 2, 10, 31])
def test_the_lower_bound_on_a_constant_is_the_constant(count: int) -> None:
    assert median_lower_bound([0.96] * count) == 0.96


def test_the_lower_bound_on_a_clear_loss_is_below_the_bar() -> None:
    losses = [0.90, 0.91, 0.89, 0.92, 0.90, 0.88, 0.91, 0.90, 0.93, 0.90]
    assert 0.88 <= median_lower_bound(losses) <= 0.90


def test_a_few_wild_samples_lower_the_bound_and_not_the_median() -> None:
    calm = [1.0, 0.99, 1.01, 1.0, 1.0, 0.99, 1.01, 1.0, 1.0, 1.0]
    wild = [*calm[:6], 0.5, 0.5, 0.5, 0.5]
    assert median(wild) == pytest.approx(0.99, abs=0.005)
    assert median_lower_bound(wild) < 0.8 < median_lower_bound(calm)


def test_the_same_samples_give_the_same_bound() -> None:
    samples = list(np.random.default_rng(1).normal(1, 0.05, 16))
    assert median_lower_bound(samples) == median_lower_bound(samples)


def test_the_bound_holds_as_often_as_it_says() -> None:
    """Draw many experiments with a known median; the bound may exceed it in about one of twenty."""
    random = np.random.default_rng(7)
    trials = 100
    too_high = sum(median_lower_bound(list(random.normal(1, 0.05, 16))) > 1 for _ in range(trials))
    assert too_high / trials < 0.12


@settings(deadline=None)
@given(NUMBERS)
def test_the_bound_lies_between_the_least_sample_and_the_median(samples: list[float]) -> None:
    assert min(samples) - 1e-9 <= median_lower_bound(samples) <= median(samples) + 1e-9


@settings(deadline=None)
@given(NUMBERS, st.floats(0.1, 10))
def test_pairs_cancel_what_disturbs_both_halves(base: list[float], factor: float) -> None:
    ratios = paired_ratios([factor * one for one in base], base)
    assert ratios == pytest.approx([factor] * len(base))


def test_the_middle_half_of_known_samples() -> None:
    found = spread([5, 1, 4, 2, 3])
    assert (found.low, found.median, found.high, found.iqr) == (2, 3, 4, 2)


def test_a_ratio_of_medians_takes_each_median_first() -> None:
    # The median of the pairs' ratios would be 1.
    assert ratio_of_medians([1, 4, 9], [1, 2, 9]) == 2


@pytest.mark.parametrize("samples", [[], [math.nan], [1.0, math.inf]])
def test_what_is_no_sample_is_refused(samples: list[float]) -> None:
    for ask in (spread, median, median_lower_bound):
        with pytest.raises(ValueError, match="sample"):
            ask(samples)


@pytest.mark.parametrize(("samples", "base"), [([1, 2], [1]), ([1], [0]), ([1], [-1]), ([], [])])
def test_what_cannot_be_paired_is_refused(samples: list[float], base: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sample"):
        paired_ratios(samples, base)


def test_nothing_is_compared_with_zero() -> None:
    with pytest.raises(ValueError, match="nothing can be compared"):
        ratio_of_medians([1, 2], [0, 0])


@pytest.mark.parametrize(
    ("bar", "met"),
    [
        (at_least("speed", 0.97, 0.97), True),
        (at_least("speed", 0.9699, 0.97), False),
        (at_least("speed", 1.2, 0.97), True),
        (at_most("cost", 1.03, 1.03), True),
        (at_most("cost", 1.0301, 1.03), False),
        (at_most("cost", 0.9, 1.03), True),
        (at_least("speed", math.nan, 0.97), False),
        (at_most("cost", math.nan, 1.03), False),
    ],
)
def test_a_bar_is_met_on_its_side_and_on_itself(bar: Bar, met: bool) -> None:
    assert bar.met is met
    assert bar.record()["met"] is met


def test_a_record_says_what_the_issue_of_a_bar_is() -> None:
    assert Bar("cost", 1.25, 1.0, Sense.AT_MOST).record() == {
        "name": "cost",
        "ratio": 1.25,
        "bar": 1.0,
        "sense": "at most",
        "met": False,
    }


def test_the_interval_of_a_constant_ratio_is_that_ratio() -> None:
    base = [1.0, 3.0, 2.0, 5.0, 4.0]
    assert ratio_interval([2 * one for one in base], base) == pytest.approx((2, 2))


def test_a_wild_pair_widens_the_interval_and_the_truth_stays_within() -> None:
    base = list(np.random.default_rng(4).normal(1, 0.02, 12))
    samples = [1.25 * one for one in np.random.default_rng(5).normal(1, 0.02, 12)]
    low, high = ratio_interval(samples, base)
    assert 1.2 < low < 1.25 < high < 1.3
    wild_low, wild_high = ratio_interval([*samples[:8], 3.0, 3.0, 3.0, 3.0], base)
    assert wild_high - wild_low > high - low


def test_what_cannot_be_paired_has_no_interval() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        ratio_interval([1.0, 2.0], [1.0])
