"""The lane of simulations: the traps it is made for, and that it ends what a lane has to end."""

import random

from kvtide.jobs import JobId
from kvtide.keys import make_offload_key
from kvtide.testing import LanePlan, MemoryTier, VirtualClock, VirtualLane
from kvtide.testing.virtual_lane import RUBBISH
from kvtide.tiers.records import ChunkName, RecordIdentity
from kvtide.transfer.lane import PartFate, TierDirection, TierPart
from kvtide.transfer.tier_lane import LaneSettings

NAME = ChunkName(make_offload_key(bytes(31) + b"a", 0), None, 0)
DEADLINE_S = 0.5


class Rig:
    """A lane before a tier in memory."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.plan = LanePlan(random.Random(3))
        settings = LaneSettings(2, 1 << 10, DEADLINE_S)
        self.tier = MemoryTier(RecordIdentity(bytes(32)))
        self.lane = VirtualLane(self.tier, "memory", settings, self.plan, self.clock)
        self.clock.advance(2.0)
        self.lane.progress()

    def submit(self, job: int, direction: TierDirection, buffer: bytearray) -> bool:
        return self.lane.submit(JobId(job), direction, [TierPart(NAME, memoryview(buffer))])

    def fates(self, job: int) -> list[int]:
        return [fate for one in self.lane.poll() if one.job_id == job for fate in one.fates]


def test_a_late_read_is_told_late_and_writes_into_its_buffer_when_it_returns() -> None:
    rig = Rig()
    assert rig.submit(0, TierDirection.WRITE, bytearray(b"right" * 8))
    assert rig.fates(0) == [PartFate.DONE]
    rig.plan.weights = {"late": 1.0}
    buffer = bytearray(40)
    rig.submit(1, TierDirection.READ, buffer)
    assert buffer == bytes([RUBBISH]) * 40
    rig.clock.advance(DEADLINE_S + 0.001)
    assert rig.fates(1) == []
    assert rig.lane.take_late() == {1}
    rig.clock.advance(100.0)
    assert rig.fates(1) == [PartFate.DONE]
    assert buffer == b"right" * 8


def test_a_write_reads_its_buffer_when_it_returns() -> None:
    rig = Rig()
    rig.plan.weights = {"slow": 1.0}
    buffer = bytearray(b"right" * 8)
    rig.submit(0, TierDirection.WRITE, buffer)
    buffer[:] = b"other" * 8
    rig.clock.advance(DEADLINE_S)
    assert rig.fates(0) == [PartFate.DONE]
    rig.plan.weights = {}
    found = bytearray(40)
    rig.submit(1, TierDirection.READ, found)
    assert rig.fates(1) == [PartFate.DONE]
    assert found == b"other" * 8


def test_a_damaged_record_is_gone_and_a_generation_voids_what_is_open() -> None:
    rig = Rig()
    rig.submit(0, TierDirection.WRITE, bytearray(40))
    rig.lane.poll()
    rig.plan.weights = {"is damaged": 1.0}
    rig.submit(1, TierDirection.READ, bytearray(40))
    rig.clock.advance(DEADLINE_S)
    assert rig.fates(1) == [PartFate.GONE]
    assert rig.plan.happened["record damaged"] == 1
    rig.plan.weights = {"slow": 1.0}
    rig.submit(2, TierDirection.WRITE, bytearray(40))
    rig.lane.begin_generation()
    for _ in range(3):
        rig.clock.advance(DEADLINE_S)
        rig.lane.progress()
    assert rig.fates(2) == [PartFate.FAILED]
    assert rig.lane.generations_begun == 1
    assert rig.tier.contains([NAME.key], 1.0) == [False]


def test_what_never_returns_is_let_go_by_release() -> None:
    rig = Rig()
    rig.plan.weights = {"never returns": 1.0}
    rig.submit(0, TierDirection.WRITE, bytearray(40))
    rig.clock.advance(1000.0)
    assert rig.fates(0) == []
    assert not rig.lane.is_idle
    rig.lane.release()
    assert rig.fates(0) == [PartFate.DONE]
    assert rig.lane.is_idle
