"""A rank's hops to the tiers below: what a lane says, and what the scheduler half hears of it."""

import logging
from collections import Counter

import pytest
import torch
from fakes import chained_hashes
from lanes import HeldLane

from kvtide.jobs import (
    CPULoadStoreSpec,
    Direction,
    Discard,
    GPULoadStoreSpec,
    Hop,
    HopResult,
    JobId,
    OffloadingConnectorMetadata,
    PartFate,
    StorageLoadStoreSpec,
    TransferJob,
)
from kvtide.keys import ChunkRun, make_offload_key
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.manager.warming import Warming
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.testing import HeldDevice
from kvtide.tiers.breaker import BreakerState
from kvtide.tiers.records import ChunkName
from kvtide.transfer import tier_hops as tier_hops_module
from kvtide.transfer.engine import OffloadingWorker
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.lane import TierDirection
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import group_regions, layer_views
from kvtide.transfer.tier_hops import TierHops, TierSeat

DONE, FAILED, GONE = PartFate.DONE, PartFate.FAILED, PartFate.GONE
HASHES = tuple(chained_hashes(range(6), 1))


class Worker:
    """Rank 3, eight slots, two tiers."""

    def __init__(self) -> None:
        self.tensor = torch.arange(64 * 4, dtype=torch.int64).reshape(64, 1, 4, 1).clone()
        groups = [group_regions(layer_views({"l": self.tensor}, ["l"], 64), 1)]
        self.pool = HostPool(8, groups[0].chunk_bytes, prefault=False)
        self.store, self.load = HeldDevice(Direction.STORE), HeldDevice(Direction.LOAD)
        self.lanes = [HeldLane("near"), HeldLane("far")]
        self.metrics = MetricsDelta()
        seats = [TierSeat(lane, (64,), (2,)) for lane in self.lanes]
        self.hops = TierHops(seats, self.pool, [self.pool.slot_bytes], self.metrics)
        self.worker = OffloadingWorker(
            3,
            self.pool,
            SingleDirectionOffloadingHandler(Direction.STORE, groups, self.pool, self.store),
            SingleDirectionOffloadingHandler(Direction.LOAD, groups, self.pool, self.load),
            self.metrics,
            flush_limit_s=0.1,
            hops=self.hops,
        )
        self.answers()

    def begin(self, *jobs: TransferJob, **told) -> OffloadingConnectorMetadata:
        step = OffloadingConnectorMetadata(told.pop("generation", 0), jobs, **told)
        self.worker.begin_step(step)
        self.worker.start_loads(step)
        return step

    def answers(self):
        self.worker.take_results()
        return self.worker.take_answers()

    def results(self) -> dict:
        answers = self.answers()
        if answers is None:
            return {}
        return {key: result for key, by_rank in answers.results.items() for result in by_rank.values()}

    def slot(self, slot: int) -> bytes:
        return bytes(self.pool.view[slot * self.pool.slot_bytes : (slot + 1) * self.pool.slot_bytes])


def below(tier: int, start: int, stop: int) -> StorageLoadStoreSpec:
    return StorageLoadStoreSpec.of(tier, ChunkRun(HASHES, 0, 1, start, stop))


def demote(job_id: int, tier: int, start: int, slots: tuple[int, ...], generation: int = 0) -> TransferJob:
    hop = Hop(CPULoadStoreSpec(slots, (len(slots),)), below(tier, start, start + len(slots)))
    return TransferJob(JobId(job_id), generation, Direction.DEMOTE, "", (hop,))


def promote(job_id: int, tier: int, start: int, slots: tuple[int, ...], generation: int = 0) -> TransferJob:
    hop = Hop(below(tier, start, start + len(slots)), CPULoadStoreSpec(slots, (len(slots),)))
    return TransferJob(JobId(job_id), generation, Direction.PROMOTE, "r", (hop,))


