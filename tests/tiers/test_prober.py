"""Who asks a shared tier: each question ends, nobody waits for it, and a tier that hangs costs one thread."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvtide.errors import ConfigError, NodeUnavailableError, TierUnavailableError
from kvtide.jobs import StorageLoadStoreSpec
from kvtide.keys import LEAD_ALIGNMENT, ChunkRun, OffloadKey
from kvtide.probing import ProbeAnswer, ProbePart, ProbeQuestion
from kvtide.testing import VirtualClock
from kvtide.testing.tiers import IDENTITY
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.breaker import Breaker
from kvtide.tiers.records import ChunkName, RecordRun
from kvtide.tiers.shared import SharedTier
from kvtide.transfer import prober as prober_module
from kvtide.transfer.prober import (
    DEADLINE_S,
    FIRST_KEYS,
    MOST_KEYS,
    WEIGHT,
    ThreadProber,
    TierProber,
    batches,
)

PATIENCE_S = 20.0
HASHES = [number.to_bytes(32, "big") for number in range(1000)]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)


class AskedTier(SharedTier):
    """Has some chunks; says so when it is let.

    Attributes:
        has: Hashes, of whatever group.
        calls: What was asked for.
        trouble: What the next calls raise, or None.
        extra: So many answers more than there should be.
        takes_s: A call lasts so long by the clock.
        opening: What the next attempts to open raise.
    """

    def __init__(self, clock: VirtualClock, has: Sequence[bytes] = ()) -> None:
        super().__init__(TierPlace(IDENTITY, 0, 0))
        self.has = set(has)
        self.calls: list[RecordRun] = []
        self.trouble: deque[Exception | None] = deque()
        self.opening: deque[Exception] = deque()
        self.extra = 0
        self.takes_s = 0.0
        self.open_count = self.closed_count = 0
        self._clock = clock
        self._may_answer = threading.Event()
        self._may_answer.set()
        self._asked = threading.Semaphore(0)

    def hold(self) -> None:
        """Have the next call not return."""
        self._may_answer.clear()

    def release(self) -> None:
        self._may_answer.set()

    def wait_asked(self) -> None:
        """Wait until one more call has begun."""
        assert self._asked.acquire(timeout=PATIENCE_S), "nothing was asked"

    def open(self) -> None:
        self.open_count += 1
        if self.opening:
            raise self.opening.popleft()

    def find(self, run: RecordRun, deadline_s: float) -> Sequence[bool]:
        assert deadline_s == DEADLINE_S
        self.calls.append(run)
        self._asked.release()
        assert self._may_answer.wait(PATIENCE_S)
        self._clock.advance(self.takes_s)
        if self.trouble and (error := self.trouble.popleft()) is not None:
            raise error
        present = [block_hash in self.has for block_hash in run.hashes]
        return (present + [True] * self.extra)[: len(present) + self.extra]

    def close(self) -> None:
        self.closed_count += 1

    # -- what nobody asks of it ---------------------------------------------------------------------

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        raise AssertionError

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        raise AssertionError

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        raise AssertionError

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        raise AssertionError

    def ping(self, deadline_s: float) -> str:
        raise AssertionError


class Asking:
    """A prober over one such tier, and all it has answered."""

    def __init__(self, has: Sequence[bytes] = HASHES) -> None:
        self.clock = VirtualClock()
        self.tier = AskedTier(self.clock, has)
        self.prober = TierProber("store", lambda: self.tier, self.clock.monotonic)
        self.answers: list[ProbeAnswer] = []

    def ask(self, number: int, *parts: ProbePart) -> None:
        self.prober.ask(ProbeQuestion(number, 1, parts or (part_of(0, 4),)))

    def ended(self, number: int) -> list[tuple[int, int, int]]:
        """Wait for the last answer to a question; say part, first chunk and count there of each before."""
        until(lambda: self._look() or any(one.last and one.question_id == number for one in self.answers))
        own = [one for one in self.answers if one.question_id == number]
        assert [one.last for one in own] == [False] * (len(own) - 1) + [True], (
            "the last one comes last, and once"
        )
        return [(one.part, one.start, sum(one.present)) for one in own[:-1]]

    def end_at_once(self, number: int) -> None:
        """See that a question has been answered by nothing already."""
        self._look()
        assert [one.last for one in self.answers if one.question_id == number] == [True]

    def _look(self) -> bool:
        self.answers += self.prober.take()
        return False

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Of each call its group, first chunk and length."""
        return [(run.group_index, run.start, len(run)) for run in self.tier.calls]


