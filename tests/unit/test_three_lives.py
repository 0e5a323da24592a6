"""The three lives of a chunk, through both halves and two ranks, every table looked at after every call.

Request A's chunk K0 lies in device blocks 101 to 104 and goes to slot 5; request B gets it in 201 to 204.
"""

from dataclasses import dataclass, field

import pytest
import torch
from fakes import FakeRequest, FakeStep

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    Hop,
    JobId,
    JobState,
    OffloadingWorkerMetadata,
    PoolReport,
    ReqContext,
)
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig
from kvtide.testing import HeldDevice
from kvtide.transfer.engine import OffloadingWorker
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import group_regions, layer_views

BLOCKS_A, BLOCKS_B = (101, 102, 103, 104), (201, 202, 203, 204)
JOB_0, JOB_1 = JobId(0), JobId(1)
GROUP = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 4, 4)


@dataclass
class Rank:
    index: int
    tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(256, 1, 4, 2, dtype=torch.int64))

    def __post_init__(self) -> None:
        groups = [group_regions(layer_views({"l": self.tensor}, ["l"], 256), 4)]
        self.pool = HostPool(8, groups[0].chunk_bytes, prefault=False)
        self.store, self.load = HeldDevice(Direction.STORE), HeldDevice(Direction.LOAD)

        self.worker = OffloadingWorker(
            self.index,
            self.pool,
            SingleDirectionOffloadingHandler(Direction.STORE, groups, self.pool, self.store),
            SingleDirectionOffloadingHandler(Direction.LOAD, groups, self.pool, self.load),
            MetricsDelta(),
            flush_limit_s=0.1,
        )

    def fill(self, blocks: tuple[int, ...], value: int) -> None:
        for block in blocks:
            self.tensor[block] = value + block

    def slot(self, slot: int) -> bytes:
        return bytes(self.pool.view[slot * self.pool.slot_bytes : (slot + 1) * self.pool.slot_bytes])


class Life:
    def __init__(self) -> None:
        self.manager = CPUOffloadingManager(LRUPolicy())
        config = SchedulerOffloadConfig(KVGeometry((GROUP,), shard_count=2))
        self.scheduler = OffloadingConnectorScheduler(config, self.manager, MetricsDelta())
        self.ranks = [Rank(0), Rank(1)]
        self.now_s = 0.0
        # Both pools are there, and five chunks of somebody else lie in slots 0 to 4.
        for rank in self.ranks:
            self.tell(rank)
        other = FakeRequest("other", list(range(500, 580)))
        run = GROUP.run(other.block_hashes, 0, 5)
        prepared = self.manager.prepare_store(run, ReqContext("other"))
        assert tuple(prepared.store_spec.slots) == (0, 1, 2, 3, 4)
        self.manager.complete_store(prepared.keys_to_store, prepared.store_spec, ReqContext("other"), True)

    def tell(self, rank: Rank) -> OffloadingWorkerMetadata | None:
        rank.worker.take_results()
        answers = rank.worker.take_answers()
        self.scheduler.update_connector_output(answers, self.now_s)
        return answers

    def begin(self, step):
        for rank in self.ranks:
            rank.worker.begin_step(step)
        for rank in self.ranks:
            rank.worker.start_loads(step)

    def admit(self, request: FakeRequest, blocks: tuple[int, ...], external: int) -> None:
        self.scheduler.update_state_after_alloc(request, (list(blocks),), external, self.now_s)

    def plan(self, **scheduled: int):
        return self.scheduler.build_connector_meta(FakeStep(scheduled), self.now_s)

    @property
    def jobs(self):
        return self.scheduler._jobs

    @property
    def fenced(self) -> dict[int, set[JobId]]:
        """Open jobs per block; what is asked per block has to agree with it."""
        fences, found = self.jobs.fences, {}
        for job_id, blocks in fences._blocks_of.items():
            for block in blocks:
                found.setdefault(block, set()).add(job_id)
        for block in range(300):
            assert fences.conflicts([block]) == found.get(block, set())
        return found

    def lookup(self, request: FakeRequest):
        return self.manager.lookup(GROUP.run(request.block_hashes, 0, 1), ReqContext(request.request_id))


def _stored() -> tuple[Life, FakeRequest]:
    """Life one, up to the chunk being visible."""
    life = Life()
    a = FakeRequest("A", [*list(range(16)), 99])
    for rank in life.ranks:
        rank.fill(BLOCKS_A, 1000 * (rank.index + 1))
    life.scheduler.on_new_request(a)
    assert life.scheduler.get_num_new_matched_tokens(a, 0, 0.0) == (0, False)
    life.admit(a, BLOCKS_A, 0)
    return life, a


def test_store_planned_sent_copied_acknowledged_by_each_rank_visible() -> None:
    life, a = _stored()
    assert not len(life.jobs)
    assert not life.fenced

    step = life.plan(A=16)  # planned and sent
    status = life.jobs.get(JOB_0)
    assert status is not None
    assert status.state is JobState.SENT
    assert status.pending_count == 2
    assert [job.job_id for job in step.jobs] == [JOB_0]
    assert step.jobs[0].hops == (Hop(GPULoadStoreSpec(BLOCKS_A, (4,), (0,)), CPULoadStoreSpec((5,), (1,))),)
    assert step.jobs_to_flush == frozenset()
    assert life.fenced == {block: {JOB_0} for block in BLOCKS_A}
    assert life.manager.used_count == 6
    assert life.lookup(a).ready_count == 0
    assert life.lookup(a).later

    life.begin(step)  # the forward that writes the blocks is this step's: nothing is copied yet
    assert [rank.store.held for rank in life.ranks] == [[], []]
    a.num_computed_tokens = 16
    step = life.plan()
    assert step.jobs == ()
    life.begin(step)
    assert [rank.store.held for rank in life.ranks] == [[JOB_0], [JOB_0]]

    life.ranks[0].store.finish(JOB_0)  # copied on one rank, acknowledged by it
    answers = life.tell(life.ranks[0])
    assert answers is not None
    assert list(answers.results) == [(JOB_0, 0)]
    assert status.pending_count == 1
    assert life.fenced == {block: {JOB_0} for block in BLOCKS_A}
    assert life.lookup(a).ready_count == 0

    assert life.tell(life.ranks[1]) is None  # the other one has nothing to say yet
    life.ranks[1].store.finish(JOB_0)
    life.tell(life.ranks[1])
    assert status.pending_count == 0
    assert status.state is JobState.DONE
    assert life.jobs.get(JOB_0) is None
    assert not life.fenced
    assert (life.lookup(a).ready_count, life.lookup(a).later) == (1, False)
    for rank in life.ranks:
        expected = torch.stack([rank.tensor[block] for block in BLOCKS_A])
        assert rank.slot(5) == expected.numpy().tobytes()
    life.scheduler.check_invariants()


