"""Sliding windows beside full attention: what a reader needs, what is stored of it, and where it is put."""

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeCached, FakeRequest, FakeStep
from hypothesis import given
from hypothesis import strategies as st
from test_work_per_step import done

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry, chunks_needed
from kvtide.jobs import Direction, HopResult, OffloadingWorkerMetadata, PoolReport, ReqContext
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig

FULL = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 1, 4)
WINDOW = GroupGeometry(1, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=7)
GEOMETRY = KVGeometry((FULL, WINDOW))


@given(
    window=st.integers(1, 40),
    blocks_per_chunk=st.integers(1, 3),
    computed=st.integers(0, 30),
    points=st.integers(0, 10),
)
def test_a_reader_gets_every_token_it_looks_back_at_and_no_chunk_more(
    window: int, blocks_per_chunk: int, computed: int, points: int
) -> None:
    group = GroupGeometry(0, GroupKind.SLIDING_WINDOW, 4, blocks_per_chunk, 4, window)
    restored = points * group.tokens_per_chunk
    seen = range(max(0, restored - window + 1), restored)  # the query at ``restored`` sees itself and these
    missing = [token for token in seen if token >= computed]
    needed = sorted({token // group.tokens_per_chunk for token in missing})
    assert list(chunks_needed(group, computed, restored)) == needed
    assert group.window_chunks is not None
    assert len(needed) <= group.window_chunks


def test_a_window_of_one_token_needs_nothing() -> None:
    group = GroupGeometry(0, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=1)
    assert (group.window_chunks, list(chunks_needed(group, 0, 16))) == (0, [])


class Half:
    def __init__(self, slots: int = 64, geometry: KVGeometry = GEOMETRY, **limits: Any) -> None:
        groups = [
            CatalogGroup(
                geometry.positions_per_chunk(group), group.window_chunks, group.local_tokens is not None
            )
            for group in geometry.groups
        ]
        self.manager = CPUOffloadingManager(LRUPolicy(), groups=groups)
        config = SchedulerOffloadConfig(geometry, generated_store_tokens=4, **limits)
        self.scheduler = OffloadingConnectorScheduler(config, self.manager, MetricsDelta())
        self.scheduler.update_connector_output(
            OffloadingWorkerMetadata(pools={0: PoolReport(slots, slots, 64)}), 0.0
        )

    def ask(self, name: str, tokens: list[int], local: int = 0) -> tuple[FakeRequest, int | None]:
        request = FakeRequest(name, tokens)
        self.scheduler.on_new_request(request)
        return request, self.scheduler.get_num_new_matched_tokens(request, local, 0.0)[0]

    def step(self, tables: dict[str, tuple[list[int], ...]], states=None, cached=None, **scheduled: int):
        state = SimpleNamespace(get_block_ids=tables.get, boundary_state_offloads=states or {})
        step = FakeStep(scheduled, cached or FakeCached(), kv_connector_block_state=state)
        return self.scheduler.build_connector_meta(step, 0.0)

    def store(self, name: str, tokens: list[int]) -> None:
        """All of a prompt in one step, its blocks 1, 2, ... and 101, 102, ..."""
        request, _ = self.ask(name, tokens)
        count = -(-len(tokens) // 4)
        tables = (list(range(1, 1 + count)), list(range(101, 101 + count)))
        self.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
        step = self.step({name: tables}, **{name: len(tokens)})
        self.scheduler.update_connector_output(done(step), 0.0)
        request.num_computed_tokens = len(tokens)
        self.scheduler.request_finished_all_groups(request, tables, 0.0)


def test_both_groups_are_stored_and_only_the_window_of_one_is_loaded() -> None:
    half = Half()
    tokens = list(range(25))
    half.store("a", tokens)
    assert half.manager.used_count == 12
    request, hit = half.ask("b", tokens)
    assert hit == 24
    # vLLM hands out the null block for what the window has passed: the query at 24 looks back to 18.
    tables = ([11, 12, 13, 14, 15, 16], [0, 0, 0, 0, 25, 26])
    half.scheduler.update_state_after_alloc(request, tables, 24, 0.0)
    (job,) = half.step({}).jobs
    assert job.direction is Direction.LOAD
    device, host = job.hops[0].target, job.hops[0].source
    assert list(device.block_ids) == [11, 12, 13, 14, 15, 16, 25, 26]
    assert (device.group_sizes, device.block_indices) == ((6, 2), (0, 4))
    assert (host.group_sizes, len(host.slots)) == ((6, 2), 8)
    half.scheduler.update_connector_output(done(SimpleNamespace(jobs=[job])), 0.0)
    half.scheduler.check_invariants()


def test_what_a_window_has_passed_is_not_stored_and_the_hit_is_what_both_have() -> None:
    half = Half()
    tokens = list(range(25))
    request, _ = half.ask("a", tokens)
    half.scheduler.update_state_after_alloc(
        request, ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 104, 105, 106, 107]), 0, 0.0
    )
    step = half.step({"a": ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 104, 105, 106, 107])}, a=25)
    stored = {job.hops[0].source.group_sizes: list(job.hops[0].source.block_ids) for job in step.jobs}
    assert stored == {(6, 0): [1, 2, 3, 4, 5, 6], (0, 3): [104, 105, 106]}
    half.scheduler.update_connector_output(done(step), 0.0)
    # Points 16 and less would need chunks of the window that are not there; 20 needs 3 and 4.
    for count, hit in ((25, 24), (22, 20), (18, 0), (10, 0)):
        assert half.ask(f"b{count}", tokens[:count])[1] == hit


