"""Rates that are known come out again, also where some requests took longer for want of a core."""

from dataclasses import replace
from itertools import cycle

import pytest

from kvtide.errors import ConfigError
from kvtide.sim.serving_calibration import Observed, calibrated
from kvtide.sim.serving_rates import EngineRates

TRUE = EngineRates(2000.0, pair_s=2e-7, step_s=0.012, decode_s=0.003, front_s=0.004)
LENGTHS = ((0, 100), (0, 300), (0, 650), (32, 1200), (512, 80), (1024, 200), (0, 900))


def observed_of(rates: EngineRates, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> list[Observed]:
    """Time requests as an engine of these rates would take them, each alone."""
    found = []
    for cached, computed in lengths:
        first_s = rates.front_s + rates.step_s + rates.prompt_s(cached, computed)
        found.append(Observed(cached, computed, 9, first_s, first_s + 8 * (rates.step_s + rates.decode_s)))
    return found


def found_in(observed: list[Observed]) -> EngineRates:
    return calibrated(observed, 1e9, 2e9)


def test_rates_that_are_known_come_out_again() -> None:
    rates = found_in(observed_of(TRUE))
    assert rates.prompt_tokens_per_s == pytest.approx(2000.0, rel=1e-3)
    assert rates.pair_s == pytest.approx(2e-7, rel=1e-3)
    assert (rates.store_bytes_per_s, rates.load_bytes_per_s) == (1e9, 2e9)
    # What a step takes beside tokens is told from what a request takes by a step that decodes.
    assert rates.front_s + rates.step_s == pytest.approx(0.016, rel=1e-3)
    assert rates.step_s + rates.decode_s == pytest.approx(0.015, rel=1e-3)


def test_a_request_in_three_that_took_twice_as_long_changes_little() -> None:
    lengths = tuple((cached, count + more) for more in (0, 7, 11) for cached, count in LENGTHS)
    slow = [
        replace(one, first_token_s=factor * one.first_token_s, whole_s=factor * one.whole_s)
        for one, factor in zip(observed_of(TRUE, lengths), cycle((1.0, 2.0, 1.0)), strict=False)
    ]
    rates = found_in(slow)
    for cached, computed in ((0, 500), (1000, 60)):
        expected_s = TRUE.front_s + TRUE.step_s + TRUE.prompt_s(cached, computed)
        assert rates.front_s + rates.step_s + rates.prompt_s(cached, computed) == pytest.approx(
            expected_s, rel=0.05
        )


def test_prompts_of_much_the_same_length_tell_a_pace_and_no_more() -> None:
    rates = found_in(
        observed_of(replace(TRUE, pair_s=0.0, front_s=0.0), ((32, 1200), (32, 1300), (32, 1700)))
    )
    assert rates.front_s == rates.pair_s == 0
    assert rates.step_s == pytest.approx(0.015)
    assert rates.prompt_tokens_per_s == pytest.approx(2000.0, rel=0.02)


def test_nothing_takes_less_than_no_time() -> None:
    # Faster the longer they are: no line through these begins above 0.
    observed = [
        Observed(0, count, 2, 1e-6 * count**2, 1e-6 * count**2 + 0.01) for count in (50, 100, 200, 400)
    ]
    rates = found_in(observed)
    assert min(rates.front_s, rates.step_s, rates.decode_s, rates.pair_s) >= 0


@pytest.mark.parametrize(
    "observed",
    [
        [],
        [Observed(0, 100, 1, 0.5, 0.5)],
        [Observed(100, 0, 9, 0.5, 0.9)],
        [Observed(0, 100, 2, 0.1, 5.0), Observed(0, 120, 2, 0.1, 5.0)],
    ],
)
def test_requests_that_say_too_little_are_refused(observed: list[Observed]) -> None:
    with pytest.raises(ConfigError):
        found_in(observed)
