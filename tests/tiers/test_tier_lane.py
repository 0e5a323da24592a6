"""A tier's lane: what is asked ends, late calls hold up nobody, and nothing is written beyond the queue."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvtide.errors import CorruptRecordError, TierFullError, TierUnavailableError
from kvtide.jobs import JobId
from kvtide.testing.faulty_tiers import FaultyTier, HeldTier, TierCall
from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import PrivateTier
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.records import DOUBTFUL
from kvtide.transfer import lane_survey, tier_lane
from kvtide.transfer.lane import CANCELLED, LATE, MISS, OUT, PartFate, TierDirection, TierOutcome, TierPart
from kvtide.transfer.tier_lane import LaneSettings, TierLane

READ, WRITE = TierDirection.READ, TierDirection.WRITE
PATIENCE_S = 20.0


DONE, FAILED, GONE = PartFate.DONE, PartFate.FAILED, PartFate.GONE


def opened(tier: PrivateTier, breaker: Breaker | None = None, **settings: object) -> TierLane:
    of_test = {"thread_count": 2, "queue_bytes": 1 << 30, "deadline_s": PATIENCE_S} | settings
    lane = TierLane(tier, "test", LaneSettings(**of_test), breaker)  # type: ignore[arg-type]
    until(lambda: lane.state().opened)
    return lane


@contextmanager
def lane_of(tier: PrivateTier, **settings: object) -> Iterator[TierLane]:
    lane = opened(tier, **settings)  # type: ignore[arg-type]
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
        assert lane.submit(JobId(1), WRITE, written(1, 2, 3))
        wrote = outcomes(lane, 1)[1]
        assert (wrote.fates, wrote.byte_count) == (bytes([DONE] * 3), 3 * PAYLOAD_BYTES)
        parts = empty(3, 9, 1)
        lane.submit(JobId(2), READ, parts)
        read = outcomes(lane, 1)[2]
        assert read.fates == bytes([DONE, GONE, DONE])
        assert read.trouble == {MISS: 1}
        assert (bytes(parts[0].payload), bytes(parts[2].payload)) == (
            bytes(payload_of(3)),
            bytes(payload_of(1)),
        )
        assert lane.queued_bytes == 0


def test_a_job_of_nothing_ends() -> None:
    with lane_of(MemoryTier(IDENTITY)) as lane:
        lane.submit(JobId(1), READ, [])
        assert outcomes(lane, 1)[1].fates == bytes([])


def test_what_is_read_goes_before_what_is_written() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    with lane_of(tier, thread_count=1) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        until(lambda: tier.held_count(TierCall.WRITE) == 1)
        lane.submit(JobId(2), WRITE, written(2))
        lane.submit(JobId(3), READ, empty(1))
        tier.release()
        ended: list[int] = []
        until(lambda: len(ended) == 3 or bool(ended.extend(one.job_id for one in lane.poll())))
        assert ended == [1, 3, 2]


def test_writes_beyond_the_queue_are_not_taken_and_reads_always_are() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    with lane_of(tier, queue_bytes=3 * PAYLOAD_BYTES) as lane:
        assert lane.submit(JobId(1), WRITE, written(1, 2))
        assert not lane.submit(JobId(2), WRITE, written(3, 4))
        assert lane.submit(JobId(3), WRITE, written(3))
        assert lane.queued_bytes == 3 * PAYLOAD_BYTES
        lane.submit(JobId(4), READ, empty(1))
        tier.release()
        assert set(outcomes(lane, 3)) == {1, 3, 4}
        assert lane.submit(JobId(5), WRITE, written(5, 6, 7))
        outcomes(lane, 1)


def test_calls_that_never_return_lose_their_threads_and_others_go_on() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.READ})
    with lane_of(tier, deadline_s=0.2, late_limit=3, breaker=Breaker(trouble_limit=100)) as lane:
        lane.submit(JobId(1), READ, empty(1, 2))
        until(lambda: lane.state().late_count == 2)
        assert lane.take_late() == {1}
        assert lane.take_late() == set()
        # Both threads are lost; two others have come.
        lane.submit(JobId(2), WRITE, written(5, 6))
        assert outcomes(lane, 1)[2].fates == bytes([DONE, DONE])
        assert lane.state().state is BreakerState.CLOSED
        tier.release()
        assert outcomes(lane, 1)[1].fates == bytes([GONE, GONE])
        assert lane.state().late_count == 0
        until(lambda: sum(one.name.startswith("kvtide-test") for one in threading.enumerate()) == 2)


def test_too_many_late_calls_and_the_tier_is_out_until_they_return(caplog: pytest.LogCaptureFixture) -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.READ})
    with lane_of(tier, deadline_s=0.2, late_limit=1, breaker=Breaker(trouble_limit=100)) as lane:
        lane.submit(JobId(1), READ, empty(1, 2))
        until(lambda: lane.state().late_count == 2)
        assert lane.state().state is BreakerState.OPEN
        lane.submit(JobId(2), WRITE, written(5))
        assert outcomes(lane, 1)[2].trouble == {OUT: 1}
        tier.release()
        outcomes(lane, 1)
        assert lane.state().state is BreakerState.CLOSED
        lane.submit(JobId(3), WRITE, written(5))
        assert outcomes(lane, 1)[3].fates == bytes([DONE])
    assert caplog.text.count("is left out") == caplog.text.count("is back") == 1


def test_a_read_whose_turn_does_not_come_in_time_does_not_begin() -> None:
    tier = HeldTier(FaultyTier(MemoryTier(IDENTITY)), {TierCall.WRITE})
    with lane_of(tier, thread_count=1, deadline_s=0.1, late_limit=0) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        until(lambda: tier.held_count(TierCall.WRITE) == 1)
        lane.submit(JobId(2), READ, empty(2))
        assert outcomes(lane, 1)[2].trouble.keys() <= {LATE, OUT}
        assert tier.inner.calls[TierCall.READ] == 0  # type: ignore[attr-defined]


def test_what_is_cancelled_does_not_begin_and_what_has_begun_ends() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    with lane_of(tier, thread_count=1) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2, 3))
        lane.submit(JobId(2), WRITE, written(4))
        until(lambda: tier.held_count(TierCall.WRITE) == 1)
        lane.cancel([JobId(1)])
        tier.release()
        ended = outcomes(lane, 2)
        assert ended[1].fates == bytes([DONE, FAILED, FAILED])
        assert ended[1].trouble == {CANCELLED: 2}
        assert ended[2].fates == bytes([DONE])


def test_trouble_in_a_row_leaves_the_tier_out_and_it_comes_back() -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.WRITE: range(3)})
    with lane_of(tier, thread_count=1, breaker=Breaker(3, 0.05)) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2, 3, 4))
        assert outcomes(lane, 1)[1].trouble == {TierUnavailableError.__name__: 3, OUT: 1}
        assert tier.calls[TierCall.WRITE] == 3
        time.sleep(0.06)
        lane.submit(JobId(2), WRITE, written(5))
        assert outcomes(lane, 1)[2].fates == bytes([DONE])
        assert lane.state().state is BreakerState.CLOSED


def test_a_full_medium_closes_the_door_for_writes_alone_until_something_is_discarded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_lane, "ROOM_TOLD_S", 0.0)
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.WRITE: {1, 2}}, lambda: TierFullError("full"))
    with lane_of(tier, thread_count=1) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2, 3))
        assert outcomes(lane, 1)[1].fates == bytes([DONE, FAILED, FAILED])
        assert not lane.state().takes_writes
        assert tier.calls[TierCall.WRITE] == 2
        lane.submit(JobId(2), READ, empty(1))
        assert outcomes(lane, 1)[2].fates == bytes([DONE])
        for job, fate in ((3, FAILED), (4, DONE)):
            lane.discard([name_of(99).key])
            lane.submit(JobId(job), WRITE, written(4))
            assert outcomes(lane, 1)[job].fates == bytes([fate])
        assert lane.state().takes_writes
    assert caplog.text.count("is full: writes are skipped") == 1
    assert caplog.text.count("has room again") == 1


def test_a_medium_that_is_full_now_and_then_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.WRITE: range(0, 20, 2)}, lambda: TierFullError("full"))
    with lane_of(tier, thread_count=1) as lane:
        for job in range(20):
            lane.discard([name_of(99).key])
            lane.submit(JobId(job), WRITE, written(job))
            assert outcomes(lane, 1)[job].fates == bytes([DONE if job % 2 else FAILED])
    assert caplog.text.count("is full: writes are skipped") == 1
    assert caplog.text.count("has room again") == 0


def test_a_full_medium_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_lane, "FULL_REST_S", 0.05)
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.WRITE: {0}}, lambda: TierFullError("full"))
    with lane_of(tier) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        assert outcomes(lane, 1)[1].trouble == {"TierFullError": 1}
        until(lambda: lane.state().takes_writes)
        lane.submit(JobId(2), WRITE, written(1))
        assert outcomes(lane, 1)[2].fates == bytes([DONE])


def test_what_is_forgotten_is_forgotten_before_it_is_written_anew() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), set())
    with lane_of(tier, thread_count=3) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2))
        outcomes(lane, 1)
        tier.hold(TierCall.DISCARD)
        lane.discard([name_of(1).key])
        lane.submit(JobId(2), WRITE, written(1))
        lane.submit(JobId(3), READ, empty(2))
        assert set(outcomes(lane, 1)) == {3}
        assert tier.held_count(TierCall.DISCARD) == 1
        tier.release()
        assert outcomes(lane, 1)[2].fates == bytes([DONE])
        lane.submit(JobId(4), READ, empty(1))
        assert outcomes(lane, 1)[4].fates == bytes([DONE])


def test_how_full_it_is_is_asked_again_though_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_lane, "SIZES_REST_S", 0.02)
    tier = MemoryTier(IDENTITY, limit_bytes=1000)
    with lane_of(tier) as lane:
        assert lane.state().capacity_bytes == 1000
        tier._limit_bytes = 2000
        until(lambda: lane.state().capacity_bytes == 2000)


def test_a_damaged_record_is_gone() -> None:
    tier = MemoryTier(IDENTITY)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        outcomes(lane, 1)
        tier.records[name_of(1).key][300] ^= 1
        lane.submit(JobId(2), READ, empty(1))
        read = outcomes(lane, 1)[2]
        assert (read.fates, read.trouble) == (bytes([GONE]), {CorruptRecordError.__name__: 1})


# -- generations ----------------------------------------------------------------------------------------


def test_a_reset_waits_for_what_is_being_written() -> None:
    tier = HeldTier(FaultyTier(MemoryTier(IDENTITY)), {TierCall.WRITE})
    with lane_of(tier, thread_count=3) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        until(lambda: tier.held_count(TierCall.WRITE) == 1)
        lane.begin_generation()
        time.sleep(0.02)
        assert tier.inner.calls[TierCall.GENERATION] == 0  # type: ignore[attr-defined]
        tier.release()
        until(lambda: lane.generations_begun == 1)


def test_a_reset_that_cannot_be_kept_does_not_hold_up_the_end() -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.GENERATION: range(10_000)})
    with lane_of(tier, breaker=Breaker(trouble_limit=100)) as lane:
        lane.begin_generation()
        until(lambda: tier.calls[TierCall.GENERATION] == 1)
    assert tier.calls[TierCall.GENERATION] <= 2


def test_from_a_reset_on_nothing_of_before_is_served_and_what_was_waiting_ends() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), set())
    with lane_of(tier, thread_count=2) as lane:
        lane.submit(JobId(1), WRITE, written(1, 2))
        outcomes(lane, 1)
        tier.hold(TierCall.WRITE, TierCall.READ)
        lane.submit(JobId(2), WRITE, written(3, 4, 5))
        until(lambda: tier.held_count(TierCall.WRITE) == 2)
        lane.begin_generation()
        lane.submit(JobId(3), READ, empty(1, 3))
        time.sleep(0.02)
        assert lane.generations_begun == 0  # a write of before is under way
        tier.release()
        ended = outcomes(lane, 2)
        assert (ended[2].fates, ended[2].trouble) == (bytes([FAILED] * 3), {CANCELLED: 3})
        assert ended[3].fates == bytes([GONE, GONE])
        assert lane.generations_begun == 1
        lane.submit(JobId(4), WRITE, written(1))
        assert outcomes(lane, 1)[4].fates == bytes([DONE])


def test_a_write_that_is_late_does_not_hold_up_a_reset_and_is_not_served_after_it() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    with lane_of(tier, thread_count=1, deadline_s=0.1) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        until(lambda: lane.take_late() == {1})
        lane.begin_generation()
        until(lambda: lane.generations_begun == 1)
        tier.release()
        assert outcomes(lane, 1)[1].fates == bytes([FAILED])
        until(lambda: not tier.contains([name_of(1).key], 1.0)[0])
        lane.submit(JobId(2), READ, empty(1))
        assert outcomes(lane, 1)[2].fates == bytes([GONE])


def test_a_reset_that_fails_is_tried_again_and_nothing_is_served_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_lane, "RETRY_S", 0.05)
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.GENERATION: {0, 1}})
    with lane_of(tier) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        outcomes(lane, 1)
        lane.begin_generation()
        lane.begin_generation(trusted=True)
        lane.submit(JobId(2), READ, empty(1))
        assert outcomes(lane, 1)[2].fates == bytes([GONE])
        assert lane.generations_begun == 2
        assert tier.calls[TierCall.GENERATION] in (3, 4)
        assert tier.inner.records.generation & DOUBTFUL  # type: ignore[attr-defined]


def test_a_reset_just_before_the_end_is_kept() -> None:
    tier = MemoryTier(IDENTITY)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        outcomes(lane, 1)
        lane.begin_generation()
    assert tier.records.generation == 1 | DOUBTFUL


# -- what is there --------------------------------------------------------------------------------------


def all_of(lane: TierLane, limit: int = 3) -> list[int]:
    found: list[int] = []
    while (headers := lane.take_inventory(limit)) is not None:
        assert len(headers) <= limit
        found += [header.name.chunk_index for header in headers]
    return found


def test_a_tier_that_opens_slowly_holds_up_nobody_and_then_serves_and_tells_what_it_has() -> None:
    inner = MemoryTier(IDENTITY)
    for number in (4, 2, 9, 0, 7):
        inner.write(name_of(number), memoryview(payload_of(number)), PATIENCE_S)
    tier = HeldTier(inner, {TierCall.OPEN})
    lane = TierLane(tier, "test", LaneSettings(wait_limit_s=0.1))
    assert lane.take_inventory(3) == []
    assert not lane.state().opened
    lane.submit(JobId(1), READ, empty(4))
    lane.submit(JobId(2), WRITE, written(5))
    assert outcomes(lane, 1)[1].trouble == {LATE: 1}
    tier.release()
    assert outcomes(lane, 1)[2].fates == bytes([DONE])
    assert set(all_of(lane)) >= {0, 2, 4, 7, 9}
    state = lane.state()
    assert (state.capacity_bytes, state.used_bytes) == (inner.capacity_bytes, inner.used_bytes)
    assert lane.close(PATIENCE_S)


def test_what_is_there_is_told_in_pieces_parents_first_and_again_when_asked() -> None:
    inner = MemoryTier(IDENTITY)
    for number in (4, 2, 9, 0, 7):
        inner.write(name_of(number), memoryview(payload_of(number)), PATIENCE_S)
    with lane_of(inner) as lane:
        assert all_of(lane) == [0, 2, 4, 7, 9]
        assert lane.take_inventory(3) is None
        lane.recount()
        assert all_of(lane, 1) == [0, 2, 4, 7, 9]
        lane.recount()
        lane.begin_generation()
        assert all_of(lane) == []


def test_what_was_being_listed_at_a_reset_is_not_told() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.INVENTORY})
    tier.write(name_of(1), memoryview(payload_of(1)), PATIENCE_S)
    with lane_of(tier) as lane:
        until(lambda: tier.held_count(TierCall.INVENTORY) == 1)
        tier.inner.begin_generation = lambda trusted: None  # type: ignore[method-assign]
        lane.begin_generation()
        assert lane.take_inventory(3) is None
        tier.release()
        until(lambda: not any(one.name.endswith("-survey") for one in threading.enumerate()))
        assert lane.take_inventory(3) is None


def test_a_tier_that_cannot_be_opened_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lane_survey, "FIRST_REST_S", 0.01)
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.OPEN: range(3)})
    with lane_of(tier) as lane:
        lane.submit(JobId(1), WRITE, written(1))
        assert outcomes(lane, 1)[1].fates == bytes([DONE])
    assert caplog.text.count("cannot be opened") == 1


def test_a_tier_that_was_never_opened_ends_too() -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.OPEN: range(99)})
    lane = TierLane(tier, "test")
    until(lambda: tier.calls[TierCall.OPEN] == 1)
    lane.submit(JobId(1), WRITE, written(1))
    lane.begin_generation()
    lane.discard([name_of(1).key])
    assert lane.close(PATIENCE_S)
    assert outcomes(lane, 1)[1].trouble == {CANCELLED: 1}


def test_an_error_that_no_tier_may_raise_is_a_failure_and_not_the_end_of_the_thread() -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.READ: {0}}, lambda: RuntimeError("a bug"))
    with lane_of(tier, thread_count=1) as lane:
        lane.submit(JobId(1), READ, empty(1, 2))
        assert outcomes(lane, 1)[1].trouble == {"Exception": 1, MISS: 1}


def test_it_does_not_end_while_a_call_is_under_way() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.READ})
    lane = opened(tier, thread_count=1)
    lane.submit(JobId(1), READ, empty(1))
    until(lambda: tier.held_count(TierCall.READ) == 1)
    assert not lane.close(0.01)
    tier.release()
    assert lane.close(PATIENCE_S)
