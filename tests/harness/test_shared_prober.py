"""Who asks shared tiers in simulations: what is drawn for a question is what becomes of it."""

import random

import pytest

from kvtide.jobs import StorageLoadStoreSpec
from kvtide.probing import ProbeAnswer, ProbePart, ProbeQuestion
from kvtide.testing import VirtualClock
from kvtide.testing.shared_memory_tier import SharedMemoryTier, store_named
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, name_of, payload_of
from kvtide.testing.virtual_prober import FATES, QUESTIONS_LIMIT, ProberPlan, VirtualProber
from kvtide.tiers.base import TierPlace

WRITTEN = 40


def hash_of(number: int) -> bytes:
    return (number + 1).to_bytes(4, "big") * 8


class Rig:
    """A prober of a store in which the first chunks of a prompt lie."""

    def __init__(self) -> None:
        self.store = store_named({"store": "asked"})
        self.tier = SharedMemoryTier.build(TierPlace(IDENTITY, 0, 0, {"store": "asked"}))
        for number in range(WRITTEN):
            name = name_of(number, parent=number - 1 if number else None)
            self.tier.write(name, memoryview(payload_of(number, 8)), DEADLINE_S)
        self.clock = VirtualClock()
        self.plan = ProberPlan(random.Random(5))
        self.prober = VirtualProber({1: ("asked", lambda: self.tier)}, self.plan, self.clock)
        self.clock.advance(2.0)
        assert self.prober.answer_s(1) < 1.0
        self._asked = 0

    def ask(self, chunk_count: int = 60) -> int:
        self._asked += 1
        chunks = StorageLoadStoreSpec(1, 0, 0, tuple(map(hash_of, range(chunk_count))))
        self.prober.ask(ProbeQuestion(self._asked, 1, (ProbePart(chunks, 4, True),)))
        return self._asked

    def all_answers(self, seconds: float) -> list[ProbeAnswer]:
        """Take what comes within so long."""
        taken = []
        for _ in range(200):
            self.clock.advance(seconds / 200)
            taken += self.prober.take()
        return taken


def test_all_is_told_at_once_when_all_is_well() -> None:
    rig = Rig()
    question = rig.ask()
    answers = rig.prober.take()
    assert [answer.last for answer in answers] == [False, False, True]
    told = [there for answer in answers for there in answer.present]
    assert told == [True] * WRITTEN + [False] * (16 + 32 - WRITTEN)
    assert {answer.question_id for answer in answers} == {question}
    assert rig.prober.is_idle


@pytest.mark.parametrize("fate", FATES)
def test_a_last_answer_comes_to_every_question_whatever_its_fate(fate: str) -> None:
    rig = Rig()
    rig.plan.weights = {fate: 1.0}
    rig.prober._tiers[1].answer_s = 0.001
    asked = {rig.ask() for _ in range(4)}
    assert rig.prober.open_ids == asked
    answers = rig.all_answers(100.0)
    assert {answer.question_id for answer in answers if answer.last} == asked
    assert rig.prober.open_ids == set()
    for question in asked:
        of_one = [answer for answer in answers if answer.question_id == question]
        assert of_one[-1].last
        assert [answer.start for answer in of_one[:-1]] == sorted(answer.start for answer in of_one[:-1])


def test_what_is_stale_was_looked_up_when_it_was_asked() -> None:
    rig = Rig()
    rig.plan.weights = {"stale": 1.0}
    rig.prober._tiers[1].answer_s = 0.001
    rig.ask(10)
    rig.tier.discard([name_of(number).key for number in range(10)])
    told = [there for answer in rig.all_answers(60.0) for there in answer.present]
    assert told == [True] * 10
    assert rig.plan.told == {name_of(number).key for number in range(10)}


def test_nothing_more_is_told_to_who_has_gone_but_the_end() -> None:
    rig = Rig()
    rig.plan.weights = {"late": 1.0}
    rig.prober._tiers[1].answer_s = 0.001
    gone, stays = rig.ask(), rig.ask()
    rig.prober.forget([gone])
    answers = rig.all_answers(60.0)
    assert [answer.present for answer in answers if answer.question_id == gone] == [()]
    assert any(answer.present for answer in answers if answer.question_id == stays)


def test_one_question_too_many_is_answered_by_nothing() -> None:
    rig = Rig()
    rig.plan.weights = {"very late": 1.0}
    rig.prober._tiers[1].answer_s = 0.001
    for _ in range(QUESTIONS_LIMIT + 40):
        rig.prober._tiers[1].answer_s = 0.001
        rig.ask()
    first = rig.prober.take()
    assert all(answer.last for answer in first)
    assert len(rig.prober.open_ids) <= QUESTIONS_LIMIT
    rig.prober.release()
    assert {answer.question_id for answer in rig.prober.take() if answer.last} | {
        answer.question_id for answer in first
    } == set(range(1, QUESTIONS_LIMIT + 41))