@contextmanager
def asking(has: Sequence[bytes] = HASHES) -> Iterator[Asking]:
    asked = Asking(has)
    try:
        until(lambda: asked.prober.answer_s() < math.inf)
        yield asked
    finally:
        asked.tier.release()
        asked.prober.close(PATIENCE_S)
        assert not asked.prober._thread.is_alive()
        assert asked.tier.closed_count == 1


def part_of(
    start: int, stop: int, group: int = 0, tokens_per_chunk: int = 4, in_a_row: bool = True
) -> ProbePart:
    run = ChunkRun(HASHES, group, 1, start, stop)
    return ProbePart(StorageLoadStoreSpec.of(1, run, with_lead=True), tokens_per_chunk, in_a_row)


# -- what is asked for ---------------------------------------------------------------------------------------


def test_a_long_prompt_is_asked_for_in_runs_that_grow() -> None:
    with asking() as asked:
        asked.ask(1, part_of(0, 1000))
        told = asked.ended(1)
        assert [count for _, _, count in told] == [16, 32, 64, 128, 256, 256, 248]
        assert [start for _, start, _ in told] == [0, 16, 48, 112, 240, 496, 752]
        assert max(len(run) for run in asked.tier.calls) == MOST_KEYS


def test_a_prompt_that_it_has_not_got_costs_one_short_call() -> None:
    with asking(has=()) as asked:
        asked.ask(1, part_of(0, 1000))
        assert asked.ended(1) == [(0, 0, 0)]
        assert asked.sizes == [(0, 0, FIRST_KEYS)]


def test_behind_the_first_that_is_missing_nothing_is_asked_for() -> None:
    with asking(HASHES[:20] + HASHES[30:]) as asked:
        asked.ask(1, part_of(0, 1000))
        assert asked.ended(1) == [(0, 0, 16), (0, 16, 4 + 18)]
        assert asked.answers[1].present == [True] * 4 + [False] * 10 + [True] * 18


def test_each_run_names_what_comes_before_it() -> None:
    first = LEAD_ALIGNMENT + 5
    with asking() as asked:
        asked.ask(1, part_of(first, first + 100))
        asked.ended(1)
        for run in asked.tier.calls:
            assert run.hashes == tuple(HASHES[run.start : run.start + len(run)])
            assert run.parent_hash == HASHES[run.start - 1]
            assert run.lead == tuple(HASHES[run.start - run.start % LEAD_ALIGNMENT : run.start])


def test_other_groups_are_asked_for_as_far_as_the_rows_go_and_no_further() -> None:
    with asking(HASHES[:30]) as asked:
        # 30 chunks of 8 tokens in a row: 240 tokens, which are 60 chunks of 4.
        asked.ask(1, part_of(0, 100, 0, 8), part_of(2, 100, 1, 4, in_a_row=False))
        assert asked.ended(1) == [(0, 0, 16), (0, 16, 14), (1, 2, 28)]
        assert asked.sizes == [(0, 0, 16), (0, 16, 32), (1, 2, 58)]


def test_of_two_rows_the_shorter_one_counts() -> None:
    parts = part_of(0, 40, 0, 4), part_of(0, 20, 1, 8), part_of(0, 40, 2, 4, in_a_row=False)
    with asking(HASHES[:3]) as asked:
        asked.ask(1, *parts)
        asked.ended(1)
        assert asked.sizes[-1] == (2, 0, 3)


def test_where_rows_are_known_to_begin_later_they_reach_from_there() -> None:
    with asking(HASHES[:25]) as asked:
        asked.ask(1, part_of(20, 100), part_of(0, 100, 1, in_a_row=False))
        assert asked.ended(1) == [(0, 20, 5), (1, 0, 25)]


def test_without_a_row_all_is_asked_for_in_long_runs() -> None:
    with asking(HASHES[300:]) as asked:
        asked.ask(1, part_of(0, 600, 1, in_a_row=False))
        assert asked.ended(1) == [(0, 0, 0), (0, 256, 212), (0, 512, 88)]