def test_load_pinned_sent_copied_acknowledged_unpinned() -> None:
    life, _ = _stored()
    life.begin(life.plan(A=16))
    life.begin(life.plan())
    for rank in life.ranks:
        rank.store.finish()
        life.tell(rank)

    b = FakeRequest("B", [*list(range(16)), 7, 8])
    life.scheduler.on_new_request(b)
    assert life.scheduler.get_num_new_matched_tokens(b, 0, 1.0) == (16, True)
    assert life.manager.pinned_count == 0  # an answer that may be thrown away has no effect
    life.admit(b, BLOCKS_B, 16)
    assert life.manager.pinned_count == 1
    status = life.jobs.get(JOB_1)
    assert status is not None
    assert status.state is JobState.PLANNED
    assert life.fenced == {block: {JOB_1} for block in BLOCKS_B}

    step = life.plan()
    assert status.state is JobState.SENT
    assert step.jobs[0].hops == (Hop(CPULoadStoreSpec((5,), (1,)), GPULoadStoreSpec(BLOCKS_B, (4,), (0,))),)
    life.begin(step)
    assert [rank.load.held for rank in life.ranks] == [[JOB_1], [JOB_1]]

    finished = []
    for rank in life.ranks:
        rank.load.finish(JOB_1)
        finished.append(rank.worker.take_results())
        life.scheduler.update_connector_output(rank.worker.take_answers(), 1.0)
        assert life.manager.pinned_count == (1 if rank.index == 0 else 0)
    assert [results.finished for results in finished] == [{"B"}, {"B"}]
    assert [results.failed for results in finished] == [set(), set()]
    assert status.state is JobState.DONE
    assert not life.fenced
    for rank in life.ranks:
        for source, target in zip(BLOCKS_A, BLOCKS_B, strict=True):
            assert torch.equal(rank.tensor[source], rank.tensor[target])
    assert life.lookup(b).ready_count == 1
    life.scheduler.check_invariants()


def test_preempted_flushed_before_its_blocks_are_reused_acknowledged_closed() -> None:
    life, a = _stored()
    life.begin(life.plan(A=16))
    life.begin(life.plan())
    assert [rank.store.held for rank in life.ranks] == [[JOB_0], [JOB_0]]
    before = [torch.stack([rank.tensor[block] for block in BLOCKS_A]) for rank in life.ranks]

    a.num_computed_tokens = 0
    c = FakeRequest("C", list(range(300, 317)))
    life.scheduler.on_new_request(c)
    assert life.scheduler.get_num_new_matched_tokens(c, 0, 2.0) == (0, False)
    life.admit(c, BLOCKS_A, 0)  # somebody else gets the very blocks
    step = life.scheduler.build_connector_meta(FakeStep({"C": 16}, preempted_req_ids={"A"}), 2.0)
    assert step.jobs_to_flush == {JOB_0}

    life.begin(step)
    assert [rank.store.waited for rank in life.ranks] == [[JOB_0], [JOB_0]]
    for rank in life.ranks:
        rank.fill(BLOCKS_A, 7777)  # the forward of C
    for rank, expected in zip(life.ranks, before, strict=True):
        life.tell(rank)
        assert rank.slot(5) == expected.numpy().tobytes()
    assert life.jobs.get(JOB_0) is None
    assert {block: jobs for block, jobs in life.fenced.items() if JOB_0 in jobs} == {}
    assert life.lookup(a).ready_count == 1
    assert life.scheduler.get_num_new_matched_tokens(a, 0, 3.0) == (16, True)


@pytest.mark.parametrize("repeated", [0, 1])
def test_an_answer_given_twice_changes_nothing(repeated: int) -> None:
    life, a = _stored()
    life.begin(life.plan(A=16))
    life.begin(life.plan())
    life.ranks[repeated].store.finish()
    answers = life.tell(life.ranks[repeated])
    life.scheduler.update_connector_output(answers, 0.0)
    assert life.jobs.get(JOB_0).pending_count == 1
    assert life.lookup(a).ready_count == 0


def test_a_pool_that_one_rank_has_not_reported_holds_nothing() -> None:
    manager = CPUOffloadingManager(LRUPolicy())
    config = SchedulerOffloadConfig(KVGeometry((GROUP,), shard_count=2))
    scheduler = OffloadingConnectorScheduler(config, manager, MetricsDelta())
    scheduler.update_connector_output(OffloadingWorkerMetadata(pools={0: PoolReport(8, 8, 64)}), 0.0)
    assert manager.capacity == 0
    scheduler.update_connector_output(OffloadingWorkerMetadata(pools={1: PoolReport(3, 8, 64)}), 0.0)
    assert manager.capacity == 3