def test_a_chunk_is_named_with_its_parent_and_its_place_and_its_slot_is_read_or_written() -> None:
    worker = Worker()
    worker.pool.view[:] = 1
    worker.pool.view[5 * worker.pool.slot_bytes :][: worker.pool.slot_bytes] = 7
    worker.begin(demote(0, 1, 2, (5, 2)))
    assert worker.lanes[0].names(JobId(0)) == [
        ChunkName(make_offload_key(HASHES[2], 0), HASHES[1], 2),
        ChunkName(make_offload_key(HASHES[3], 0), HASHES[2], 3),
    ]
    assert worker.lanes[1].held == []
    worker.lanes[0].finish(JobId(0))
    assert worker.results() == {(0, 0): HopResult.DONE}
    worker.begin(promote(1, 1, 2, (0,)))
    worker.lanes[0].finish(JobId(1))
    answers = worker.answers()
    assert answers.results == {(1, 0): {3: HopResult.DONE}}
    assert answers.fates == {}, "said only where not all is done"
    assert worker.slot(0) == bytes([7]) * worker.pool.slot_bytes
    size = worker.pool.slot_bytes
    assert worker.metrics.data["tier_bytes|near,write"] == 2 * size
    assert worker.metrics.data["tier_bytes|near,read"] == size
    assert worker.metrics.data["tier_seconds|near,read"] == 0.25


def test_a_store_goes_on_to_each_tier_when_its_copy_has_ended_well_and_fails_with_it() -> None:
    worker = Worker()
    blocks = Hop(GPULoadStoreSpec((9,), (1,), (0,)), CPULoadStoreSpec((4,), (1,)))
    on = tuple(Hop(CPULoadStoreSpec((4,), (1,)), below(tier, 0, 1)) for tier in (1, 2))
    for job_id in (0, 1):
        worker.begin(TransferJob(JobId(job_id), 0, Direction.STORE, "r", (blocks, *on)))
        worker.begin()
        assert [lane.held for lane in worker.lanes] == [[], []]
        if job_id == 0:
            worker.store.finish(JobId(0))
            assert worker.results() == {(0, 0): HopResult.DONE}
            assert [lane.held for lane in worker.lanes] == [[0], [0]]
            worker.lanes[1].finish(JobId(0))
            assert worker.results() == {(0, 2): HopResult.DONE}
            worker.lanes[0].finish(JobId(0))
            assert worker.results() == {(0, 1): HopResult.DONE}
    worker.store.fail(JobId(1))
    assert worker.results() == {(1, hop): HopResult.FAILED for hop in (0, 1, 2)}
    assert [lane.held for lane in worker.lanes] == [[], []]


def test_what_a_lane_does_not_take_fails_at_once_and_is_counted() -> None:
    worker = Worker()
    worker.lanes[0].room = False
    worker.begin(demote(0, 1, 0, (1, 2)), demote(1, 2, 0, (1, 2)))
    assert worker.results() == {(0, 0): HopResult.FAILED}
    assert worker.metrics.data["tier_errors|near,queue_full"] == 2
    worker.lanes[1].finish(JobId(1), DONE, FAILED, trouble=["TierFullError"])
    answers = worker.answers()
    assert answers.results == {(1, 0): {3: HopResult.FAILED}}
    assert answers.fates == {(1, 0): {3: bytes([DONE, FAILED])}}
    assert worker.metrics.data["tier_errors|far,full"] == 1


@pytest.mark.parametrize(
    ("trouble", "label"),
    [
        ("miss", "miss"),
        ("CorruptRecordError", "corrupt"),
        ("TierFullError", "full"),
        ("late", "late"),
        ("cancelled", "cancelled"),
        ("out", "out"),
        ("TierUnavailableError", "unavailable"),
        ("ZeroDivisionError", "unavailable"),
    ],
)
def test_trouble_is_counted_by_its_kind(trouble: str, label: str) -> None:
    worker = Worker()
    worker.begin(promote(0, 1, 0, (1,)))
    worker.lanes[0].finish(JobId(0), GONE, trouble=[trouble])
    assert worker.answers().fates == {(0, 0): {3: bytes([GONE])}}
    assert worker.metrics.data[f"tier_errors|near,{label}"] == 1


