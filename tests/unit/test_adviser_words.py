"""What is said of estimates, and what is advised: worked out by hand, size by size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.adviser.reading import Estimate, TierEstimates
from kvtide.adviser.words import Verdict, advice_on, now_in_words, sentence_of, verdict_of

GIB = 1 << 30


def tier(
    *gains: tuple[float, float, float], size_bytes: int | None = 4 * GIB, name: str = "host"
) -> TierEstimates:
    """A tier with 30 points of hits; times, gain and standard error of its other sizes."""
    others = {times: Estimate(times, 30 + gain, gain, error) for times, gain, error in gains}
    return TierEstimates(
        name, size_bytes, tuple(one for _, one in sorted({**others, 1.0: Estimate(1, 30, 0, 0)}.items()))
    )


def said_of(times: float, gain: float, error: float, **more: object) -> str:
    asked = tier((times, gain, error), **more)  # type: ignore[arg-type]
    return sentence_of(asked, next(one for one in asked.estimates if one.times == times))


def advised(*gains: tuple[float, float, float], worth: float = 1.0) -> tuple[float, str]:
    advice = advice_on(tier(*gains), worth)
    assert advice is not None
    return advice.times, advice.sentence


def test_a_gain_is_said_with_its_size_and_two_standard_errors() -> None:
    assert said_of(2, 9.1, 0.4) == "With twice the host memory (8 GiB): +9.1 ± 0.8 points of token hits."
    assert said_of(4, 9.1, 0.4).startswith("With four times the host memory (16 GiB): +9.1 ± 0.8")
    assert said_of(0.5, -6.2, 0.25).startswith("With half the host memory (2 GiB): -6.2 ± 0.5 points")
    assert said_of(2, 9.1, 0.4, name="disk", size_bytes=None).startswith("With twice the disk: +9.1")


def test_times_to_first_token_are_said_as_differences() -> None:
    now = Estimate(1, 30, 0, 0, 1.7)
    more, less, same = (
        Estimate(2, 40, 10, 0.1, 0.9),
        Estimate(0.5, 20, -10, 0.1, 1.72),
        Estimate(4, 40, 10, 0.1, 1.7001),
    )
    asked = TierEstimates("host", None, (less, now, more, same))
    assert sentence_of(asked, more).endswith("of token hits, first token p50 -0.80 s.")
    assert sentence_of(asked, less).endswith("of token hits, first token p50 +20 ms.")
    assert sentence_of(asked, same).endswith("of token hits, first token p50 as now.")
    assert now_in_words(asked) == (
        "With the host memory there is: 30.0 of 100 prompt tokens are hits, first token p50 1.70 s."
    )


@pytest.mark.parametrize(
    ("gain", "error", "verdict"),
    [
        (9.1, 0.4, Verdict.DIFFERS),
        (1.0, 0.5, Verdict.UNCLEAR),  # on its bar is inside it
        (1.0, 0.49, Verdict.DIFFERS),
        (-6.0, 3.1, Verdict.UNCLEAR),
        (0.3, 0.3, Verdict.ALIKE),  # at most 0.9
        (0.3, 0.4, Verdict.UNCLEAR),
        (0.0, 0.0, Verdict.ALIKE),
        (0.99, 0.0, Verdict.ALIKE),
    ],
)
def test_a_gain_inside_its_error_bar_is_none_unless_all_of_the_bar_is_small(
    gain: float, error: float, verdict: Verdict
) -> None:
    assert verdict_of(Estimate(2, 30 + gain, gain, error)) is verdict
    said = said_of(2, gain, error)
    assert ("nothing can be said" in said) is (verdict is Verdict.UNCLEAR)
    assert ("hardly any difference" in said) is (verdict is Verdict.ALIKE)


def test_the_smallest_size_from_which_on_more_does_not_pay_is_advised() -> None:
    times, sentence = advised((0.5, -6, 0.2), (2, 9, 0.2), (4, 9.3, 0.2))
    assert (times, sentence) == (
        2,
        "Take 8 GiB of host memory: from there on a doubling brings less than 1 point.",
    )
    times, sentence = advised((0.5, -6, 0.2), (2, 5, 0.2), (4, 12, 0.2))
    assert times == 4
    assert "what lies beyond is not known" in sentence
    # Twice the size alone brings too little, four times enough for both doublings.
    assert advised((0.5, -6, 0.2), (2, 0.4, 0.1), (4, 5, 0.2))[0] == 4
    assert advised((0.5, -6, 0.2), (2, 0.4, 0.1), (4, 1.9, 0.1))[0] == 1


def test_more_is_worth_what_was_said_it_has_to_bring() -> None:
    gains = ((0.5, -6, 0.2), (2, 2.5, 0.2), (4, 4.0, 0.2))
    assert advised(*gains, worth=1)[0] == 4
    assert advised(*gains, worth=2)[0] == 2
    assert advised(*gains, worth=3)[0] == 1
    assert advised(*gains, worth=7)[0] == 0.5
    assert "2 GiB of host memory would do: it loses less than 7 points" in advised(*gains, worth=7)[1]
    # What is worth too little is a difference all the same.
    assert said_of(0.5, -6, 0.2).startswith("With half the host memory (2 GiB): -6.0 ± 0.4")


def test_what_is_not_clear_is_no_reason_to_buy_and_none_to_save() -> None:
    times, sentence = advised((0.5, -0.4, 2.0), (2, 3, 2.0), (4, 5, 3.0))
    assert (times, "until more requests were seen" in sentence) == (1, True)
    # Twice is certain, and whether four times pays is not.
    times, sentence = advised((0.5, -6, 0.2), (2, 9, 0.2), (4, 10.5, 1.0))
    assert (times, sentence.endswith("as far as is clear yet.")) == (2, True)


def test_hits_that_bring_no_first_token_sooner_are_advised_with_a_warning() -> None:
    now = Estimate(1, 30, 0, 0, 0.027)
    for first_s, warns in ((0.030, True), (0.0272, False), (0.02, False), (None, False)):
        advice = advice_on(TierEstimates("host", GIB, (now, Estimate(2, 60, 30, 1, first_s))))
        assert advice is not None
        assert (advice.times, "no sooner" in advice.sentence) == (2, warns)


def test_a_tier_that_says_nothing_yet_is_advised_nothing() -> None:
    assert advice_on(TierEstimates("host", 4 * GIB)) is None
    assert advice_on(tier()) is None
    assert now_in_words(TierEstimates("disk", 4 * GIB)).endswith("(4 GiB): nothing can be said yet.")


@settings(max_examples=50)
@given(
    gains=st.lists(st.floats(-100, 100), min_size=3, max_size=3),
    errors=st.lists(st.floats(0, 1e6), min_size=3, max_size=3),
    worth=st.floats(0.01, 100),
)
def test_whatever_is_estimated_is_said_and_more_is_advised_only_for_a_clear_gain(
    gains: list[float], errors: list[float], worth: float
) -> None:
    asked = tier(*zip((0.5, 2.0, 4.0), gains, errors, strict=True))
    advice = advice_on(asked, worth)
    assert advice is not None
    for one in asked.estimates:
        assert sentence_of(asked, one).endswith(".")
    taken = next(one for one in asked.estimates if one.times == advice.times)
    if advice.times > 1:
        assert taken.gain_points >= worth
    if advice.times < 1:
        assert -taken.gain_points + 2 * taken.error_points < worth
