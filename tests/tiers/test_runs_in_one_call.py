"""Neighbouring chunks of one job go over in one call: what is handed over, and what becomes of each."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import (
    CorruptRecordError,
    NodeUnavailableError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvtide.jobs import JobId
from kvtide.keys import LEAD_ALIGNMENT, OffloadKey, make_offload_key
from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.tiers import IDENTITY, payload_of
from kvtide.tiers.base import Written
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.records import ChunkName, RecordRun, unpack
from kvtide.transfer.lane import CANCELLED, MISS, OUT, PartFate, TierDirection, TierOutcome, TierPart
from kvtide.transfer.lane_calls import NODE, CallEnd
from kvtide.transfer.tier_lane import LaneSettings, TierLane

READ, WRITE = TierDirection.READ, TierDirection.WRITE
DONE, FAILED, GONE = PartFate.DONE, PartFate.FAILED, PartFate.GONE
PATIENCE_S = 20.0
PAYLOAD_BYTES = 256
HASHES = [(number + 1).to_bytes(4, "big") * 8 for number in range(1000)]
UNAVAILABLE, FULL = TierUnavailableError.__name__, TierFullError.__name__

Ends = Sequence[bool | Written | Exception]


@dataclass
class RunCall:
    """One call: how it was made, and of which chunks."""

    kind: str
    run: RecordRun


class RunTier(MemoryTier):
    """Takes ``most`` chunks in one call; does what is scripted, or else what it would do.

    Attributes:
        calls: In order.
        script: For each of the next calls of runs, what it returns, or raises.
    """

    def __init__(self, most: int) -> None:
        super().__init__(IDENTITY)
        self.most = most
        self.calls: list[RunCall] = []
        self.script: deque[Ends | Exception] = deque()
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self._begun = threading.Semaphore(0)

    def run_chunks(self, payload_bytes: int) -> int:
        return self.most

    def hold(self) -> None:
        """Have calls not return from now on."""
        self._may_go_on.clear()

    def release(self) -> None:
        self._may_go_on.set()

    def wait_begun(self) -> None:
        """Wait until one more call has begun."""
        assert self._begun.acquire(timeout=PATIENCE_S), "nothing was asked"

    def _note(self, kind: str, run: RecordRun) -> None:
        self.calls.append(RunCall(kind, run))
        self._begun.release()
        assert self._may_go_on.wait(PATIENCE_S)

    def read_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[bool | TierError]:
        self._note("read", run)
        return self._scripted() if self.script else super().read_run(run, payloads, deadline_s)  # type: ignore[return-value]

    def write_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[Written | TierError]:
        self._note("write", run)
        return self._scripted() if self.script else super().write_run(run, payloads, deadline_s)  # type: ignore[return-value]

    def _scripted(self) -> Ends:
        ends = self.script.popleft()
        if isinstance(ends, Exception):
            raise ends
        return ends

    @property
    def handed(self) -> list[tuple[str, int, int]]:
        return [(call.kind, call.run.start, len(call.run)) for call in self.calls]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)


@contextmanager
def lane_of(tier: RunTier, trouble_limit: int = 3, **settings: object) -> Iterator[TierLane]:
    of_test = {"thread_count": 1, "queue_bytes": 1 << 30, "deadline_s": PATIENCE_S} | settings
    lane = TierLane(tier, "test", LaneSettings(**of_test), Breaker(trouble_limit, 1000.0))  # type: ignore[arg-type]
    try:
        until(lambda: lane.state().opened)
        yield lane
    finally:
        tier.release()
        assert lane.close(PATIENCE_S)


def outcomes(lane: TierLane, count: int = 1) -> dict[int, TierOutcome]:
    found: dict[int, TierOutcome] = {}

    def all_there() -> bool:
        found.update({outcome.job_id: outcome for outcome in lane.poll()})
        return len(found) >= count

    until(all_there)
    assert len(found) == count
    return found


def key_of(number: int) -> OffloadKey:
    return make_offload_key(HASHES[number], 0)


def parts_of(start: int, stop: int, filled: bool = False, byte_count: int = PAYLOAD_BYTES) -> list[TierPart]:
    parts = []
    for number in range(start, stop):
        name = ChunkName(key_of(number), HASHES[number - 1] if number else None, number)
        payload = payload_of(number, byte_count) if filled else bytearray(byte_count)
        parts.append(TierPart(name, memoryview(payload)))
    return parts


def lead_of(start: int) -> tuple[bytes, ...]:
    return tuple(HASHES[start - start % LEAD_ALIGNMENT : start])


def filled(tier: RunTier, start: int, stop: int) -> None:
    for part in parts_of(start, stop, filled=True):
        tier.write(part.name, part.payload, PATIENCE_S)


# -- what is handed over -------------------------------------------------------------------------------------


def test_a_job_goes_over_in_runs_of_what_the_tier_wants_and_its_bytes_come_back() -> None:
    tier = RunTier(4)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), WRITE, parts_of(0, 10, filled=True))
        assert outcomes(lane)[1].fates == bytes([DONE] * 10)
        parts = parts_of(0, 10)
        lane.submit(JobId(2), READ, parts)
        read = outcomes(lane)[2]
        assert (read.fates, read.byte_count, read.trouble) == (bytes([DONE] * 10), 10 * PAYLOAD_BYTES, {})
        assert [bytes(part.payload) for part in parts] == [
            bytes(payload_of(number, PAYLOAD_BYTES)) for number in range(10)
        ]
        runs = [(0, 4), (4, 4), (8, 2)]
        assert tier.handed == [("write", *run) for run in runs] + [("read", *run) for run in runs]


@pytest.mark.parametrize("most", [1, 0, -5])
def test_a_tier_that_wants_one_is_handed_one(most: int) -> None:
    tier = RunTier(most)
    filled(tier, 0, 3)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), READ, parts_of(0, 3))
        assert outcomes(lane)[1].fates == bytes([DONE] * 3)
        assert tier.handed == []


def test_what_is_left_over_is_a_run_of_one() -> None:
    tier = RunTier(2)
    filled(tier, 0, 3)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), READ, parts_of(0, 3))
        assert outcomes(lane)[1].fates == bytes([DONE] * 3)
        assert tier.handed == [("read", 0, 2), ("read", 2, 1)]


def test_chunks_of_two_jobs_do_not_go_over_together() -> None:
    tier = RunTier(100)
    with lane_of(tier) as lane:
        tier.hold()
        lane.submit(JobId(1), WRITE, parts_of(0, 3, filled=True))
        lane.submit(JobId(2), WRITE, parts_of(3, 6, filled=True))
        tier.release()
        assert all(end.fates == bytes([DONE] * 3) for end in outcomes(lane, 2).values())
        assert tier.handed == [("write", 0, 3), ("write", 3, 3)]


def test_chunks_of_other_sizes_do_not_go_over_together() -> None:
    tier = RunTier(100)
    parts = parts_of(0, 3, True) + parts_of(3, 5, True, 64) + parts_of(5, 7, True)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), WRITE, parts)
        assert outcomes(lane)[1].fates == bytes([DONE] * 7)
        assert tier.handed == [("write", 0, 3), ("write", 3, 2), ("write", 5, 2)]


@pytest.mark.parametrize("start", [0, 5, 63, 64, 70, 130])
def test_each_call_of_a_job_says_what_comes_before_it(start: int) -> None:
    tier = RunTier(30)
    filled(tier, start, start + 100)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), READ, parts_of(start, start + 100), lead_of(start))
        assert outcomes(lane)[1].fates == bytes([DONE] * 100)
        lane.submit(JobId(2), WRITE, parts_of(start + 100, start + 200, filled=True), lead_of(start + 100))
        assert outcomes(lane)[2].fates == bytes([DONE] * 100)
    assert [call.run.start - start for call in tier.calls] == [0, 30, 60, 90, 100, 130, 160, 190]
    for call in tier.calls:
        first = call.run.start
        assert call.run.hashes == tuple(HASHES[first : first + len(call.run)])
        assert call.run.parent_hash == (HASHES[first - 1] if first else None)
        assert call.run.lead == lead_of(first)
    for number in range(start + 100, start + 200):
        header = unpack(tier.records[key_of(number)])
        assert header.name == ChunkName(key_of(number), HASHES[number - 1], number)


def test_without_a_lead_a_call_says_what_its_job_knows() -> None:
    tier = RunTier(30)
    filled(tier, 70, 170)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), READ, parts_of(70, 170))
        outcomes(lane)
    assert [call.run.lead for call in tier.calls] == [
        (),
        tuple(HASHES[70:100]),
        tuple(HASHES[128:130]),
        tuple(HASHES[128:160]),
    ]
    assert [call.run.parent_hash for call in tier.calls] == [HASHES[at - 1] for at in (70, 100, 130, 160)]


@pytest.mark.parametrize("answer", [RuntimeError("a bug"), None, "four"])
def test_a_tier_that_cannot_say_how_many_it_wants_is_handed_one_and_the_thread_goes_on(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(RunTier):
        def run_chunks(self, payload_bytes: int) -> int:
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[return-value]

    tier = Odd(0)
    filled(tier, 0, 5)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), READ, parts_of(0, 5))
        assert outcomes(lane)[1].fates == bytes([DONE] * 5)
        assert tier.handed == []
    assert "it cannot say how many chunks" in caplog.text


# -- what becomes of each ------------------------------------------------------------------------------------


def test_each_chunk_of_a_read_has_its_own_end() -> None:
    tier = RunTier(10)
    tier.script.append(
        [
            True,
            False,
            CorruptRecordError("damaged"),
            TierUnavailableError("cut off"),
            NodeUnavailableError("one is out"),
            KeyError("a bug"),
            True,
        ]
    )
    with lane_of(tier, trouble_limit=1) as lane:
        lane.submit(JobId(1), READ, parts_of(0, 7))
        read = outcomes(lane)[1]
        assert read.fates == bytes([DONE, GONE, GONE, FAILED, FAILED, FAILED, DONE])
        assert read.byte_count == 2 * PAYLOAD_BYTES
        assert read.trouble == {MISS: 1, "CorruptRecordError": 1, UNAVAILABLE: 1, NODE: 1, "Exception": 1}
        assert lane.state().state is BreakerState.CLOSED, "some went well"


def test_each_chunk_of_a_write_has_its_own_end() -> None:
    tier = RunTier(10)
    tier.script.append([Written.NEW, TierUnavailableError("cut off"), Written.THERE_ALREADY])
    with lane_of(tier, trouble_limit=1) as lane:
        lane.submit(JobId(1), WRITE, parts_of(0, 3, filled=True))
        wrote = outcomes(lane)[1]
        assert (wrote.fates, wrote.byte_count) == (bytes([DONE, FAILED, DONE]), 2 * PAYLOAD_BYTES)
        assert lane.queued_bytes == 0
        assert lane.state().state is BreakerState.CLOSED


def test_a_call_that_fails_as_a_whole_is_trouble_once_however_many_chunks_it_had() -> None:
    tier = RunTier(10)
    tier.script.extend([TierUnavailableError("refused")] * 3)
    with lane_of(tier, trouble_limit=3) as lane:
        lane.submit(JobId(1), READ, parts_of(0, 20))
        assert outcomes(lane)[1].trouble == {UNAVAILABLE: 20}
        assert lane.state().state is BreakerState.CLOSED
        lane.submit(JobId(2), READ, parts_of(0, 20))
        assert outcomes(lane)[2].trouble == {UNAVAILABLE: 10, OUT: 10}
        assert lane.state().state is BreakerState.OPEN


@pytest.mark.parametrize(
    "ends",
    [
        NodeUnavailableError("one is out"),
        [NodeUnavailableError("one is out")] * 4,
        [NodeUnavailableError("one is out"), True, False, True],
    ],
    ids=["the call", "each chunk", "one chunk"],
)
def test_a_node_that_is_out_leaves_the_tier_in_service_however_often(ends: Ends | Exception) -> None:
    tier = RunTier(4)
    tier.script.extend([ends] * 6)
    with lane_of(tier, trouble_limit=2) as lane:
        for number in range(6):
            lane.submit(JobId(number), READ, parts_of(0, 4))
            assert NODE in outcomes(lane)[number].trouble
            assert lane.state().state is BreakerState.CLOSED


def test_a_node_that_is_out_says_nothing_for_the_tier_either() -> None:
    tier = RunTier(2)
    tier.script.extend(
        [TierUnavailableError("refused"), NodeUnavailableError("one"), TierUnavailableError("refused")]
    )
    with lane_of(tier, trouble_limit=2) as lane:
        for number in range(3):
            lane.submit(JobId(number), READ, parts_of(0, 2))
            outcomes(lane)
        assert lane.state().state is BreakerState.OPEN


def test_a_node_that_is_out_for_a_chunk_alone_leaves_the_tier_in_service() -> None:
    class Out(RunTier):
        def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
            raise NodeUnavailableError("one is out")

    with lane_of(Out(1), trouble_limit=1) as lane:
        lane._pace.note(1.0, 1, time.monotonic())
        lane.submit(JobId(1), READ, parts_of(0, 20))
        assert outcomes(lane)[1].trouble == {NODE: 20}
        assert lane.state().state is BreakerState.CLOSED
        assert lane.state().chunk_read_s >= 0.5, "nor is it any faster for that"


def test_a_medium_that_is_full_for_some_closes_the_door_for_what_is_to_be_written() -> None:
    tier = RunTier(3)
    tier.script.append([Written.NEW, TierFullError("full"), TierFullError("full")])
    with lane_of(tier, trouble_limit=1) as lane:
        lane.submit(JobId(1), WRITE, parts_of(0, 6, filled=True))
        wrote = outcomes(lane)[1]
        assert (wrote.fates, wrote.trouble) == (bytes([DONE, *[FAILED] * 5]), {FULL: 5})
        state = lane.state()
        assert (state.takes_writes, state.state) == (False, BreakerState.CLOSED)
        filled(tier, 0, 2)
        lane.submit(JobId(2), READ, parts_of(0, 2))
        assert outcomes(lane)[2].fates == bytes([DONE, DONE])


@pytest.mark.parametrize("count", [0, 3, 5, 1000])
@pytest.mark.parametrize("direction", [READ, WRITE])
def test_too_many_or_too_few_answers_are_a_failure_of_all_and_the_thread_goes_on(
    count: int, direction: TierDirection, caplog: pytest.LogCaptureFixture
) -> None:
    tier = RunTier(4)
    tier.script.append([True] * count)
    with lane_of(tier) as lane:
        lane.submit(JobId(1), direction, parts_of(0, 4, filled=True))
        assert outcomes(lane)[1].trouble == {"Exception": 4}
        lane.submit(JobId(2), WRITE, parts_of(0, 4, filled=True))
        assert outcomes(lane)[2].fates == bytes([DONE] * 4)
    assert f"4 chunks were handed over, {count} answers came" in caplog.text


def test_what_of_a_run_is_under_way_ends_and_the_rest_does_not_begin_when_it_is_cancelled() -> None:
    tier = RunTier(3)
    with lane_of(tier) as lane:
        tier.hold()
        lane.submit(JobId(1), WRITE, parts_of(0, 9, filled=True))
        tier.wait_begun()
        lane.cancel([JobId(1)])
        tier.release()
        wrote = outcomes(lane)[1]
        assert wrote.fates == bytes([DONE] * 3 + [FAILED] * 6)
        assert wrote.trouble == {CANCELLED: 6}
        assert len(tier.calls) == 1


def test_of_a_late_run_of_before_a_reset_every_chunk_is_forgotten() -> None:
    tier = RunTier(3)
    with lane_of(tier, deadline_s=0.05, trouble_limit=100) as lane:
        tier.hold()
        lane.submit(JobId(1), WRITE, parts_of(0, 3, filled=True))
        tier.wait_begun()
        until(lambda: lane.take_late() == {1})
        lane.begin_generation()
        until(lambda: lane.generations_begun == 1)
        tier.release()
        wrote = outcomes(lane)[1]
        assert (wrote.fates, wrote.trouble) == (bytes([FAILED] * 3), {CANCELLED: 3})
        until(lambda: not any(tier.contains([key_of(number) for number in range(3)], PATIENCE_S)))


def test_how_fast_it_reads_is_told_by_the_chunk() -> None:
    tier = RunTier(4)
    filled(tier, 0, 4)
    with lane_of(tier, thread_count=2) as lane:
        assert lane.state().chunk_read_s == 0.0
        lane._pace.note(8.0, 4, time.monotonic())
        assert lane.state().chunk_read_s == 1.0
        lane.submit(JobId(1), READ, parts_of(0, 4))
        outcomes(lane)
        assert 0.25 <= lane.state().chunk_read_s <= 1.0, "a fast call among them makes it a little faster"
        lane.submit(JobId(2), WRITE, parts_of(4, 8, filled=True))
        outcomes(lane)
        assert lane.state().chunk_read_s > 0.0, "writes say nothing of it"


GOOD, MISSED = (DONE, None), (GONE, MISS)
OURS, OTHER, NODES, NO_ROOM = (FAILED, UNAVAILABLE), (FAILED, "Exception"), (FAILED, NODE), (FAILED, FULL)


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([GOOD], (DONE, None)),
        ([MISSED, MISSED], (DONE, None)),
        ([OURS], (FAILED, UNAVAILABLE)),
        ([OTHER, OURS], (FAILED, "Exception")),
        ([OURS, GOOD], (DONE, None)),
        ([OURS, MISSED], (DONE, None)),
        ([NODES], (DONE, NODE)),
        ([NODES, GOOD], (DONE, NODE)),
        ([NODES, OURS], (FAILED, UNAVAILABLE)),
        ([NODES, OURS, GOOD], (DONE, None)),
        ([NO_ROOM], (FAILED, FULL)),
        ([GOOD, NO_ROOM], (FAILED, FULL)),
        ([OURS, NODES, NO_ROOM, GOOD], (FAILED, FULL)),
        ([], (DONE, None)),
    ],
)
def test_what_the_ends_of_chunks_say_of_the_call(
    parts: list[tuple[PartFate, str | None]], end: tuple[PartFate, str | None]
) -> None:
    call = CallEnd.of_parts(parts)
    assert (call.fate, call.trouble) == end
    assert call.parts == parts


# -- runs of names -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    start=st.integers(0, 200),
    count=st.integers(1, 200),
    known=st.integers(0, LEAD_ALIGNMENT),
    cut=st.data(),
)
def test_a_part_of_a_run_is_named_as_if_it_had_been_asked_for_alone(
    start: int, count: int, known: int, cut: st.DataObject
) -> None:
    lead = lead_of(start)[max(0, start % LEAD_ALIGNMENT - known) :]
    whole = RecordRun(
        0, start, tuple(HASHES[start : start + count]), HASHES[start - 1] if start else None, lead
    )
    first = cut.draw(st.integers(start, start + count))
    last = cut.draw(st.integers(first, start + count))
    part = whole.between(first, last)
    assert (part.start, len(part), part.hashes) == (first, last - first, tuple(HASHES[first:last]))
    assert part.parent_hash == (HASHES[first - 1] if first else None)
    assert part.names() == whole.names()[first - start : last - start]
    assert part.keys() == [key_of(number) for number in range(first, last)]
    begin = start - len(lead)
    assert part.lead == tuple(HASHES[max(begin, first - first % LEAD_ALIGNMENT) : first])
    assert whole.between(start, start + count) == whole
    assert part.between(first, last) == part


def test_a_run_of_another_group_has_other_keys_and_the_same_hashes() -> None:
    one, other = (RecordRun(group, 0, tuple(HASHES[:3])) for group in (0, 1))
    assert not set(one.keys()) & set(other.keys())
    assert [name.chunk_index for name in other.names()] == [0, 1, 2]
    assert [name.parent_hash for name in other.names()] == [None, *HASHES[:2]]
