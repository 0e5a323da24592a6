"""The judge of the adviser's cost on planted samples."""

from typing import Any

import pytest
from benchmarks.frame.registry import UnfitError
from benchmarks.scheduler.adviser_judge import MIN_ROUNDS, judge_adviser
from benchmarks.scheduler.adviser_vocabulary import ADVISER, CHATS, LONG, OFF, ON, SWITCHES, WORKS

Samples = list[dict[str, Any]]


def planted(longer: float, rounds: int = MIN_ROUNDS) -> Samples:
    """Hooks take so many times as long with the adviser."""
    samples: Samples = [
        {"row": ADVISER, "arm": ON, "told": 700.0, "dropped": 0.0},
        {"row": ADVISER, "arm": OFF, "told": 0.0, "dropped": 0.0},
    ]
    for index in range(rounds):
        for work in WORKS:
            for arm in SWITCHES:
                us = 1000.0 * (longer if arm == ON else 1.0) + index
                hooks_us = {"on_new_request": 0.1 * us, "build_connector_meta": 0.9 * us}
                asked = 2 if work == LONG else 32
                samples.append(
                    {"row": ADVISER, "arm": arm, "work": work, "round": index}
                    | {"hooks_us": hooks_us, "busy_us": 0.9 * us, "asked": asked, "stored_chunks": 500}
                )
    return samples


@pytest.mark.parametrize(("longer", "met"), [(1.0, True), (1.049, True), (1.06, False)])
def test_hooks_may_take_a_twentieth_longer(longer: float, met: bool) -> None:
    verdict = judge_adviser([*planted(longer), {"row": "load", "arm": "vllm"}])
    assert [bar.met for bar in verdict.bars] == [met, met]
    assert [bar.bar for bar in verdict.bars] == [1.05, 1.05]
    assert f"{CHATS}: " in verdict.notes[0]


def test_an_adviser_that_was_not_there_costs_nothing_and_proves_nothing() -> None:
    samples = planted(1.0)
    samples[0]["told"] = 0.0
    with pytest.raises(UnfitError, match="there was no adviser"):
        judge_adviser(samples)


def test_one_that_is_off_and_is_told_something_is_not_off() -> None:
    samples = planted(1.0)
    samples[1]["told"] = 3.0
    with pytest.raises(UnfitError, match="told of 3 requests"):
        judge_adviser(samples)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("stored_chunks", 400, "chunks were stored"),
        ("stored_chunks", 0, "stored"),
        ("asked", 0, "looked up|lookups"),
    ],
)
def test_arms_that_did_not_do_the_same_are_not_compared(field: str, value: int, says: str) -> None:
    samples = planted(1.0)
    for one in samples[-2:]:
        one[field] = value if one["arm"] == ON or value == 0 else one[field]
    with pytest.raises(UnfitError, match=says):
        judge_adviser(samples)


def test_few_rounds_and_halves_of_rounds_are_refused() -> None:
    with pytest.raises(UnfitError, match="6 rounds"):
        judge_adviser(planted(1.0, rounds=6))
    with pytest.raises(UnfitError, match="no sample of"):
        judge_adviser(planted(1.0)[:-1])
    with pytest.raises(UnfitError, match="nobody says"):
        judge_adviser(planted(1.0)[1:])
