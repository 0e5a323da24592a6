"""The judge of equality can say no."""

from dataclasses import replace

import pytest

from kvtide.demo.exactness import Answer, Difference, Record, judge


def answer(**changes: object) -> Answer:
    fine = Answer(
        prompt_tokens=1300,
        cached_tokens=1280,
        loaded_tokens=1280,
        token_ids=(5, 6, 7),
        logprobs=((-0.25).hex(), (-0.5).hex(), (-0.75).hex()),
    )
    return replace(fine, **changes)


def record(turn: int = 1, kvtide: Answer | None = None, reference: Answer | None = None) -> Record:
    return Record(0, turn, kvtide or answer(), reference or answer(loaded_tokens=0))


def test_equal_answers_at_equal_cached_length_are_exact() -> None:
    verdict = judge([record(1), record(2)])
    assert verdict.exact
    assert (verdict.compared_requests, verdict.prompt_tokens, verdict.loaded_tokens) == (2, 2600, 2560)
    assert verdict.first_divergence is None


def test_nothing_to_compare_is_not_exact() -> None:
    assert not judge([]).exact


def test_a_request_that_loaded_too_little_is_not_compared() -> None:
    verdict = judge([record(kvtide=answer(loaded_tokens=511, token_ids=(5, 6, 8)))])
    assert verdict.compared_requests == 0
    assert not verdict.exact


def test_a_request_that_loaded_just_enough_is_compared() -> None:
    assert judge([record(kvtide=answer(loaded_tokens=512))]).compared_requests == 1


def test_the_last_bit_of_one_logprob_is_enough() -> None:
    nearly = (-0.5 * (1 + 2**-52)).hex()
    verdict = judge([record(1), record(2, kvtide=answer(logprobs=((-0.25).hex(), nearly, (-0.75).hex())))])
    assert not verdict.exact
    assert verdict.diverging_requests == 1
    first = verdict.first_divergence
    assert first is not None
    assert (first.user, first.turn, first.position, first.difference) == (0, 2, 1, Difference.LOGPROB)
    assert (first.kvtide, first.reference) == (nearly, (-0.5).hex())


def test_a_differing_token_is_named_with_both_values() -> None:
    verdict = judge([record(kvtide=answer(token_ids=(5, 6, 8)))])
    assert not verdict.exact
    assert str(verdict.first_divergence) == (
        "user 0, turn 1, generated token 2: token 8 with kvtide, 7 in the reference"
    )


@pytest.mark.parametrize("side", ["kvtide", "reference"])
def test_a_missing_answer_is_not_exact(side: str) -> None:
    verdict = judge([record(1), replace(record(2), **{side: None})])
    assert not verdict.exact
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.difference is Difference.MISSING


@pytest.mark.parametrize(
    "short",
    [
        answer(token_ids=(5, 6), logprobs=((-0.25).hex(), (-0.5).hex())),
        answer(logprobs=((-0.25).hex(), (-0.5).hex())),
        answer(token_ids=(5, 6)),
    ],
)
def test_an_answer_cut_short_is_not_exact(short: Answer) -> None:
    verdict = judge([record(kvtide=short)])
    assert not verdict.exact
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.difference, verdict.first_divergence.position) == (Difference.LENGTH, 2)


def test_two_empty_answers_prove_nothing() -> None:
    empty = answer(token_ids=(), logprobs=())
    assert not judge([record(kvtide=empty, reference=empty)]).exact


@pytest.mark.parametrize("change", [{"cached_tokens": 1248}, {"prompt_tokens": 1301}])
def test_another_cached_length_is_listed_and_not_compared(change: dict[str, int]) -> None:
    verdict = judge([record(1), record(2, reference=answer(loaded_tokens=0, **change))])
    assert verdict.exact
    assert verdict.compared_requests == 1
    assert [(odd.user, odd.turn) for odd in verdict.not_comparable] == [(0, 2)]


def test_only_incomparable_requests_are_not_exact() -> None:
    assert not judge([record(kvtide=answer(cached_tokens=1248))]).exact
