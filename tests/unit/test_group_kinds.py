"""Groups beyond full attention and plain windows: what names a chunk, what is kept of it, what stays out."""

import itertools
from types import SimpleNamespace

import pytest
from fakes import FakeRequest
from hypothesis import given
from hypothesis import strategies as st
from test_windows import FULL, Half
from test_work_per_step import done

from kvtide.errors import ConfigError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry, OtherGroup, chunks_needed
from kvtide.jobs import Direction, HopResult, ReqContext
from kvtide.scheduler.holds import BlockHolds
from kvtide.scheduler.parked import ParkedRequests
from kvtide.scheduler.restore_points import chunks_kept
from kvtide.scheduler.state import GroupOffloadState, RequestOffloadState

LOCAL = GroupGeometry(1, GroupKind.CHUNKED_LOCAL, 4, 1, 4, local_tokens=12)


def tables_of(count: int) -> tuple[list[int], list[int]]:
    return list(range(1, 1 + count)), list(range(101, 101 + count))


@given(local_chunks=st.integers(1, 5), points=st.integers(0, 20), computed=st.integers(0, 80))
def test_local_attention_needs_what_lies_behind_its_last_boundary(
    local_chunks: int, points: int, computed: int
) -> None:
    group = GroupGeometry(0, GroupKind.CHUNKED_LOCAL, 4, 1, 4, local_tokens=4 * local_chunks)
    restored = points * 4
    seen = range(restored // (4 * local_chunks) * (4 * local_chunks), restored)
    expected = sorted({token // 4 for token in seen if token >= computed})
    assert list(chunks_needed(group, computed, restored)) == expected


def test_local_attention_that_does_not_begin_on_chunks_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match="attention_chunk_size = 10"):
        GroupGeometry(0, GroupKind.CHUNKED_LOCAL, 4, 1, 4, local_tokens=10)


@given(
    st.sampled_from(
        [
            GroupGeometry(0, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=window)
            for window in (1, 3, 5, 9, 14, 40)
        ]
        + [GroupGeometry(0, GroupKind.CHUNKED_LOCAL, 4, 1, 4, local_tokens=local) for local in (4, 8, 20)]
    ),
    st.sampled_from([4, 8, 16, 24]),
    st.sets(st.integers(0, 25).map(lambda point: point * 4), max_size=3),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_kept_is_what_a_reader_of_some_restore_point_needs_and_nothing_else(
    group: GroupGeometry, interval: int, ends: set[int], first: int, count: int
) -> None:
    points = {*range(0, 400, interval), *ends}
    read = {chunk for point in points for chunk in chunks_needed(group, 0, point)}
    kept = chunks_kept(group, interval, ends, first, first + count)
    assert [chunk for run in kept for chunk in run] == sorted(read & set(range(first, first + count)))
    assert all(before.stop < after.start for before, after in itertools.pairwise(kept))


def test_behind_a_window_restore_points_far_apart_keep_little_and_the_ends_of_prompts() -> None:
    window = GroupGeometry(1, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=5)
    half = Half(geometry=KVGeometry((FULL, window)), restore_interval_tokens=16)
    tokens = list(range(42))
    request, _ = half.ask("a", tokens)
    tables = tables_of(11)
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    step = half.step({"a": tables}, a=42)
    stored = [list(job.hops[0].source.block_ids) for job in step.jobs if job.hops[0].source.group_sizes[1]]
    # The chunk before 16, 32 and 40 tokens each; without the setting it is all ten.
    assert stored == [[104], [108], [110]]
    half.scheduler.update_connector_output(done(step), 0.0)
    for count, hit in ((42, 40), (40, 32), (30, 16), (15, 0)):
        assert half.ask(f"b{count}", tokens[:count])[1] == hit


def test_a_boundary_of_local_attention_needs_nothing_of_it_and_nothing_is_written_for_it() -> None:
    half = Half(geometry=KVGeometry((FULL, LOCAL)))
    tokens = list(range(26))
    request, _ = half.ask("a", tokens)
    tables = tables_of(7)
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    step = half.step({"a": tables}, a=26)
    stored = [list(job.hops[0].source.block_ids) for job in step.jobs if job.hops[0].source.group_sizes[1]]
    # Nobody looks back across 12 and 24: the chunks that end there are read by no one.
    assert stored == [[101, 102], [104, 105]]
    half.scheduler.update_connector_output(done(step), 0.0)
    request, hit = half.ask("b", tokens)
    assert hit == 24
    half.scheduler.update_state_after_alloc(request, ([11, 12, 13, 14, 15, 16], [0] * 6), 24, 0.0)
    (job,) = half.step({}).jobs
    assert job.hops[0].target.group_sizes == (6, 0)
    half.scheduler.update_connector_output(done(SimpleNamespace(jobs=[job])), 0.0)
    request, hit = half.ask("c", tokens[:22])
    assert hit == 20
    half.scheduler.update_state_after_alloc(request, ([11, 12, 13, 14, 15], [0, 0, 0, 24, 25]), 20, 0.0)
    (job,) = half.step({}).jobs
    assert job.hops[0].target.group_sizes == (5, 2)
    assert list(job.hops[0].target.block_ids)[-2:] == [24, 25]


def with_drafter(lookahead: int) -> KVGeometry:
    """Blocks of 8 tokens, hashes of 4: names reach ``lookahead`` hashes further."""
    return KVGeometry(
        (
            GroupGeometry(0, GroupKind.FULL_ATTENTION, 8, 1, 4, lookahead_hashes=lookahead),
            GroupGeometry(1, GroupKind.FULL_ATTENTION, 4, 1, 4, lookahead_hashes=lookahead),
        )
    )


def drafting_half(lookahead: int) -> tuple[Half, list[int]]:
    half = Half(geometry=with_drafter(lookahead))
    tokens = list(range(24))
    request, _ = half.ask("a", tokens)
    tables = ([1, 2, 3], [101, 102, 103, 104, 105, 106])
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    half.scheduler.update_connector_output(done(half.step({"a": tables}, a=24)), 0.0)
    return half, tokens


@pytest.mark.parametrize(("lookahead", "hits"), [(0, (16, 8)), (1, (16, 0)), (2, (16, 0))])
def test_with_a_drafter_a_chunk_is_found_only_by_who_agrees_on_the_tokens_behind_it(
    lookahead: int, hits: tuple[int, int]
) -> None:
    half, tokens = drafting_half(lookahead)
    assert half.ask("same", tokens)[1] == hits[0]
    # The first 8 tokens agree and the ninth does not: a drafter's KV of token 8 depends on it.
    assert half.ask("other", [*tokens[:8], 99, *tokens[9:]])[1] == hits[1]
    half.scheduler.check_invariants()


def test_with_a_drafter_the_last_chunk_waits_until_what_follows_it_is_known() -> None:
    half, tokens = drafting_half(1)
    # 24 tokens are 3 blocks of 8 and 6 of 4; the last of each could not be named.
    assert half.manager.used_count == 2 + 5
    assert half.ask("longer", [*tokens, 1, 2, 3, 4, 5])[1] == 16


@pytest.mark.parametrize("given_to_running", [True, False])
def test_blocks_of_a_group_that_stays_out_are_watched_too(given_to_running: bool) -> None:
    ring = KVGeometry(
        (GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 1, 4, engine_index=1),), others=(OtherGroup(0),)
    )
    half = Half(geometry=ring)
    request, _ = half.ask("a", list(range(9)))
    tables = ([50], [1, 2, 3])
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    step = half.step({"a": tables}, a=9)
    (store,) = step.jobs
    assert list(store.hops[0].source.block_ids) == [1, 2]
    request.num_computed_tokens = 9
    half.scheduler.request_finished_all_groups(request, tables, 0.0)
    # The engine hands block 2 on, for a ring.
    other, _ = half.ask("b", [7] * 9)
    half.scheduler.update_state_after_alloc(other, ([51 if given_to_running else 2], [4, 5, 6]), 0, 0.0)
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[])
    if given_to_running:
        cached = SimpleNamespace(req_ids=["b"], resumed_req_ids=set(), new_block_ids=[([2], [])])
    step = half.step({"b": ([51], [4, 5, 6])}, cached=cached, b=9)
    assert step.jobs_to_flush == {store.job_id}


@pytest.mark.parametrize(("blocks", "fits"), [(29, False), (30, True)])
def test_what_groups_that_stay_out_will_hold_counts_when_a_load_is_to_leave_room(
    blocks: int, fits: bool
) -> None:
    # Found by the walk: two loads of 40 of 50 tokens hold 10 + 2 blocks each and lack 3 + 3 each.
    full = GroupGeometry(0, GroupKind.MLA_ATTENTION, 4, 1, 4)
    replayed = OtherGroup(1, tokens_per_block=4, window_tokens=8)
    holds = BlockHolds()
    holds.pool = Pool(1 + blocks)
    parked = ParkedRequests(KVGeometry((full,), others=(replayed,)), holds)
    loaded, asked = (
        RequestOffloadState(FakeRequest(name, [1] * 50), [GroupOffloadState()], ReqContext(name))
        for name in ("loaded", "asked")
    )
    loaded.groups[0].block_ids = list(range(1, 11))
    parked.admitted(loaded)
    assert parked.leave_room_for(asked, 40) is fits
    parked.settled("loaded")
    assert parked.leave_room_for(asked, 40)


@pytest.mark.parametrize("takes_back", [True, False])
def test_blocks_in_the_place_of_a_hit_that_was_taken_back_are_watched_like_new_ones(takes_back: bool) -> None:
    # Found by the walk: a window that is computed again after a hit lets vLLM drop one that is not longer.
    half = Half(geometry=KVGeometry((FULL,), takes_hits_back=takes_back))
    request, _ = half.ask("a", list(range(9)))
    half.scheduler.update_state_after_alloc(request, ([1, 2, 3],), 0, 0.0)
    (store,) = half.step({"a": ([1, 2, 3],)}, a=9).jobs
    other, _ = half.ask("b", [7] * 9, local=8)
    half.scheduler.update_state_after_alloc(other, ([2, 5, 6],), 0, 0.0)
    assert half.step({}).jobs_to_flush == ({store.job_id} if takes_back else set())


class Pool:
    def __init__(self, count: int) -> None:
        self.blocks = list(range(count))
        self.held: list[int] = []

    def touch(self, blocks: list[int]) -> None:
        self.held += blocks

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.held.remove(block)


@pytest.mark.parametrize("result", list(HopResult))
def test_where_new_blocks_are_written_first_a_store_holds_those_it_reads_until_it_has_ended(
    result: HopResult,
) -> None:
    half, pool = Half(geometry=KVGeometry((FULL,)), holds_stored_blocks=True), Pool(20)
    half.scheduler.bind_block_pool(pool)
    request, _ = half.ask("a", list(range(9)))
    half.scheduler.update_state_after_alloc(request, ([1, 2, 3],), 0, 0.0)
    step = half.step({"a": ([1, 2, 3],)}, a=9)
    assert pool.held == [1, 2]
    half.scheduler.check_invariants()
    request.num_computed_tokens = 9
    half.scheduler.request_finished_all_groups(request, ([1, 2, 3],), 0.0)
    assert pool.held == [1, 2]
    answers = done(step)
    answers.results = {key: {0: result} for key in answers.results}
    half.scheduler.update_connector_output(answers, 0.0)
    assert pool.held == []
    assert step.jobs[0].direction is Direction.STORE
    half.scheduler.check_invariants()


@pytest.mark.parametrize("name", ["its own", "another's", None])
def test_a_state_is_stored_only_while_its_block_still_goes_by_its_hash(name: str | None) -> None:
    # vLLM 0.32, asynchronous scheduling: offered when tokens are accepted, and by the next step the block may
    # be somebody else's (found by the walk: async/v1/1/small/arc, seed 11, states and a drafter).
    states = GroupGeometry(1, GroupKind.MAMBA, 4, 1, 4, window_tokens=2)
    half = Half(geometry=KVGeometry((FULL, states)))
    request, _ = half.ask("a", list(range(9)))
    hashes = {"its own": request.block_hashes[1], "another's": b"another", None: None}
    blocks = [SimpleNamespace(block_hash=None) for _ in range(200)]
    if hashes[name] is not None:
        blocks[102].block_hash = hashes[name] + bytes([0, 0, 0, 1])
    half.scheduler.bind_block_pool(SimpleNamespace(blocks=blocks))
    tables = ([1, 2, 3], [0, 102, 103])
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    step = half.step({"a": tables}, {"a": [(1, 102, 8)]}, a=9)
    stored = [list(job.hops[0].source.block_ids) for job in step.jobs]
    assert stored == ([[1, 2], [102]] if name == "its own" else [[1, 2]])