@pytest.mark.parametrize("failed", [FULL.group_index, WINDOW.group_index])
def test_a_group_that_failed_is_a_miss_for_both(failed: int) -> None:
    half = Half()
    tokens = list(range(25))
    request, _ = half.ask("a", tokens)
    tables = (list(range(1, 8)), list(range(101, 108)))
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    step = half.step({"a": tables}, a=25)
    answers = done(step)
    for job in step.jobs:
        if job.hops[0].source.group_sizes[failed]:
            answers.results[job.job_id, 0] = {0: HopResult.FAILED}
    half.scheduler.update_connector_output(answers, 0.0)
    assert half.ask("b", tokens)[1] == 0
    half.scheduler.check_invariants()


def test_what_both_hold_is_evicted_together_and_nothing_leaks() -> None:
    half = Half(slots=16)
    for name in range(6):
        half.store(str(name), [name] * 17)
        half.scheduler.check_invariants()
    assert half.manager.used_count <= 16
    last = FakeRequest("?", [5] * 17)
    run = WINDOW.run(last.block_hashes, 2, 4)
    assert half.manager.lookup(run, ReqContext("?")).ready_count == 2
    assert half.ask("again", [5] * 17)[1] == 16


STATES = GroupGeometry(1, GroupKind.MAMBA, 8, 1, 4, window_tokens=2)


def test_states_are_stored_where_the_engine_hands_them_over_and_nowhere_else() -> None:
    half = Half(geometry=KVGeometry((FULL, STATES)))
    tokens = list(range(33))
    request, _ = half.ask("a", tokens)
    tables = (list(range(1, 10)), [0, 102, 0, 104, 105])
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    # The states after 16 and 32 tokens; one within a block, one of a request that is gone: not of use.
    handed_over = {"a": [(1, 102, 16), (1, 104, 32), (1, 105, 30)], "gone": [(1, 9, 8)]}
    step = half.step({"a": tables}, handed_over, a=33)
    stored = [
        (list(job.hops[0].source.block_ids), job.hops[0].source.group_sizes, job.hops[0].source.block_indices)
        for job in step.jobs
    ]
    assert stored == [
        (list(range(1, 9)), (8, 0), (0, 0)),
        ([102], (0, 1), (0, 1)),
        ([104], (0, 1), (0, 3)),
    ]
    half.scheduler.update_connector_output(done(step), 0.0)
    for count, hit in ((34, 32), (33, 32), (32, 16), (20, 16), (15, 0)):
        assert half.ask(f"b{count}", tokens[:count] + [99] * (count - 33))[1] == hit
    request, hit = half.ask("c", tokens)
    assert hit == 32
    half.scheduler.update_state_after_alloc(request, (list(range(21, 29)), [0, 0, 0, 44]), 32, 0.0)
    (job,) = half.step({}).jobs
    device = job.hops[0].target
    assert (list(device.block_ids), device.group_sizes) == ([*range(21, 29), 44], (8, 1))
    assert device.block_indices == (0, 3)


@pytest.mark.parametrize(("first", "second"), [(FULL, WINDOW), (WINDOW, FULL)])
def test_a_store_takes_no_room_from_what_other_groups_hold_of_its_own_prefix(
    first: GroupGeometry, second: GroupGeometry
) -> None:
    # Each group would push out the other's for ever, and no point would ever be whole.
    groups = [
        CatalogGroup(GEOMETRY.positions_per_chunk(group), group.window_chunks) for group in (FULL, WINDOW)
    ]
    manager = CPUOffloadingManager(LRUPolicy(), groups=groups)
    manager.grow(3)
    block_hashes = FakeRequest("a", list(range(8))).block_hashes
    for group, chunks in ((first, 2), (second, 1)):
        output = manager.prepare_store(group.run(block_hashes, 0, 2), ReqContext("a"))
        assert len(output.keys_to_store) == chunks
        manager.complete_store(output.keys_to_store, output.store_spec, ReqContext("a"), success=True)
    assert manager.lookup(first.run(block_hashes, 0, 2), ReqContext("a")).ready_count == 2
    manager.check_invariants(idle=True)
