"""What requests leave behind, block by block; and a walk along a free list that is a list here."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeCached, FakeRequest, FakeStep
from hypothesis import given
from hypothesis import strategies as st
from test_work_per_step import done

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import OffloadingWorkerMetadata, OffloadPolicy, PoolReport, ReqContext
from kvtide.keys import make_offload_key
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.reuse import ReuseFilter
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.scheduler.leavings import Leavings
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig

GROUP = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 1, 4)


def hashes(tokens: Sequence[int], tokens_per_hash: int = 4) -> list[bytes]:
    """Stands for the engine's: names a prefix, and nothing else does."""
    ends = range(tokens_per_hash, len(tokens) + 1, tokens_per_hash)
    return [repr(tuple(tokens[:end])).encode() for end in ends]


def add(leavings: Leavings, name: str, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
    leavings.add(ReqContext(name), None, GROUP, block_ids, hashes(tokens), tokens)


def test_a_prefix_that_was_left_before_is_not_written_down_again() -> None:
    leavings = Leavings()
    add(leavings, "a", range(16), [1, 2, 3, 4])
    add(leavings, "b", [*range(8), 90, 91, 92, 93], [1, 2, 7])
    (a, at_a), (b, at_b) = leavings.find(2), leavings.find(7)  # type: ignore[misc]
    assert (a.context.request_id, at_a) == ("a", 1)
    assert (b.context.request_id, b.parent, b.block_ids, at_b) == ("b", a, [7], 2)
    prefix = leavings.prefix(b, 3)
    assert prefix is not None
    assert prefix.block_ids == [1, 2, 7]
    assert prefix.hashes == hashes([*range(8), 90, 91, 92, 93])
    assert prefix.tokens == [*range(8), 90, 91, 92, 93]
    leavings.check_invariants()


def test_what_comes_after_a_block_that_is_gone_is_gone_and_what_is_before_it_stays() -> None:
    leavings = Leavings()
    add(leavings, "a", range(16), [1, 2, 3, 4])
    add(leavings, "b", [*range(12), 90, 91, 92, 93], [1, 2, 3, 7])
    leavings.drop([3])
    assert [leavings.find(block) is not None for block in (1, 2, 3, 4, 7)] == [True, True, False, False, True]
    b, _ = leavings.find(7)  # type: ignore[misc]
    assert leavings.prefix(b, 4) is None, "it cannot be reached"
    a, _ = leavings.find(1)  # type: ignore[misc]
    assert leavings.prefix(a, 2).block_ids == [1, 2]  # type: ignore[union-attr]
    # Who finds the rest again, and computes the middle, makes it whole.
    add(leavings, "c", [*range(12), 90, 91, 92, 93], [1, 2, 5, 7])
    c, _ = leavings.find(7)  # type: ignore[misc]
    assert leavings.prefix(c, 4).block_ids == [1, 2, 5, 7]  # type: ignore[union-attr]
    leavings.check_invariants()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=6), st.sets(st.integers(0, 11), max_size=3)),
        max_size=30,
    )
)
def test_books_agree_with_a_map_from_block_to_prefix(steps: list[tuple[list[int], set[int]]]) -> None:
    """Requests of up to 6 blocks, each block's tokens all 0 or all 1; then some blocks get other owners."""
    leavings, holds = Leavings(), dict.fromkeys(range(12), ())
    for name, (contents, gone) in enumerate(steps):
        prefixes = [tuple(contents[: end + 1]) for end in range(len(contents))]
        table: list[int] = []
        for prefix in prefixes:
            here = [block for block, held in holds.items() if held == prefix and block not in table]
            fresh = [block for block in holds if block not in table and holds[block] not in prefixes]
            table.append(here[0] if here else fresh[0])
            if not here:
                leavings.drop([table[-1]])
                holds[table[-1]] = prefix
        add(leavings, str(name), [one for one in contents for _ in range(4)], table)
        for block in gone:
            holds[block] = ()
        leavings.drop(sorted(gone))
        leavings.check_invariants()
        assert len(leavings) <= len(holds)
        for block, held in holds.items():
            if (left := leavings.find(block)) is None:
                continue
            leaving, index = left
            assert index + 1 == len(held)
            whole = leavings.prefix(leaving, index + 1)
            if whole is not None:
                assert whole.block_ids[-1] == block
                assert whole.hashes == hashes([one for one in held for _ in range(4)])


FAR = list(range(100, 120))  # free blocks that hold nothing


class FakePool:
    """The engine's pool: hashes of blocks, and a free list that tests put in order."""

    def __init__(self, count: int) -> None:
        self.blocks = [
            SimpleNamespace(block_id=index, block_hash=None, next_free_block=None, prev_free_block=None)
            for index in range(count)
        ]
        self.order([])

    def order(self, block_ids: Sequence[int]) -> None:
        head, tail = SimpleNamespace(block_id=-1), SimpleNamespace(block_id=-1)
        chain: list[Any] = [head, *(self.blocks[block] for block in block_ids), tail]
        for one, following in itertools.pairwise(chain):
            one.next_free_block, following.prev_free_block = following, one
        self.free_block_queue = SimpleNamespace(
            num_free_blocks=len(block_ids), fake_free_list_head=head, fake_free_list_tail=tail
        )

    def cache(self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group_index: int = 0) -> None:
        for block_id, block_hash in zip(block_ids, block_hashes, strict=False):
            self.blocks[block_id].block_hash = make_offload_key(block_hash, group_index)


