"""What becomes of a chunk below host memory, through both halves and two ranks, every table after every call.

Request A's chunk K0 lies in device blocks 101 to 104 and goes to slot 5; request B gets it in 201 to 204.
"""

import torch
from fakes import FakeRequest
from lanes import HeldLane
from test_three_lives import BLOCKS_A, BLOCKS_B, GROUP, JOB_0, JOB_1, Life, Rank

from kvtide.geometry import KVGeometry
from kvtide.jobs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    Hop,
    HopResult,
    JobId,
    PartFate,
    ReqContext,
    StorageLoadStoreSpec,
)
from kvtide.keys import make_offload_key
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.scheduler import promotions as promotions_module
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig
from kvtide.transfer.engine import OffloadingWorker
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.region import group_regions, layer_views
from kvtide.transfer.tier_hops import TierHops, TierSeat

JOB_2 = JobId(2)
RECORD_BYTES = 512


class RankBelow(Rank):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.lane = HeldLane()
        seat = TierSeat(self.lane, (RECORD_BYTES,), (2,))
        hops = TierHops([seat], self.pool, [self.pool.slot_bytes], MetricsDelta())
        groups = [group_regions(layer_views({"l": self.tensor}, ["l"], 256), 4)]
        self.worker = OffloadingWorker(
            self.index,
            self.pool,
            SingleDirectionOffloadingHandler(Direction.STORE, groups, self.pool, self.store),
            SingleDirectionOffloadingHandler(Direction.LOAD, groups, self.pool, self.load),
            MetricsDelta(),
            flush_limit_s=0.1,
            hops=hops,
        )


class LifeBelow(Life):
    """Five slots are somebody else's; of eight a half may be promoted."""

    def __init__(self, records: list[dict] | None = None) -> None:
        metrics = MetricsDelta()
        self.manager = CPUOffloadingManager(LRUPolicy(), lower_policies=[LRUPolicy()])
        groups = (CatalogGroup(),)
        plan = TierPlan("disk", Demotion.AT_ONCE, 1 << 20, True)
        self.tier = LowerTier(1, plan, self.manager.catalog, groups, 2, metrics)
        ladder = Ladder(self.manager, [self.tier])
        config = SchedulerOffloadConfig(KVGeometry((GROUP,), shard_count=2), promotion_share=0.5)
        self.scheduler = OffloadingConnectorScheduler(config, self.manager, metrics, ladder)
        self.ranks = [RankBelow(0), RankBelow(1)]
        self.now_s = 0.0
        for rank, held in zip(self.ranks, records or [{}, {}], strict=True):
            rank.lane.records = held
            rank.lane.tell()
        for rank in self.ranks:
            self.tell(rank)
        other = FakeRequest("other", list(range(500, 580)))
        prepared = self.manager.prepare_store(GROUP.run(other.block_hashes, 0, 5), ReqContext("other"))
        self.manager.complete_store(prepared.keys_to_store, prepared.store_spec, ReqContext("other"), True)

    @property
    def lower(self):
        return self.scheduler._lower

    def open_hops(self) -> dict[tuple[JobId, int], set[int]]:
        return {hop.key: set(hop.owing) for hop in self.lower._below}

    def below(self, request: FakeRequest, chunks: int = 1) -> int:
        return self.manager.catalog.resident(0, GROUP_KEYS(request), 0, chunks, 1)

    def table(self, request: FakeRequest) -> tuple[int, int, int, int, int]:
        """Ready in host memory, there below, slots used, slots held by copies, bytes of open writes."""
        self.scheduler.check_invariants()
        return (
            self.lookup(request).ready_count,
            self.below(request),
            self.manager.used_count,
            self.manager.pinned_count,
            self.tier.open_bytes,
        )


