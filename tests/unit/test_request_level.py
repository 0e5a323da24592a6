"""What a request may ask for that is read as a whole elsewhere: nothing of it is left out, nothing waits."""

import pytest
from fakes import FakeRequest
from test_windows import FULL
from test_windows import Half as Windows
from test_work_per_step import GROUP, Half, decode, done, stored_chunks

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import OffloadPolicy, ReqContext
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.reuse import ReuseFilter
from kvtide.policies import LRUPolicy
from kvtide.scheduler.limits import RequestLimits, limits_of

WHOLE = {"offload_policy": "request"}


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        (None, OffloadPolicy.CHUNK_LEVEL),
        ("chunk", OffloadPolicy.CHUNK_LEVEL),
        ("request", OffloadPolicy.REQUEST_LEVEL),
        ("REQUEST", OffloadPolicy.CHUNK_LEVEL),
        ("request_level", OffloadPolicy.CHUNK_LEVEL),
        (True, OffloadPolicy.CHUNK_LEVEL),
        (["request"], OffloadPolicy.CHUNK_LEVEL),
    ],
)
def test_only_the_word_itself_asks_for_more(
    value: object, policy: OffloadPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    assert limits_of("r", {"offload_policy": value}) == RequestLimits(policy=policy)
    assert ("offload_policy" in caplog.text) is (value not in (None, "chunk", "request"))


def test_admission_counts_for_others_and_not_for_it() -> None:
    manager = CPUOffloadingManager(LRUPolicy(), ReuseFilter(2, 100))
    manager.grow(16)
    run = GROUP.run(FakeRequest("r", list(range(40))).block_hashes, 0, 10)
    assert not manager.prepare_store(run, ReqContext("a")).keys_to_store
    whole = ReqContext("b", policy=OffloadPolicy.REQUEST_LEVEL)
    assert len(manager.prepare_store(run, whole).keys_to_store) == 10


def test_what_is_generated_is_stored_chunk_by_chunk() -> None:
    half = Half()
    request = half.admit("a", list(range(11)), kv_transfer_params=WHOLE)
    assert stored_chunks(half.step(a=11)) == [2]
    request.num_computed_tokens = 11
    found = [stored_chunks(decode(half, request)) for _ in range(14)]
    # Chunk 2 is whole with token 12, computed by the first step; its hash is known after it.
    assert [index for index, chunks in enumerate(found) if chunks] == [1, 5, 9, 13]
    assert all(chunks in ([], [1]) for chunks in found)


def test_limits_and_settings_of_the_server_hold_for_it_too() -> None:
    half = Half(offload_prompt_only=True)
    request = half.admit("a", list(range(11)), kv_transfer_params=WHOLE)
    assert stored_chunks(half.step(a=11)) == [2]
    request.num_computed_tokens = 11
    assert not any(stored_chunks(decode(half, request)) for _ in range(14))
    half.admit("b", [9] * 11, kv_transfer_params={**WHOLE, "max_offload_tokens": 5})
    assert stored_chunks(half.step(b=11)) == [1]
    half.admit("c", [8] * 11, kv_transfer_params={**WHOLE, "no_write": True})
    assert stored_chunks(half.step(c=11)) == []


@pytest.mark.parametrize(("params", "blocks"), [(None, [104, 108, 110]), (WHOLE, list(range(101, 111)))])
def test_behind_a_window_it_is_kept_for_every_point_at_which_the_engine_could_continue(
    params: dict[str, str] | None, blocks: list[int]
) -> None:
    window = GroupGeometry(1, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=5)
    half = Windows(geometry=KVGeometry((FULL, window)), restore_interval_tokens=16)
    request = FakeRequest("a", list(range(42)), kv_transfer_params=params)
    half.scheduler.on_new_request(request)
    assert half.scheduler.get_num_new_matched_tokens(request, 0, 0.0) == (0, False)
    tables = list(range(1, 12)), list(range(101, 112))
    half.scheduler.update_state_after_alloc(request, tables, 0, 0.0)
    step = half.step({"a": tables}, a=42)
    jobs = [job.hops[0].source for job in step.jobs]
    assert sorted(block for one in jobs if one.group_sizes[1] for block in one.block_ids) == blocks
    half.scheduler.update_connector_output(done(step), 0.0)
    half.scheduler.check_invariants()
