"""Keys, runs, geometry and the states of a job."""

import pickle

import pytest
from fakes import FakeRequest, chained_hashes
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError, IllegalTransitionError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry, chunks_needed
from kvtide.jobs import (
    TRANSITIONS,
    HopResult,
    JobEvent,
    JobId,
    JobState,
    OffloadingWorkerMetadata,
    PoolReport,
    ReqContext,
    next_state,
)
from kvtide.keys import make_offload_key, split_offload_key
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.policies import LRUPolicy
from kvtide.scheduler.lookup import look_up, readable_tokens
from kvtide.scheduler.pace import RecomputePace
from kvtide.scheduler.state import GroupOffloadState, RequestOffloadState


def group(blocks_per_chunk: int = 1, tokens_per_hash: int = 4) -> GroupGeometry:
    return GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, blocks_per_chunk, tokens_per_hash)


@given(block_hash=st.binary(min_size=8, max_size=32), index=st.integers(0, 2**32 - 1))
def test_a_key_is_the_hash_then_four_bytes_of_group_big_endian(block_hash: bytes, index: int) -> None:
    key = make_offload_key(block_hash, index)
    assert key == block_hash + index.to_bytes(4, "big")
    assert split_offload_key(key) == (block_hash, index)


@pytest.mark.parametrize("hashes_per_chunk", [1, 2, 3])
def test_a_run_is_a_sequence_of_the_keys_of_its_chunks(hashes_per_chunk: int) -> None:
    hashes = chained_hashes(list(range(48)))
    run = group(hashes_per_chunk).run(hashes, 1, 4)
    keys = [make_offload_key(hashes[(c + 1) * hashes_per_chunk - 1], 0) for c in (1, 2, 3)]
    assert list(run) == keys
    assert run.hashes() == [key[:-4] for key in keys]
    assert run.parent_hash() == hashes[hashes_per_chunk - 1]
    assert list(run[1:]) == keys[1:]
    assert list(run[:0]) == list(run[2:1]) == []
    assert run[-1] == keys[-1]
    with pytest.raises(IndexError):
        run[3]
    with pytest.raises(ValueError, match="step 2"):
        run[::2]


def test_a_frozen_run_does_not_follow_its_request() -> None:
    hashes = chained_hashes(list(range(16)))
    run = group().run(hashes, 0, 2)
    frozen, before = run.frozen(), list(run)
    hashes[0] = b"another"
    assert list(frozen) == before
    assert pickle.loads(pickle.dumps(frozen)) == frozen


@given(computed=st.integers(0, 60), more=st.integers(0, 60), blocks=st.integers(1, 4))
def test_chunks_needed_cover_what_is_wanted_and_nothing_besides(
    computed: int, more: int, blocks: int
) -> None:
    wanted, size = computed + more, 4 * blocks
    needed = chunks_needed(group(blocks), computed, wanted)
    expected = {token // size for token in range(computed, wanted)}
    assert set(needed) == expected


def test_restore_points_are_where_every_group_ends_a_chunk() -> None:
    geometry = KVGeometry((group(2), GroupGeometry(1, GroupKind.FULL_ATTENTION, 4, 3, 4)))
    assert geometry.restore_interval == 24
    assert [geometry.restore_point(tokens) for tokens in (0, 23, 24, 50)] == [0, 0, 24, 48]


def test_a_hash_that_does_not_divide_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens_per_hash = 3"):
        group(tokens_per_hash=3)


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", JobEvent)
def test_every_pair_of_state_and_event_is_in_the_table_or_refused(state: JobState, event: JobEvent) -> None:
    if event in TRANSITIONS[state]:
        assert next_state(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{state.name} cannot {event.name}"):
            next_state(state, event)


def test_what_ranks_answer_is_joined_and_neither_answer_is_changed() -> None:
    one = OffloadingWorkerMetadata({(JobId(1), 0): {0: HopResult.DONE}}, {0: PoolReport(1, 2, 3)}, {0: 1})
    two = OffloadingWorkerMetadata({(JobId(1), 0): {1: HopResult.FAILED}}, {1: PoolReport(4, 5, 6)})
    joined = one.combine(two)
    assert joined.results == {(JobId(1), 0): {0: HopResult.DONE, 1: HopResult.FAILED}}
    assert joined.pools == {0: PoolReport(1, 2, 3), 1: PoolReport(4, 5, 6)}
    assert one.results == {(JobId(1), 0): {0: HopResult.DONE}}


def test_the_last_token_is_always_computed() -> None:
    state = RequestOffloadState(FakeRequest("r", list(range(8))), [GroupOffloadState()], ReqContext("r"))
    assert readable_tokens(state, KVGeometry((group(),))) == 4
    state.request.tokens.append(9)
    assert readable_tokens(state, KVGeometry((group(),))) == 8


def test_an_answer_is_remembered_until_something_could_change_it() -> None:
    class Counting(CPUOffloadingManager):
        asked = 0

        def lookup(self, run, ctx):
            self.asked += 1
            return super().lookup(run, ctx)

    manager, geometry = Counting(LRUPolicy()), KVGeometry((group(),))
    manager.grow(4)
    state = RequestOffloadState(FakeRequest("r", list(range(10))), [GroupOffloadState()], ReqContext("r"))
    for _ in range(5):
        assert look_up(state, geometry, manager, 0).restored_tokens == 0
    assert manager.asked == 1
    output = manager.prepare_store(group().run(state.request.block_hashes, 0, 2), state.context)
    manager.complete_store(output.keys_to_store, output.store_spec, state.context, success=True)
    for _ in range(5):
        assert look_up(state, geometry, manager, 0).restored_tokens == 8
    assert manager.asked == 2


def test_the_pace_counts_prompt_steps_only_and_not_the_time_the_engine_slept() -> None:
    pace = RecomputePace()
    assert pace.seconds_for(1000) is None
    pace.step_began(1, 0.0)
    pace.step_ended(1.0)
    assert pace.seconds_for(1000) is None, "a decode step says nothing of the speed of a prompt"
    pace.step_began(1000, 10.0)
    pace.step_ended(10.5)
    pace.step_ended(99.0)
    assert pace.seconds_for(1000) == pytest.approx(0.5)
