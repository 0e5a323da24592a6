"""Lazy stores with vLLM's real schedulers and block pool: what is stored, when, and with which bytes.

The device has 64 blocks to give away, a step takes 8 at most: a walk along the free list sees 16.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvtide.jobs import Direction
from kvtide.vllm.testing import Harness
from kvtide.vllm.testing.model import PatternModel

Build = Callable[..., Harness]
PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens


@pytest.fixture
def lazy(build: Build) -> Build:
    def build_lazy(**arguments: Any) -> Harness:
        settings = {"num_blocks": 65, "budget_tokens": 8, "host_pages": 16, "store_policy": "lazy"}
        return build(**(settings | arguments))

    return build_lazy


def other(index: int, tokens: int = 28) -> list[int]:
    return [50 + index, *(40 + (index + 3 * token) % 50 for token in range(tokens - 1))]


def run(harness: Harness, name: str, prompt: list[int], max_tokens: int = 1, **arguments: Any) -> None:
    harness.add(name, prompt, max_tokens, **arguments)
    harness.drain()
    assert harness.outputs[name] == PatternModel.answer(prompt, max_tokens)
    harness.check_cached()


def push_out(harness: Harness, count: int = 9, first: int = 0) -> None:
    """``count`` requests of 7 blocks each."""
    for index in range(first, first + count):
        run(harness, f"other-{index}", other(index))


def counted(harness: Harness, name: str) -> int:
    return int(harness.counted.data.get(name, 0))


def stored_bytes(harness: Harness) -> int:
    return counted(harness, "transfer_bytes|store")


def hit_tokens(harness: Harness) -> int:
    return counted(harness, "hit_tokens|host")


def ready(harness: Harness, prompt: list[int]) -> int:
    """Chunks of a prompt that host memory holds."""
    deciding = harness.connector._deciding
    probe = harness.add("probe", prompt)
    harness.abort("probe")
    group = deciding._geometry.groups[0]
    return deciding._manager.lookup(
        group.run(probe.block_hashes, 0, len(probe.block_hashes)), None
    ).ready_count


def test_nothing_is_stored_while_the_devices_own_cache_suffices(lazy: Build) -> None:
    harness = lazy()
    for round_ in range(12):
        for index in range(4):  # 4 prompts of 7 blocks and what is generated: half of the device
            run(harness, f"{round_}-{index}", other(index), 2)
    assert stored_bytes(harness) == 0
    assert harness.store.held == []
    eager = lazy(store_policy="eager")
    run(eager, "one", other(0), 2)
    assert stored_bytes(eager) > 0


def test_what_is_pushed_out_is_stored_before_and_hit_afterwards(lazy: Build) -> None:
    harness = lazy()
    run(harness, "first", PROMPT)
    assert ready(harness, PROMPT) == 0
    push_out(harness, count=12)
    assert ready(harness, PROMPT) == 7
    before = hit_tokens(harness)
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) - before == 28


def test_no_more_is_written_than_is_pushed_out(lazy: Build) -> None:
    harness = lazy()
    push_out(harness, count=40)
    chunk_bytes = stored_bytes(harness) // counted(harness, "stored_chunks|")
    # 280 blocks in all; 64 are on the device, and no more than a walk reaches of them were stored ahead.
    assert 216 <= stored_bytes(harness) // chunk_bytes <= 216 + 16


def test_a_shared_prefix_that_is_in_use_is_stored_with_the_tail_that_needs_it(lazy: Build) -> None:
    harness = lazy()
    run(harness, "tail", [*PROMPT[:20], *other(0, 9)])
    harness.add("talker", [*PROMPT[:20], 7], 60)  # keeps the first five blocks
    for _ in range(4):
        harness.step()
    for index in range(1, 10):
        harness.add(f"other-{index}", other(index), 1)
    harness.drain()
    assert ready(harness, [*PROMPT[:20], *other(0, 9)]) == 7
    assert harness.outputs["talker"] == PatternModel.answer([*PROMPT[:20], 7], 60)


def test_what_is_left_in_two_blocks_is_not_stored_when_the_first_goes(lazy: Build) -> None:
    harness = lazy()
    for round_ in range(30):  # vLLM computes the last block of a prompt anew each time
        run(harness, f"{round_}", other(0))
    assert len(harness.connector._deciding._lazy._leavings) > 20
    for round_ in range(40):
        run(harness, f"more-{round_}", other(0))
    assert stored_bytes(harness) == 0


@pytest.mark.parametrize("blocks_per_chunk", [2, 3])
def test_a_chunk_of_several_blocks_is_stored_whole_or_not(lazy: Build, blocks_per_chunk: int) -> None:
    harness = lazy(blocks_per_chunk=blocks_per_chunk)
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.scheduler.reset_prefix_cache()
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) == 28 // (4 * blocks_per_chunk) * 4 * blocks_per_chunk


def test_what_was_generated_is_pushed_out_too(lazy: Build) -> None:
    harness = lazy()
    run(harness, "first", PROMPT[:5], 24)
    whole = PROMPT[:5] + PatternModel.answer(PROMPT[:5], 24)
    push_out(harness)
    assert ready(harness, whole) == 7, "28 of 29 tokens are computed and whole"


@pytest.mark.parametrize(
    ("params", "chunks"),
    [
        ({"no_write": True}, 0),
        ({"max_offload_tokens": 13}, 3),
        ({"offload_policy": "request"}, 7),
        ({"offload_policy": "everything"}, 0),
    ],
)
def test_what_a_request_allows_holds_for_what_it_leaves_behind(
    lazy: Build, params: dict[str, Any], chunks: int
) -> None:
    harness = lazy()
    run(harness, "first", PROMPT, extra_args={"kv_transfer_params": params})
    at_once = 7 if params.get("offload_policy") == "request" else 0
    assert ready(harness, PROMPT) == at_once
    push_out(harness)
    assert ready(harness, PROMPT) == (7 if "offload_policy" in params else chunks)


def test_reuse_while_the_copy_is_open_waits_for_it(lazy: Build) -> None:
    harness = lazy()
    run(harness, "first", PROMPT)
    push_out(harness, count=6)
    harness.store.auto_finish = harness.load.auto_finish = False
    reading = set()
    for index in range(6, 10):
        harness.add(f"other-{index}", other(index), 1)
        for _ in range(8):
            harness.step()
            reading |= set(harness.store.held)
    assert reading & set(harness.store.waited), "a step had to wait for a store"
    harness.drain()
    harness.scheduler.reset_prefix_cache()
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) == 28


def test_a_load_is_preceded_by_the_stores_of_what_it_pushes_out(lazy: Build) -> None:
    harness = lazy(num_blocks=129)
    long = [(7 * index) % 90 for index in range(240)]  # 60 blocks: more than a walk reaches
    run(harness, "long", long)
    for index in range(32):
        run(harness, f"other-{index}", other(index))
    assert ready(harness, long) == 60
    left = [index for index in range(32) if not ready(harness, other(index))]
    assert len(left) >= 10, "on the device alone"
    before = hit_tokens(harness)
    run(harness, "again", long)
    assert hit_tokens(harness) - before >= 220
    gone = 0
    for index in left:
        before = hit_tokens(harness), counted(harness, "queried_tokens|")
        run(harness, f"again-{index}", other(index))
        gone += hit_tokens(harness) > before[0]
    assert gone >= 5, "what the load has pushed out came back from host memory"


def test_an_aborted_request_leaves_what_it_has_computed(lazy: Build) -> None:
    harness = lazy()
    harness.add("first", PROMPT, 1)
    harness.step()
    harness.step()  # 16 tokens are computed, or on the way
    harness.abort("first")
    harness.drain()
    push_out(harness)
    assert ready(harness, PROMPT) in (2, 3, 4)


def test_preempted_requests_end_with_the_right_tokens(lazy: Build) -> None:
    harness = lazy(num_blocks=33)
    prompts = [other(index, 14) for index in range(6)]
    for round_ in range(2):
        for index, prompt in enumerate(prompts):
            harness.add(f"{round_}-{index}", prompt, 24)
        preempted: set[str] = set()
        harness.store.auto_finish = harness.load.auto_finish = True
        while harness.scheduler.has_requests():
            preempted |= set(harness.step().preempted_req_ids or ())
        harness.drain()
        assert preempted
        for index, prompt in enumerate(prompts):
            assert harness.outputs[f"{round_}-{index}"] == PatternModel.answer(prompt, 24)
        harness.check_cached()
    assert hit_tokens(harness) > 0


def test_a_reset_forgets_what_was_left(lazy: Build) -> None:
    harness = lazy()
    run(harness, "first", PROMPT)
    harness.scheduler.reset_prefix_cache(reset_connector=True)
    push_out(harness)
    assert ready(harness, PROMPT) == 0
    assert not any(ready(harness, other(index)) == 0 for index in range(1)), "the others are stored as ever"


def test_a_device_that_was_reset_has_nothing_to_store(lazy: Build) -> None:
    harness = lazy()
    run(harness, "first", PROMPT)
    harness.scheduler.reset_prefix_cache()
    before = stored_bytes(harness)
    harness.add("waker", PROMPT[:3], 1)
    harness.drain()
    assert stored_bytes(harness) == before
    push_out(harness)
    assert ready(harness, PROMPT) == 0


def test_a_pool_that_is_too_small_keeps_no_idle_engine_awake(lazy: Build) -> None:
    harness = lazy(host_pages=1)
    push_out(harness, count=30)  # drains each time
    assert counted(harness, "evicted_chunks|") > 0
    assert not harness.busy


def test_the_books_are_bounded_by_the_device(lazy: Build) -> None:
    harness = lazy()
    for index in range(60):
        run(harness, f"other-{index}", other(index, 9 + index % 20), 5)
        harness.check()
    leavings = harness.connector._deciding._lazy._leavings
    assert len(leavings) <= 64
    assert len({id(one) for one in leavings._at if one is not None}) <= 64


def test_windows_are_stored_as_they_are_computed_and_hit_with_what_is_pushed_out(lazy: Build) -> None:
    harness = lazy(num_blocks=129, window_tokens=9)
    run(harness, "first", PROMPT)
    groups = {
        group
        for group in (0, 1)
        if harness.connector._deciding._manager.lookup(_run(harness, PROMPT, group), None).ready_count
    }
    assert groups == {1}
    for index in range(20):
        run(harness, f"other-{index}", other(index))
    before = hit_tokens(harness)
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) - before == 28


def _run(harness: Harness, prompt: list[int], group_index: int) -> Any:
    probe = harness.add("probe", prompt)
    harness.abort("probe")
    group = harness.connector._deciding._geometry.groups[group_index]
    return (
        group.run(probe.block_hashes, 3, len(probe.block_hashes))
        if group_index
        else group.run(probe.block_hashes, 0, len(probe.block_hashes))
    )


def test_the_walk_stores_jobs_of_one_direction_only(lazy: Build) -> None:
    harness = lazy()
    push_out(harness, count=20)
    assert counted(harness, f"transfers|{Direction.STORE.value}") > 0
    assert counted(harness, f"transfers|{Direction.LOAD.value}") == 0