def GROUP_KEYS(request: FakeRequest) -> list[bytes]:
    return GROUP.run(request.block_hashes, 0, len(request.block_hashes) // 4).hashes()


def _copied() -> tuple[LifeBelow, FakeRequest]:
    """A's chunk is in host memory on both ranks, and on its way below."""
    life = LifeBelow()
    a = FakeRequest("A", [*list(range(16)), 99])
    for rank in life.ranks:
        rank.fill(BLOCKS_A, 1000 * (rank.index + 1))
    life.scheduler.on_new_request(a)
    assert life.scheduler.get_num_new_matched_tokens(a, 0, 0.0) == (0, False)
    life.admit(a, BLOCKS_A, 0)
    step = life.plan(A=16)
    below = StorageLoadStoreSpec(1, 0, 0, (a.block_hashes[3],), None)
    assert step.jobs[0].hops == (
        Hop(GPULoadStoreSpec(BLOCKS_A, (4,), (0,)), CPULoadStoreSpec((5,), (1,))),
        Hop(CPULoadStoreSpec((5,), (1,)), below),
    )
    assert life.table(a) == (0, 0, 6, 1, RECORD_BYTES)
    assert life.open_hops() == {(JOB_0, 1): {0, 1}}
    life.begin(step)
    a.num_computed_tokens = 16
    life.begin(life.plan())
    assert [rank.lane.held for rank in life.ranks] == [[], []], "nothing is written that is not copied"

    life.ranks[0].store.finish(JOB_0)
    assert life.tell(life.ranks[0]).results == {(JOB_0, 0): {0: HopResult.DONE}}
    assert [rank.lane.held for rank in life.ranks] == [[JOB_0], []], "the rank goes on by itself"
    assert life.table(a) == (0, 0, 6, 1, RECORD_BYTES)
    life.ranks[1].store.finish(JOB_0)
    life.tell(life.ranks[1])
    assert [rank.lane.held for rank in life.ranks] == [[JOB_0], [JOB_0]]
    assert life.table(a) == (1, 0, 6, 1, RECORD_BYTES)
    assert life.jobs.get(JOB_0) is None
    assert not life.fenced, "hops below touch no block"
    return life, a


def _written_on() -> tuple[LifeBelow, FakeRequest]:
    life, a = _copied()
    key = make_offload_key(a.block_hashes[3], 0)
    life.ranks[0].lane.finish(JOB_0)
    assert life.tell(life.ranks[0]).results == {(JOB_0, 1): {0: HopResult.DONE}}
    assert life.open_hops() == {(JOB_0, 1): {1}}
    assert life.table(a) == (1, 0, 6, 1, RECORD_BYTES), "one rank is not enough"
    life.ranks[1].lane.finish(JOB_0)
    life.tell(life.ranks[1])
    assert life.open_hops() == {}
    assert life.table(a) == (1, 1, 6, 0, 0)
    assert life.tier.used_bytes == RECORD_BYTES
    for rank in life.ranks:
        expected = torch.stack([rank.tensor[block] for block in BLOCKS_A]).numpy().tobytes()
        assert rank.lane.records[key][1] == expected == rank.slot(5)
    return life, a


def test_written_on_by_each_rank_as_soon_as_it_is_copied_and_there_when_both_have_it() -> None:
    life, _ = _written_on()
    life.scheduler.request_finished_all_groups(FakeRequest("A", [1]), (list(BLOCKS_A),), 1.0)
    assert life.plan().discards == ()


def test_written_on_by_one_rank_alone_is_not_there_and_forgotten_by_both() -> None:
    life, a = _copied()
    key = make_offload_key(a.block_hashes[3], 0)
    life.ranks[0].lane.finish(JOB_0)
    life.tell(life.ranks[0])
    life.ranks[1].lane.finish(JOB_0, PartFate.FAILED, trouble=["late"])
    answers = life.tell(life.ranks[1])
    assert answers.fates == {(JOB_0, 1): {1: bytes([PartFate.FAILED])}}
    assert life.table(a) == (1, 0, 6, 0, 0)
    step = life.plan()
    assert [(discard.tier, discard.keys) for discard in step.discards] == [(1, (key,))]
    life.begin(step)
    assert [rank.lane.records for rank in life.ranks] == [{}, {}]


def test_a_copy_that_failed_is_not_written_on() -> None:
    life, a = LifeBelow(), FakeRequest("A", [*list(range(16)), 99])
    life.scheduler.on_new_request(a)
    life.admit(a, BLOCKS_A, 0)
    life.begin(life.plan(A=16))
    life.begin(life.plan())
    life.ranks[0].store.finish(JOB_0)
    life.ranks[1].store.fail(JOB_0)
    life.tell(life.ranks[0])
    answers = life.tell(life.ranks[1])
    assert answers.results == {(JOB_0, 0): {1: HopResult.FAILED}, (JOB_0, 1): {1: HopResult.FAILED}}
    assert life.table(a) == (0, 0, 6, 1, RECORD_BYTES), "the other rank still writes from the slot"
    life.ranks[0].lane.finish(JOB_0)
    life.tell(life.ranks[0])
    assert life.table(a) == (0, 0, 5, 0, 0)


def _evicted() -> tuple[LifeBelow, FakeRequest]:
    """A's chunk is below alone; B, who wants it, arrives."""
    life, _ = _written_on()
    life.manager._evict(8)
    b = FakeRequest("B", [*list(range(16)), 7, 8])
    assert life.table(b) == (0, 1, 0, 0, 0)
    life.scheduler.on_new_request(b)
    assert life.open_hops() == {(JOB_1, 0): {0, 1}}
    assert life.table(b) == (0, 1, 1, 0, 0)
    assert life.scheduler.get_num_new_matched_tokens(b, 0, 1.0) == (None, False)
    step = life.plan()
    (job,) = step.jobs
    assert (job.job_id, job.direction, job.request_id) == (JOB_1, Direction.PROMOTE, "B")
    (hop,) = job.hops
    assert hop.source == StorageLoadStoreSpec(1, 0, 0, (b.block_hashes[3],), None)
    life.begin(step)
    assert [rank.lane.held for rank in life.ranks] == [[JOB_1], [JOB_1]]
    return life, b


def test_brought_back_kept_until_it_is_read_loaded_and_the_bytes_are_those_of_before() -> None:
    life, b = _evicted()
    for rank in life.ranks:
        rank.pool.view[:] = 0
    life.ranks[0].lane.finish(JOB_1)
    life.tell(life.ranks[0])
    assert life.table(b) == (0, 1, 1, 0, 0)
    assert life.manager.catalog.pin_count == 0
    life.ranks[1].lane.finish(JOB_1)
    life.tell(life.ranks[1])
    assert life.table(b) == (1, 1, 1, 0, 0)
    assert life.manager.catalog.pin_count == 1, "it stays until it is read"
    assert len(life.manager._evict(8)) == 0
    assert life.scheduler.get_num_new_matched_tokens(b, 0, 1.0) == (16, True)
    life.admit(b, BLOCKS_B, 16)
    assert life.table(b) == (1, 1, 1, 1, 0)
    assert life.manager.catalog.pin_count == 1, "the load's own"
    step = life.plan()
    (job,) = step.jobs
    assert (job.job_id, job.direction) == (JOB_2, Direction.LOAD)
    life.begin(step)
    for rank in life.ranks:
        rank.load.finish(JOB_2)
        life.tell(rank)
    assert life.table(b) == (1, 1, 1, 0, 0)
    assert life.manager.catalog.pin_count == 0
    for rank in life.ranks:
        for source, target in zip(BLOCKS_A, BLOCKS_B, strict=True):
            assert torch.equal(rank.tensor[source], rank.tensor[target])
    assert len(life.manager._evict(8)) == 1


def test_brought_back_for_one_who_has_gone_it_is_not_kept_and_the_copy_is_cancelled() -> None:
    life, b = _evicted()
    life.scheduler.request_finished_all_groups(b, ([],), 1.0)
    step = life.plan()
    assert step.jobs_to_cancel == {JOB_1}
    life.begin(step)
    assert [rank.lane.asked for rank in life.ranks] == [[("cancel", {JOB_1})]] * 2
    for rank in life.ranks:
        rank.lane.finish(JOB_1)
        life.tell(rank)
    assert life.table(b) == (1, 1, 1, 0, 0)
    assert life.manager.catalog.pin_count == 0


def test_gone_on_one_rank_it_is_struck_out_and_the_request_computes() -> None:
    life, b = _evicted()
    life.ranks[0].lane.finish(JOB_1)
    life.tell(life.ranks[0])
    life.ranks[1].lane.finish(JOB_1, PartFate.GONE, trouble=["miss"])
    life.tell(life.ranks[1])
    assert life.table(b) == (0, 0, 0, 0, 0)
    assert life.scheduler.get_num_new_matched_tokens(b, 0, 1.0) == (0, False)
    assert [discard.keys for discard in life.plan().discards] == [(make_offload_key(b.block_hashes[3], 0),)]
    assert life.open_hops() == {}


def test_late_nobody_waits_for_it_its_slot_stays_taken_and_what_comes_after_all_is_let_go() -> None:
    life, b = _evicted()
    life.ranks[0].lane.be_late(JOB_1)
    answers = life.tell(life.ranks[0])
    assert answers.results == {(JOB_1, 0): {0: HopResult.LATE}}
    assert life.table(b) == (0, 1, 1, 0, 0)
    assert not life.lookup(b).later
    assert life.open_hops() == {(JOB_1, 0): {0, 1}}
    assert life.scheduler.get_num_new_matched_tokens(b, 0, 1.0) == (0, False), "it goes on without"
    assert life.open_hops() == {(JOB_1, 0): {0, 1}}, "and nothing is begun for it again"
    life.ranks[1].lane.finish(JOB_1)
    life.tell(life.ranks[1])
    assert life.table(b) == (0, 1, 1, 0, 0), "the other rank may still write into its slot"
    life.ranks[0].lane.finish(JOB_1)
    assert life.tell(life.ranks[0]).results == {(JOB_1, 0): {0: HopResult.DONE}}
    assert life.table(b) == (0, 1, 0, 0, 0), "late is not lost"
    assert life.open_hops() == {}
    life.admit(b, BLOCKS_B, 0)
    assert life.manager.catalog.pin_count == 0
    c = FakeRequest("C", [*list(range(16)), 9])
    life.scheduler.on_new_request(c)
    assert life.open_hops() == {(JOB_2, 0): {0, 1}}, "the next one tries"


def test_restart_what_both_ranks_tell_is_brought_back_with_the_bytes_of_before() -> None:
    before, _ = _written_on()
    kept = [dict(rank.lane.records) for rank in before.ranks]
    only_one = FakeRequest("C", list(range(800, 817)))
    name = before.ranks[0].lane.records[next(iter(kept[0]))][0]
    lonely = make_offload_key(only_one.block_hashes[3], 0)
    kept[1][lonely] = (type(name)(lonely, None, 0), b"")
    life = LifeBelow(kept)
    for rank in life.ranks:  # the last piece of each
        life.tell(rank)
    a = FakeRequest("A", [*list(range(16)), 99])
    assert life.below(a) == 0
    step = life.plan()
    assert life.below(a) == 1
    assert [discard.keys for discard in step.discards] == [(lonely,)]
    life.begin(step)
    life.scheduler.on_new_request(a)
    life.begin(life.plan())
    for rank, old in zip(life.ranks, before.ranks, strict=True):
        (job_id,) = rank.lane.held
        rank.lane.finish(job_id)
        life.tell(rank)
        slot = life.manager.catalog.slots(0, 0, GROUP_KEYS(a), 0, 1)
        assert rank.index == 0 or rank.slot(int(slot[0])) == old.slot(5)
    assert life.scheduler.get_num_new_matched_tokens(a, 0, 1.0) == (16, True)


def test_a_piece_that_comes_before_what_it_extends_is_kept_as_well_once_that_has_come(monkeypatch) -> None:
    monkeypatch.setattr(promotions_module, "PIECE_CHUNKS", 1)
    life = LifeBelow()
    b = FakeRequest("B", [*list(range(32)), 7])
    prepared = life.manager.prepare_store(GROUP.run(b.block_hashes, 0, 2), ReqContext("x"))
    ladder = life.lower._ladder
    (write,) = ladder.writes_behind(prepared.keys_to_store, prepared.store_spec.slots, ReqContext("x"), None)
    life.manager.complete_store(prepared.keys_to_store, prepared.store_spec, ReqContext("x"), True)
    ladder.end_write(write, [PartFate.DONE] * 2)
    life.manager._evict(8)
    for rank in life.ranks:
        for key in write.run:
            rank.lane.records[key] = (None, bytes(rank.pool.slot_bytes))
    life.scheduler.on_new_request(b)
    life.begin(life.plan())
    first, second = life.ranks[0].lane.held
    for job_id in (second, first):
        for rank in life.ranks:
            rank.lane.finish(job_id)
            life.tell(rank)
        life.scheduler.check_invariants()
    assert life.manager.lookup(GROUP.run(b.block_hashes, 0, 2), ReqContext("b")).ready_count == 2
    assert len(life.manager._evict(8)) == 0, "both stay until they are read"
    assert life.scheduler.get_num_new_matched_tokens(b, 0, 1.0) == (32, True)
    life.scheduler.request_finished_all_groups(b, ([],), 2.0)
    assert len(life.manager._evict(8)) == 2