def test_late_is_said_once_and_the_end_is_said_when_it_comes() -> None:
    worker = Worker()
    worker.begin(promote(0, 1, 0, (1,)), promote(1, 1, 1, (2,)))
    worker.lanes[0].be_late(JobId(0))
    assert worker.results() == {(0, 0): HopResult.LATE}
    assert worker.results() == {}
    worker.lanes[0].records[make_offload_key(HASHES[0], 0)] = (None, bytes(worker.pool.slot_bytes))
    worker.lanes[0].finish(JobId(0))
    worker.lanes[0].finish(JobId(1), FAILED, trouble=["late"])
    worker.lanes[0].be_late(JobId(1))  # of a job that has ended by now
    assert worker.results() == {(0, 0): HopResult.DONE, (1, 0): HopResult.FAILED}
    worker.lanes[0].be_late(JobId(1))
    worker.lanes[0].be_late(JobId(77))
    assert worker.results() == {}


def test_a_step_that_is_begun_twice_asks_each_thing_once() -> None:
    worker = Worker()
    key = make_offload_key(HASHES[5], 0)
    told = {"discards": (Discard(2, (key,)),), "jobs_to_cancel": frozenset({JobId(7)})}
    step = worker.begin(demote(0, 1, 0, (1,)), **told)
    worker.worker.begin_step(step)
    assert worker.lanes[0].held == [0]
    assert worker.lanes[0].asked == [("cancel", {7})]
    assert worker.lanes[1].asked == [("discard", (key,)), ("cancel", {7})]


def test_what_was_planned_before_a_reset_is_refused_and_a_reset_is_acknowledged_when_it_is_durable() -> None:
    worker = Worker()
    blocks = Hop(GPULoadStoreSpec((9,), (1,), (0,)), CPULoadStoreSpec((4,), (1,)))
    on = Hop(CPULoadStoreSpec((4,), (1,)), below(1, 0, 1))
    worker.begin(TransferJob(JobId(0), 0, Direction.STORE, "r", (blocks, on)), demote(1, 1, 2, (1,)))
    worker.begin(demote(2, 1, 3, (2,), generation=0), promote(3, 2, 0, (3,), generation=0), generation=1)
    assert [lane.asked for lane in worker.lanes] == [[("generation", False)]] * 2
    worker.store.finish(JobId(0))
    answers = worker.answers()
    said = {key: by_rank[3] for key, by_rank in answers.results.items()}
    assert said == {
        (0, 0): HopResult.DONE,
        (0, 1): HopResult.FAILED,
        (1, 0): HopResult.FAILED,
        (2, 0): HopResult.FAILED,
        (3, 0): HopResult.FAILED,
    }
    assert answers.generations == {}, "a restart would undo it"
    worker.lanes[0].begun = 1
    assert worker.answers() is None
    worker.lanes[1].begun = 1
    assert worker.answers().generations == {3: 1}
    worker.begin(demote(4, 1, 0, (1,), generation=1), generation=1)
    assert worker.lanes[0].held == [4]