class Half:
    """The scheduler half with lazy stores; a step takes 4 blocks, a walk sees 8."""

    def __init__(self, slots: int = 64, threshold: int = 1, **limits: Any) -> None:
        self.manager = CPUOffloadingManager(LRUPolicy(), ReuseFilter(threshold, 100))
        config = SchedulerOffloadConfig(KVGeometry((GROUP,)), lazy=True, blocks_per_step=4, **limits)
        self.scheduler = OffloadingConnectorScheduler(config, self.manager, MetricsDelta())
        self.pool = FakePool(200)
        self.scheduler.bind_block_pool(self.pool)
        pools = {0: PoolReport(slots, slots, 64)}
        self.scheduler.update_connector_output(OffloadingWorkerMetadata(pools=pools), 0.0)

    def admit(
        self, name: str, tokens: list[int], table: list[int], local: int = 0, **more: Any
    ) -> FakeRequest:
        request = FakeRequest(name, tokens, **more)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, local, 0.0)[0] == 0
        self.scheduler.update_state_after_alloc(request, (table,), 0, 0.0)
        return request

    def step(self, preempted: Sequence[str] = (), **scheduled: int) -> list[list[int]]:
        """Block ids of the stores that a step plans; their copies end with it."""
        step = self.scheduler.build_connector_meta(
            FakeStep(scheduled, FakeCached(), set(preempted) or None), 0.0
        )
        self.scheduler.update_connector_output(done(step), 0.0)
        return [list(job.hops[0].source.block_ids) for job in step.jobs]

    def finish(self, request: FakeRequest, table: list[int]) -> None:
        self.pool.cache(table, request.block_hashes)
        request.num_computed_tokens = len(request.tokens)
        queue = self.pool.free_block_queue
        if not queue.num_free_blocks:
            self.pool.order(FAR)  # no test is about a device that is full by chance
        self.scheduler.request_finished_all_groups(request, (table,), 0.0)
        self.pool.free_block_queue = queue

    def leave(self, name: str, tokens: list[int], table: list[int], **more: Any) -> FakeRequest:
        request = self.admit(name, tokens, table, **more)
        assert self.step(**{name: len(tokens)}) == []
        self.finish(request, table)
        return request


def test_nothing_is_stored_before_its_block_is_near_the_front() -> None:
    half = Half()
    half.leave("a", list(range(12)), [1, 2, 3])
    half.pool.order([*FAR, 3, 2, 1])
    assert half.step(other=1) == []
    half.scheduler._lazy.handed_out(FAR[:14])  # type: ignore[union-attr]
    half.pool.order([*FAR[14:], 3, 2, 1])
    assert half.step(other=1) == [[1, 2, 3]], "the whole prefix, as soon as its tail is near"
    half.scheduler.check_invariants()


@pytest.mark.parametrize(("free_count", "stored"), [(7, [[1, 2, 3]]), (8, [])])
def test_where_little_is_free_a_request_is_stored_when_it_ends(
    free_count: int, stored: list[list[int]]
) -> None:
    half = Half()
    half.pool.order(FAR[:free_count])
    half.leave("a", list(range(12)), [1, 2, 3])
    # Its blocks are freed and handed out in one step: they are never seen in the free list.
    half.pool.order(FAR)
    assert half.step(other=1) == stored
    half.scheduler.check_invariants()


def test_only_the_head_that_is_intact_is_stored() -> None:
    half = Half()
    half.leave("a", list(range(20)), [1, 2, 3, 4, 5])
    half.pool.blocks[3].block_hash = None  # behind our back
    half.pool.order([5, 4, 2, 1])
    assert half.step(other=1) == [[1, 2]]
    half.scheduler.check_invariants()


def test_a_block_that_holds_something_else_under_a_hash_of_its_own_is_not_stored() -> None:
    half = Half()
    half.leave("a", list(range(8)), [1, 2])
    half.pool.cache([1, 2], [b"another", b"prefix"])
    half.pool.order([2, 1])
    assert half.step(other=1) == []


def test_blocks_that_were_handed_out_are_not_stored_whatever_the_pool_says() -> None:
    half = Half()
    half.leave("a", list(range(12)), [1, 2, 3])
    half.admit("b", [9] * 12, [7, 8, 2])
    half.pool.order([3, 1])
    assert half.step(other=1) == [[1]]