def test_where_a_row_has_nothing_nothing_else_is_asked_for() -> None:
    with asking(HASHES[5:]) as asked:
        asked.ask(1, part_of(0, 100), part_of(0, 100, 1, in_a_row=False))
        assert asked.ended(1) == [(0, 0, 11)]
        assert len(asked.tier.calls) == 1


@pytest.mark.parametrize("in_a_row", [True, False])
def test_runs_are_whole_and_in_order_however_long_a_part_is(in_a_row: bool) -> None:
    for start in (0, 1, 63, 64, 65, 130):
        for count in (1, 15, 16, 17, 48, 49, 255, 256, 257, 700):
            part = part_of(start, start + count, in_a_row=in_a_row)
            runs = list(batches(part, None))
            assert [one for run in runs for one in run.hashes] == HASHES[start : start + count]
            assert all(0 < len(run) <= MOST_KEYS for run in runs)


# -- questions that wait -------------------------------------------------------------------------------------


def test_questions_are_answered_in_the_order_in_which_they_came_and_nobody_waits_to_ask() -> None:
    with asking() as asked:
        asked.tier.hold()
        for number in range(1, 6):
            asked.ask(number)
        assert asked.prober.take() == []
        asked.tier.release()
        asked.ended(5)
        assert [one.question_id for one in asked.answers if one.last] == [1, 2, 3, 4, 5]


def test_what_is_forgotten_before_its_turn_is_not_asked_and_ends_all_the_same() -> None:
    with asking() as asked:
        asked.tier.hold()
        for number in range(1, 5):
            asked.ask(number, part_of(number, number + 1))
        asked.tier.wait_asked()
        asked.prober.forget([1, 3, 99])
        asked.tier.release()
        assert (asked.ended(4), asked.ended(3), asked.ended(1)) == ([(0, 4, 1)], [], [(0, 1, 1)])
        assert [start for _, start, _ in asked.sizes] == [1, 2, 4]
        asked.prober.forget([1, 2, 3, 4, 99])
        assert not asked.prober._forgotten, "what has ended leaves no name behind"


def test_beyond_its_limit_the_oldest_question_ends_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober_module, "QUESTIONS_LIMIT", 3)
    with asking() as asked:
        asked.tier.hold()
        asked.ask(1)
        asked.tier.wait_asked()
        for number in range(2, 7):
            asked.ask(number, part_of(number, number + 1))
        asked.prober.forget([4])
        asked.ask(7)
        for number in (2, 3, 4):
            asked.end_at_once(number)
        assert not asked.prober._forgotten
        asked.tier.release()
        assert asked.ended(7) == [(0, 0, 4)]
        assert [start for _, start, _ in asked.sizes] == [0, 5, 6, 0]


def test_how_long_an_answer_takes_is_a_running_mean_from_the_question_on() -> None:
    with asking() as asked:
        assert asked.prober.answer_s() == 0.0
        asked.tier.takes_s = 0.1
        asked.ask(1, part_of(0, 40))  # two calls
        asked.ended(1)
        assert asked.prober.answer_s() == pytest.approx(WEIGHT * 0.2)
        asked.tier.hold()
        asked.ask(2)
        asked.tier.wait_asked()
        asked.clock.advance(0.3)
        asked.tier.release()
        asked.ended(2)
        assert asked.prober.answer_s() == pytest.approx((1 - WEIGHT) * WEIGHT * 0.2 + WEIGHT * 0.4)


# -- trouble -------------------------------------------------------------------------------------------------


def test_after_trouble_no_more_is_asked_for_and_what_came_before_is_told() -> None:
    with asking() as asked:
        asked.tier.trouble.extend([None, TierUnavailableError("gone")])
        asked.ask(1, part_of(0, 500), part_of(0, 9, 1))
        assert asked.ended(1) == [(0, 0, 16)]
        assert len(asked.tier.calls) == 2
        asked.ask(2)
        assert asked.ended(2) == [(0, 0, 4)]


def test_after_trouble_in_a_row_it_is_left_out_and_asked_again_when_it_has_rested() -> None:
    with asking() as asked:
        asked.tier.trouble.extend([TierUnavailableError("gone")] * 4)
        for number in range(3):
            asked.ask(number)
            assert asked.ended(number) == []
        assert asked.prober.answer_s() == math.inf
        asked.ask(3)
        asked.end_at_once(3)
        assert len(asked.tier.calls) == 3
        asked.clock.advance(1.0)
        assert asked.prober.answer_s() < math.inf, "it is tried"
        asked.ask(4)
        asked.ended(4)
        assert asked.prober.answer_s() == math.inf, "for twice as long now"
        asked.clock.advance(2.0)
        asked.ask(5)
        assert asked.ended(5) == [(0, 0, 4)]
        assert asked.prober.answer_s() < math.inf


