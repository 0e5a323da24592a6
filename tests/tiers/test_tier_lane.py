"""A tier's lane: what is asked ends, late calls hold up nobody, and nothing is written beyond the queue."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.jobs import JobId
from kvtide.testing.faulty_tiers import FaultyTier, HeldTier, TierCall
from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import Tier
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.transfer.tier_lane import MISS, TierDirection, TierLane, TierOutcome, TierPart

READ, WRITE = TierDirection.READ, TierDirection.WRITE
PATIENCE_S = 20.0


@contextmanager
def lane_of(
    tier: Tier, threads: int = 2, queue_bytes: int = 1 << 30, **options: object
) -> Iterator[TierLane]:
    lane = TierLane(tier, "test", threads, queue_bytes, **options)  # type: ignore[arg-type]
    try:
        yield lane
    finally:
        if isinstance(tier, HeldTier):
            tier.release()
        assert lane.close(PATIENCE_S)


def written(*numbers: int) -> list[TierPart]:
    return [TierPart(name_of(number), memoryview(payload_of(number))) for number in numbers]


def empty(*numbers: int) -> list[TierPart]:
    return [TierPart(name_of(number), memoryview(bytearray(PAYLOAD_BYTES))) for number in numbers]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)


def outcomes(lane: TierLane, count: int) -> dict[int, TierOutcome]:
    found: dict[int, TierOutcome] = {}

    def all_there() -> bool:
        found.update({outcome.job_id: outcome for outcome in lane.poll()})
        return len(found) >= count

    until(all_there)
    assert len(found) == count
    return found


def test_what_was_written_comes_back_part_by_part() -> None:
    with lane_of(MemoryTier(IDENTITY)) as lane:
        assert lane.submit(JobId(1), WRITE, written(1, 2, 3), PATIENCE_S)
        wrote = outcomes(lane, 1)[1]
        assert (wrote.done, wrote.byte_count) == ((True,) * 3, 3 * PAYLOAD_BYTES)
        parts = empty(3, 9, 1)
        lane.submit(JobId(2), READ, parts, PATIENCE_S)
        read = outcomes(lane, 1)[2]
        assert read.done == (True, False, True)
        assert read.trouble == {MISS: 1}
        assert (bytes(parts[0].payload), bytes(parts[2].payload)) == (
            bytes(payload_of(3)),
            bytes(payload_of(1)),
        )
        assert lane.queued_bytes == 0


def test_a_job_of_nothing_ends() -> None:
    with lane_of(MemoryTier(IDENTITY)) as lane:
        lane.submit(JobId(1), READ, [], PATIENCE_S)
        assert outcomes(lane, 1)[1].done == ()


def test_what_is_read_goes_before_what_is_written() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    with lane_of(tier, threads=1) as lane:
        lane.submit(JobId(1), WRITE, written(1), PATIENCE_S)
        until(lambda: tier.held_count(TierCall.WRITE) == 1)
        lane.submit(JobId(2), WRITE, written(2), PATIENCE_S)
        lane.submit(JobId(3), READ, empty(1), PATIENCE_S)
        tier.release()
        ended: list[int] = []
        until(lambda: len(ended) == 3 or bool(ended.extend(one.job_id for one in lane.poll())))
        assert ended == [1, 3, 2]


def test_writes_beyond_the_queue_are_not_taken_and_reads_always_are() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    with lane_of(tier, queue_bytes=3 * PAYLOAD_BYTES) as lane:
        assert lane.submit(JobId(1), WRITE, written(1, 2), PATIENCE_S)
        assert not lane.submit(JobId(2), WRITE, written(3, 4), PATIENCE_S)
        assert lane.submit(JobId(3), WRITE, written(3), PATIENCE_S)
        assert lane.queued_bytes == 3 * PAYLOAD_BYTES
        lane.submit(JobId(4), READ, empty(1), PATIENCE_S)
        tier.release()
        assert set(outcomes(lane, 3)) == {1, 3, 4}
        assert lane.submit(JobId(5), WRITE, written(5, 6, 7), PATIENCE_S)
        outcomes(lane, 1)


def test_calls_that_never_return_lose_their_threads_and_others_go_on() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.READ})
    with lane_of(tier, threads=2, late_limit=3, breaker=Breaker(trouble_limit=100)) as lane:
        lane.submit(JobId(1), READ, empty(1, 2), 0.02)
        until(lambda: (lane.poll() or True) and lane.late_count == 2)
        # Both threads are lost; two others have come.
        lane.submit(JobId(2), WRITE, written(5, 6), PATIENCE_S)
        assert outcomes(lane, 1)[2].done == (True, True)
        assert lane.state is BreakerState.CLOSED
        tier.release()
        assert outcomes(lane, 1)[1].done == (False, False)
        assert lane.late_count == 0
        until(lambda: sum(one.name.startswith("kvtide-test") for one in threading.enumerate()) == 2)


def test_too_many_late_calls_and_the_tier_is_out_until_they_return() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.READ})
    with lane_of(tier, threads=2, late_limit=1, breaker=Breaker(trouble_limit=100)) as lane:
        lane.submit(JobId(1), READ, empty(1, 2), 0.02)
        until(lambda: (lane.poll() or True) and lane.late_count == 2)
        assert lane.state is BreakerState.OPEN
        lane.submit(JobId(2), WRITE, written(5), PATIENCE_S)
        assert outcomes(lane, 1)[2].trouble == {"out": 1}
        tier.release()
        outcomes(lane, 1)
        assert lane.state is BreakerState.CLOSED
        lane.submit(JobId(3), WRITE, written(5), PATIENCE_S)
        assert outcomes(lane, 1)[3].done == (True,)


def test_what_has_not_begun_by_its_deadline_does_not_begin() -> None:
    tier = HeldTier(FaultyTier(MemoryTier(IDENTITY)), {TierCall.WRITE})
    with lane_of(tier, threads=1) as lane:
        lane.submit(JobId(1), WRITE, written(1), PATIENCE_S)
        lane.submit(JobId(2), WRITE, written(2), 0.01)
        time.sleep(0.03)
        tier.release()
        assert outcomes(lane, 2)[2].trouble == {"late": 1}
        assert tier.inner.calls[TierCall.WRITE] == 1  # type: ignore[attr-defined]


def test_what_is_cancelled_does_not_begin_and_what_has_begun_ends() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    with lane_of(tier, threads=1) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2, 3), PATIENCE_S)
        lane.submit(JobId(2), WRITE, written(4), PATIENCE_S)
        until(lambda: tier.held_count(TierCall.WRITE) == 1)
        lane.cancel([JobId(1)])
        tier.release()
        ended = outcomes(lane, 2)
        assert ended[1].done == (True, False, False)
        assert ended[1].trouble == {"cancelled": 2}
        assert ended[2].done == (True,)


def test_trouble_in_a_row_leaves_the_tier_out_and_it_comes_back() -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.WRITE: range(3)})
    with lane_of(tier, threads=1, breaker=Breaker(3, 0.05)) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2, 3, 4), PATIENCE_S)
        assert outcomes(lane, 1)[1].trouble == {TierUnavailableError.__name__: 3, "out": 1}
        assert tier.calls[TierCall.WRITE] == 3
        time.sleep(0.06)
        lane.submit(JobId(2), WRITE, written(5), PATIENCE_S)
        assert outcomes(lane, 1)[2].done == (True,)
        assert lane.state is BreakerState.CLOSED


def test_a_full_medium_closes_the_door_for_writes_alone_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.WRITE: {1, 2}}, lambda: TierFullError("full"))
    with lane_of(tier, threads=1) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2, 3), PATIENCE_S)
        assert outcomes(lane, 1)[1].done == (True, False, False)
        assert not lane.takes_writes
        assert tier.calls[TierCall.WRITE] == 2
        lane.submit(JobId(2), READ, empty(1), PATIENCE_S)
        assert outcomes(lane, 1)[2].done == (True,)
        lane.room_was_made()
        lane.submit(JobId(3), WRITE, written(4), PATIENCE_S)
        assert outcomes(lane, 1)[3].done == (False,)
        lane.room_was_made()
        lane.submit(JobId(4), WRITE, written(4), PATIENCE_S)
        assert outcomes(lane, 1)[4].done == (True,)
    assert caplog.text.count("is full: writes are skipped") == 2


def test_an_error_that_no_tier_may_raise_is_a_failure_and_not_the_end_of_the_thread() -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.READ: {0}}, lambda: RuntimeError("a bug"))
    with lane_of(tier, threads=1) as lane:
        lane.submit(JobId(1), READ, empty(1, 2), PATIENCE_S)
        assert outcomes(lane, 1)[1].trouble == {"Exception": 1, MISS: 1}


def test_it_does_not_end_while_a_call_is_under_way() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.READ})
    lane = TierLane(tier, "test", 1, 1)
    lane.submit(JobId(1), READ, empty(1), PATIENCE_S)
    until(lambda: tier.held_count(TierCall.READ) == 1)
    assert not lane.close(0.01)
    tier.release()
    assert lane.close(PATIENCE_S)