def test_blocks_in_use_are_stored_with_a_tail_that_goes() -> None:
    half = Half()
    half.leave("a", list(range(16)), [1, 2, 3, 4])
    half.admit("b", [*range(8), 99], [1, 2, 7], local=8)
    half.pool.order([4, 3, *FAR])
    assert half.step(b=1) == [[1, 2, 3, 4]]


def test_what_is_known_is_not_stored_again_and_what_was_evicted_is() -> None:
    half = Half(slots=4)
    half.leave("a", list(range(16)), [1, 2, 3, 4])
    half.pool.order([4])
    assert half.step(other=1) == [[1, 2, 3, 4]]
    half.pool.order([3, 2, 1])
    assert half.step(other=1) == []
    half.leave("b", [9] * 8, [11, 12])
    half.pool.order([12, 11, 3, 2, 1])
    stored = half.step(other=1)
    assert [11, 12] in stored
    assert not half.step(), "an idle engine is not kept awake by what finds no room"


def test_a_preempted_request_leaves_what_it_has_surely_computed() -> None:
    half = Half()
    request = half.admit("a", list(range(13)), [1, 2, 3, 4])
    half.step(a=13)
    request.num_computed_tokens = 13
    half.step(a=1)  # not looked at
    # Sampled twice: token 14 may have been given its place in the step that preempts.
    request.tokens = [*request.tokens, 7, 7]
    request.block_hashes = FakeRequest("a", request.tokens).block_hashes
    half.pool.cache([1, 2, 3, 4], request.block_hashes)
    request.num_computed_tokens = 0
    half.pool.order([4, 3, 2, 1])
    assert half.step(preempted=["a"], other=1) == [[1, 2, 3]]


def test_a_request_preempted_within_its_prompt_leaves_what_was_computed_of_it() -> None:
    half = Half()
    request = half.admit("a", list(range(40)), list(range(1, 11)))
    half.step(a=10)
    half.pool.cache(range(1, 11), request.block_hashes)
    half.pool.order(list(range(6, 0, -1)))
    assert half.step(preempted=["a"], other=1) == [[1, 2]]


def test_what_was_there_before_a_reset_is_not_stored() -> None:
    half = Half()
    half.leave("a", list(range(8)), [1, 2])
    running = half.admit("b", [9] * 8, [3, 4])
    half.step(b=8)
    half.scheduler.reset_cache()
    half.finish(running, [3, 4])
    half.pool.order([4, 3, 2, 1])
    assert half.step(other=1) == []
    half.scheduler.check_invariants()


def test_what_is_pushed_out_counts_once_however_often_it_is_seen_and_however_long_it_is() -> None:
    half = Half(threshold=2)
    tokens, table = list(range(40)), list(range(1, 11))
    half.leave("a", tokens, table)
    half.pool.order([*reversed(table), *FAR])
    assert half.step(other=1) == []
    assert half.step(other=1) == []
    lazy = half.scheduler._lazy
    lazy.handed_out(FAR)  # type: ignore[union-attr]
    assert half.step(other=1) == [], "the same request does not count twice"
    skipped = half.scheduler.metrics().data["skipped_store_chunks|below_threshold"]
    assert skipped == 10
    again = half.admit("b", tokens, table, local=40)
    half.step(b=1)
    half.finish(again, table)
    half.pool.order([*reversed(table), *FAR])
    lazy.handed_out(FAR)  # type: ignore[union-attr]
    # Each piece, of what one step takes, is a store of its own: the end may be needed at once.
    assert half.step(other=1) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    half.scheduler.check_invariants()


@pytest.mark.parametrize("policy", list(OffloadPolicy))
def test_a_request_that_is_stored_whole_waits_for_nothing(policy: OffloadPolicy) -> None:
    half = Half(threshold=2)
    params = {"offload_policy": policy.value}
    request = half.admit("a", list(range(13)), [1, 2, 3, 4], local=8, kv_transfer_params=params)
    half.pool.cache([1, 2, 3, 4], request.block_hashes)
    request.num_computed_tokens = 8
    now = [[1, 2, 3]] if policy is OffloadPolicy.REQUEST_LEVEL else []
    assert half.step(a=5) == now, "what the engine has hit itself included"


def test_nothing_is_looked_for_twice_while_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half()
    half.leave("a", list(range(12)), [1, 2, 3])
    half.pool.order([*FAR, 3, 2, 1])
    half.step(other=1)
    walks = []
    lazy = half.scheduler._lazy
    found = lazy._found  # type: ignore[union-attr]
    monkeypatch.setattr(lazy, "_found", lambda limit: walks.append(limit) or found(limit))
    for _ in range(5):
        half.step(other=1)
    assert walks == []
    lazy.handed_out(FAR[:2])  # type: ignore[union-attr]
    half.step(other=1)
    assert walks == []
    lazy.handed_out(FAR[2:3])  # type: ignore[union-attr]
    half.step(other=1)
    assert walks == [8]
    half.pool.order([2, 1])
    lazy.handed_out(FAR)  # type: ignore[union-attr]
    for _ in range(5):
        half.step(other=1)
    assert walks == [8, 8], "to the end of a short list, once"