def test_questions_that_wait_when_it_is_left_out_are_not_asked() -> None:
    with asking() as asked:
        asked.tier.hold()
        asked.tier.trouble.extend([TierUnavailableError("gone")] * 9)
        for number in range(9):
            asked.ask(number)
        asked.tier.release()
        for number in range(9):
            assert asked.ended(number) == []
        assert len(asked.tier.calls) == 3


def test_trouble_of_one_of_many_nodes_is_nothing_against_the_tier() -> None:
    with asking() as asked:
        asked.tier.trouble.extend([NodeUnavailableError("one is gone")] * 9)
        for number in range(9):
            asked.ask(number)
            assert asked.ended(number) == []
        assert len(asked.tier.calls) == 9
        assert asked.prober.answer_s() == 0.0


def test_an_error_that_no_tier_may_raise_is_told_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with asking() as asked:
        asked.tier.trouble.extend([RuntimeError("a bug")])
        asked.ask(1)
        assert asked.ended(1) == []
        asked.ask(2)
        assert asked.ended(2) == [(0, 0, 4)]
    assert caplog.text.count("RuntimeError: a bug") == 1


@pytest.mark.parametrize("extra", [1, -1, 1000])
def test_answers_that_do_not_fit_the_question_are_trouble(
    extra: int, caplog: pytest.LogCaptureFixture
) -> None:
    with asking() as asked:
        asked.tier.extra = extra
        for number in range(3):
            asked.ask(number)
            assert asked.ended(number) == []
        assert asked.prober.answer_s() == math.inf
    assert f"4 chunks were asked for, {4 + extra} answers came" in caplog.text


# -- a tier that hangs ---------------------------------------------------------------------------------------


def test_a_call_that_does_not_return_holds_up_nobody_and_it_is_asked_again_when_it_has() -> None:
    with asking() as asked:
        asked.tier.hold()
        for number in (1, 2, 3):
            asked.ask(number)
        asked.tier.wait_asked()
        asked.clock.advance(DEADLINE_S)
        assert asked.prober.answer_s() < math.inf, "it still has its time"
        assert asked.prober.take() == []
        asked.clock.advance(0.01)
        assert asked.prober.answer_s() == math.inf
        for number in (1, 2, 3):
            asked.end_at_once(number)
        asked.ask(4)
        asked.end_at_once(4)

        asked.tier.release()
        until(lambda: asked.prober.answer_s() < math.inf)
        asked.ask(5)
        assert asked.ended(5) == [(0, 0, 4)]
        assert [run.start for run in asked.tier.calls] == [0, 0], "what was given up was not asked"
        assert [one.question_id for one in asked.answers if not one.last] == [5], "nor is told any more"
        assert asked.prober.answer_s() > 0.0, "it is remembered how long that took"


def test_a_long_question_that_was_given_up_goes_no_further() -> None:
    with asking() as asked:
        asked.tier.hold()
        asked.ask(1, part_of(0, 1000))
        asked.tier.wait_asked()
        asked.clock.advance(DEADLINE_S + 0.01)
        asked.end_at_once(1)
        asked.tier.release()
        until(lambda: asked.prober.answer_s() < math.inf)
        asked.ask(2)
        asked.ended(2)
        assert asked.sizes == [(0, 0, 16), (0, 0, 4)]


def test_calls_that_return_late_are_trouble_though_they_went_well() -> None:
    with asking() as asked:
        asked.tier.takes_s = DEADLINE_S + 0.01
        for number in range(3):
            asked.ask(number)
            assert asked.ended(number) == [(0, 0, 4)], "what it says is of use"
        assert asked.prober.answer_s() == math.inf