def test_a_reset_that_keeps_what_is_below_is_acknowledged_at_once_and_has_it_told_anew() -> None:
    worker = Worker()
    worker.begin(demote(0, 1, 0, (1, 2)))
    worker.lanes[0].finish(JobId(0))
    worker.answers()
    worker.begin(generation=1, keeps_tiers=True)
    assert [lane.asked for lane in worker.lanes] == [[("recount",)]] * 2
    answers = worker.answers()
    assert answers.generations == {3: 1}
    told = [(piece.tier, piece.generation, len(piece.hashes) // 32) for piece in answers.inventory]
    assert told == [(1, 1, 2), (2, 1, 0)]
    assert [(piece.tier, piece.last) for piece in worker.answers().inventory] == [(1, True)]
    assert worker.answers() is None


def test_a_report_is_made_when_something_has_changed_and_not_before_a_tier_is_open() -> None:
    worker = Worker()
    worker.lanes[0].capacity_bytes = 5
    worker.lanes[1].opened = False
    assert {key: report.capacity_bytes for key, report in worker.answers().tiers.items()} == {(3, 1): 5}
    worker.lanes[1].capacity_bytes = 9
    assert worker.answers() is None
    worker.lanes[1].opened = True
    assert {key: report.capacity_bytes for key, report in worker.answers().tiers.items()} == {(3, 2): 9}
    for state, takes, serves, written in (
        (BreakerState.OPEN, True, False, False),
        (BreakerState.PROBING, True, True, True),
        (BreakerState.PROBING, False, True, False),
    ):
        worker.lanes[0].breaker, worker.lanes[0].takes_writes = state, takes
        report = worker.answers().tiers[3, 1]
        assert (report.serves, report.takes_writes) == (serves, written)
        assert worker.answers() is None


def test_what_a_tier_tells_when_it_is_opened_comes_in_pieces_and_is_put_into_the_books(monkeypatch) -> None:
    monkeypatch.setattr(tier_hops_module, "RECORDS_PER_STEP", 2)
    groups = (CatalogGroup(),)
    manager = CPUOffloadingManager(LRUPolicy(), lower_policies=[LRUPolicy()])
    plan = TierPlan("near", Demotion.AT_ONCE, 1000, True)
    tier = LowerTier(1, plan, manager.catalog, groups, 1, MetricsDelta())
    warming = Warming(tier, groups, 1)
    worker = Worker()
    lane = HeldLane("near")
    parents = [None, *HASHES]
    for index, (block_hash, parent) in enumerate(zip(HASHES, parents, strict=False)):
        key = make_offload_key(block_hash, 0)
        lane.records[key] = (ChunkName(key, parent, index), b"")
    lane.tell()
    hops = TierHops([TierSeat(lane, (64,), (1,))], worker.pool, [worker.pool.slot_bytes], MetricsDelta())
    sizes = []
    while not sizes or sizes[-1]:
        (piece,) = hops.take_answers().inventory
        sizes.append(len(piece.hashes) // 32)
        assert piece.last is (sizes[-1] == 0)
        warming.take(piece)
        warming.step()
    assert sizes == [2, 2, 2, 0]
    assert hops.take_answers().inventory == ()
    while not warming.is_done:
        warming.step()
    assert manager.catalog.resident(0, HASHES, 0, 6, 1) == 6
    assert tier.take_discards() == ()


def test_an_end_does_not_wait_for_ever_for_a_lane_whose_calls_do_not_return(caplog) -> None:
    worker = Worker()
    worker.lanes[1].ends = False
    worker.begin(demote(0, 2, 0, (1,)))
    with caplog.at_level(logging.WARNING):
        worker.worker.close()
    assert [lane.asked[-1] for lane in worker.lanes] == [("close", 5.0)] * 2
    assert Counter(record.getMessage() for record in caplog.records) == {
        "far: calls do not return; it is left as it is": 1
    }
    _, parts = worker.lanes[1]._open[JobId(0)]
    parts[0].payload[:] = bytes(len(parts[0].payload))  # a call that returns now finds its memory


def test_a_rank_without_the_tier_says_so(caplog) -> None:
    worker = Worker()
    bare = OffloadingWorker(0, worker.pool, *worker.worker._handlers.values(), MetricsDelta(), 0.1)
    with caplog.at_level(logging.ERROR):
        bare.begin_step(OffloadingConnectorMetadata(0, (demote(0, 1, 0, (1,)),)))
    assert "leads to a tier that this rank has not got" in caplog.text


def test_a_hop_that_leads_to_no_tier_is_our_bug() -> None:
    worker = Worker()
    hop = Hop(CPULoadStoreSpec((1,), (1,)), CPULoadStoreSpec((2,), (1,)))
    with pytest.raises(ValueError, match="no tier below host memory"):
        worker.hops.begin(TransferJob(JobId(0), 0, Direction.DEMOTE, "", (hop,)), 0)
    assert TierDirection.READ < TierDirection.WRITE