def test_what_is_known_of_a_tier_is_read_by_one_thread_at_a_time() -> None:
    class Guarded(Breaker):
        unguarded = 0

        def state(self, now_s: float):
            self.unguarded += not asked.prober._changed._is_owned()
            return super().state(now_s)

        def succeeded(self) -> None:
            self.unguarded += not asked.prober._changed._is_owned()
            super().succeeded()

    with asking() as asked:
        asked.prober._breaker = guarded = Guarded()
        asked.ask(1)
        asked.ended(1)
        asked.prober.answer_s()
        assert guarded.unguarded == 0


# -- how it begins, and how it ends --------------------------------------------------------------------------


def test_a_tier_that_cannot_be_had_is_tried_again_told_of_once_and_asked_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prober_module, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(prober_module, "LONGEST_REST_S", 0.01)
    clock, tiers = VirtualClock(), []
    not_yet = deque([ConfigError("x", 1, "no"), TierUnavailableError("not yet"), RuntimeError("a bug")])
    goes_on = threading.Event()

    def make() -> SharedTier:
        assert goes_on.wait(PATIENCE_S)
        if not_yet:
            raise not_yet.popleft()
        tiers.append(AskedTier(clock, HASHES))
        tiers[-1].opening.extend([TierUnavailableError("refused"), OSError("odd")])
        return tiers[-1]

    prober = TierProber("store", make, clock.monotonic)
    assert prober.answer_s() == math.inf
    prober.ask(ProbeQuestion(1, 1, (part_of(0, 4),)))
    assert [(one.question_id, one.last) for one in prober.take()] == [(1, True)]
    goes_on.set()
    until(lambda: prober.answer_s() < math.inf)
    assert len(tiers) == 1, "what was made and could not be opened is opened again, and not left about"
    assert tiers[0].open_count == 3
    prober.ask(ProbeQuestion(2, 1, (part_of(0, 4),)))
    answers: list[ProbeAnswer] = []
    until(lambda: bool(answers.extend(prober.take())) or any(one.last for one in answers))
    assert sum(answers[0].present) == 4
    prober.close(PATIENCE_S)
    assert tiers[0].closed_count == 1
    assert caplog.text.count("cannot be asked") == 1


def test_one_that_was_never_opened_ends_and_is_closed() -> None:
    clock = VirtualClock()
    tier = AskedTier(clock)
    tier.opening.extend([TierUnavailableError("refused")] * 1000)
    prober = TierProber("store", lambda: tier, clock.monotonic)
    until(lambda: tier.open_count == 1)
    prober.close(PATIENCE_S)
    assert not prober._thread.is_alive()
    assert (tier.open_count, tier.closed_count) == (1, 1)
    assert prober.answer_s() == math.inf


def test_the_end_waits_for_no_call_and_the_tier_is_closed_when_that_has_returned() -> None:
    asked = Asking()
    until(lambda: asked.prober.answer_s() < math.inf)
    asked.tier.hold()
    asked.ask(1, part_of(0, 1000))
    asked.ask(2)
    asked.tier.wait_asked()
    asked.prober.close(0.01)
    assert asked.tier.closed_count == 0, "it is in use"
    for number in (1, 2):
        asked.end_at_once(number)
    asked.ask(3)
    asked.end_at_once(3)
    assert asked.prober.answer_s() == math.inf
    asked.tier.release()
    asked.prober.close(PATIENCE_S)
    assert asked.tier.closed_count == 1
    assert len(asked.tier.calls) == 1


# -- several tiers -------------------------------------------------------------------------------------------


def test_each_tier_is_asked_by_its_index_and_one_that_hangs_is_alone() -> None:
    with asking() as one, asking(HASHES[:2]) as other:
        prober = ThreadProber({2: one.prober, 5: other.prober})
        one.tier.hold()
        prober.ask(ProbeQuestion(1, 2, (part_of(0, 4),)))
        prober.ask(ProbeQuestion(2, 2, (part_of(0, 4),)))
        prober.ask(ProbeQuestion(3, 5, (part_of(0, 4),)))
        one.tier.wait_asked()
        other.tier.wait_asked()
        prober.forget([2, 3])
        found: list[ProbeAnswer] = []
        until(lambda: bool(found.extend(prober.take())) or any(answer.last for answer in found))
        assert [(answer.question_id, sum(answer.present)) for answer in found] == [(3, 2), (3, 0)]
        one.clock.advance(DEADLINE_S + 0.01)
        assert prober.answer_s(2) == math.inf
        assert prober.answer_s(5) < math.inf
        one.tier.release()
        prober.close()
