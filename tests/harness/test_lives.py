"""Lives of chunks with vLLM's real schedulers: stored, loaded, preempted, aborted, reset, failed.

The model refuses to read a byte that its prefix does not demand, so every test that ends has read only
right ones.
"""

import gc
import time
from collections.abc import Callable, Iterator

import pytest
from vllm.v1.request import RequestStatus

from kvtide.jobs import JobId
from kvtide.vllm.testing import Harness
from kvtide.vllm.testing.model import PatternModel

Build = Callable[..., Harness]
PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens
OTHERS = [[100 + 40 * n + i for i in range(30)] for n in range(8)]


def run(harness: Harness, request_id: str, prompt: list[int], max_tokens: int = 4) -> None:
    harness.add(request_id, prompt, max_tokens)
    harness.drain()
    assert harness.outputs[request_id] == PatternModel.answer(prompt, max_tokens)


def push_out(harness: Harness) -> None:
    """Fill the device with others, so that nothing of PROMPT is left there."""
    for index, prompt in enumerate(OTHERS):
        run(harness, f"other-{index}", prompt)


def stored(harness: Harness) -> int:
    """Chunks of PROMPT that host memory holds."""
    scheduler = harness.connector._deciding
    probe = harness.add("probe", PROMPT)
    harness.scheduler.finish_requests("probe", RequestStatus.FINISHED_ABORTED)
    group = scheduler._geometry.groups[0]
    run_ = group.run(probe.block_hashes, 0, len(probe.block_hashes) // group.hashes_per_chunk)
    return scheduler._manager.lookup(run_, None).ready_count


def a_store_that_reads_the_blocks_of_the_next_load(harness: Harness) -> list[JobId]:
    """PROMPT is in host memory alone; the free blocks are those of a finished request still being stored."""
    run(harness, "first", PROMPT)
    run(harness, "second", OTHERS[1])
    harness.scheduler.reset_prefix_cache()
    harness.add("writer", OTHERS[2], 1)
    for _ in range(3):
        harness.step()
    assert harness.store.held
    return list(harness.store.held)


def hit_tokens(harness: Harness) -> float:
    return harness.counted.data.get("hit_tokens|host", 0)


@pytest.mark.parametrize("block_first", [False, True])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_what_was_stored_and_pushed_out_is_loaded_and_right(
    build: Build, blocks_per_chunk: int, block_first: bool
) -> None:
    harness = build(blocks_per_chunk=blocks_per_chunk, block_first=block_first)
    run(harness, "first", PROMPT)
    push_out(harness)
    step_tokens = []
    harness.add("again", PROMPT, 4)
    harness.load.auto_finish = harness.store.auto_finish = True
    while harness.scheduler.has_requests() and len(step_tokens) < 50:
        step_tokens.append(sum(harness.step().num_scheduled_tokens.values()))
    harness.drain()
    assert harness.outputs["again"] == PatternModel.answer(PROMPT, 4)
    loaded = 28 if blocks_per_chunk == 1 else 24
    assert max(step_tokens) == len(PROMPT) - loaded


def test_a_store_goes_out_at_the_start_of_the_step_after_its_forward(build: Build) -> None:
    # vLLM #45704
    harness = build()
    harness.add("a", PROMPT, 4)
    harness.step()
    assert harness.store.held == []
    harness.step()
    assert harness.store.held == [0]


def test_steps_go_on_while_a_load_is_held_and_no_step_waits(build: Build) -> None:
    harness = build()
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("talker", [90, 91, 92], 40)
    for _ in range(3):
        harness.step()
    harness.add("loader", PROMPT, 4)
    waited = len(harness.store.waited) + len(harness.load.waited)
    spoken = len(harness.outputs["talker"])
    for _ in range(20):
        harness.step()
    assert len(harness.load.held) == 1
    assert harness.outputs["loader"] == []
    assert len(harness.outputs["talker"]) - spoken >= 19
    assert len(harness.store.waited) + len(harness.load.waited) == waited
    harness.drain()
    assert harness.outputs["loader"] == PatternModel.answer(PROMPT, 4)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """No garbage is looked for meanwhile: a collection would walk through what other tests have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_no_hook_takes_over_two_milliseconds(build: Build) -> None:
    harness = build(num_blocks=257)
    long = [(7 * i) % 90 for i in range(900)]
    for round_ in range(3):
        run(harness, f"long-{round_}", long)
        harness.scheduler.reset_prefix_cache()
    assert hit_tokens(harness) >= 800
    seconds, hook = harness.longest_hook_s
    assert seconds < 0.002, f"{hook} took {1e3 * seconds:.2f} ms of CPU"


def test_a_second_request_waits_for_the_first_ones_load_and_then_hits_the_engine(build: Build) -> None:
    harness = build()
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("one", PROMPT, 4)
    harness.add("two", PROMPT, 4)
    for _ in range(5):
        harness.step()
    assert len(harness.load.held) == 1
    before = hit_tokens(harness)
    harness.drain()
    assert harness.outputs["one"] == harness.outputs["two"] == PatternModel.answer(PROMPT, 4)
    assert hit_tokens(harness) - before == 28


def test_waiting_for_another_ones_load_is_bounded_by_the_clock(build: Build) -> None:
    harness = build(defer_limit_s=0.0)
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("one", PROMPT, 4)
    harness.add("two", PROMPT, 4)
    for _ in range(8):
        harness.step()
    assert harness.outputs["two"] == PatternModel.answer(PROMPT, 4)
    assert harness.outputs["one"] == []
    harness.drain()
    assert harness.outputs["one"] == PatternModel.answer(PROMPT, 4)


def test_a_load_that_fails_is_computed_and_not_offered_to_that_request_again(build: Build) -> None:
    # dynamo #15079: it was served with another request's KV
    harness = build()
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("again", PROMPT, 4)
    for _ in range(40):
        harness.step()
        harness.load.fail()
        if not harness.scheduler.has_requests():
            break
    harness.store.finish()
    harness.drain()
    assert harness.outputs["again"] == PatternModel.answer(PROMPT, 4)
    assert harness.errors == []
    assert harness.counted.data["failed_load_requests|"] == 1
    # Another request gets them.
    harness.scheduler.reset_prefix_cache()
    run(harness, "another", PROMPT)
    assert hit_tokens(harness) >= 28


def test_a_store_that_fails_leaves_no_visible_key(build: Build) -> None:
    harness = build()
    harness.add("a", PROMPT, 1)
    for _ in range(6):
        harness.step()
        harness.store.fail()
    harness.drain()
    assert stored(harness) == 0
    run(harness, "b", PROMPT)
    assert stored(harness) == 7


def test_a_finished_request_is_stored_to_its_last_whole_chunk(build: Build) -> None:
    # vLLM #46027, #47107: planned one step late, and with asynchronous scheduling never
    harness = build()
    prompt = PROMPT[:5]
    run(harness, "a", prompt, 12)
    # 17 tokens, and the last one was sampled and never computed: 4 whole blocks.
    whole = prompt + PatternModel.answer(prompt, 12)
    push_out(harness)
    before = hit_tokens(harness)
    run(harness, "b", [*whole, 1], 2)
    assert hit_tokens(harness) - before == 16


def test_blocks_of_a_finished_request_are_flushed_before_another_one_writes_them(build: Build) -> None:
    harness = build(num_blocks=11)  # 10 blocks to give away
    harness.add("a", PROMPT, 1)
    for _ in range(3):
        harness.step()
    assert harness.store.held, "the store of a finished request is still open"
    held = harness.store.held[0]
    harness.add("b", OTHERS[0], 1)
    for _ in range(3):
        harness.step()
    assert held in harness.store.waited
    harness.drain()
    harness.scheduler.reset_prefix_cache()
    before = hit_tokens(harness)
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) - before == 28


def test_a_wedged_store_never_becomes_visible_and_the_step_goes_on(build: Build) -> None:
    harness = build(num_blocks=11, flush_limit_s=0.01)
    harness.add("a", PROMPT, 1)
    for _ in range(3):
        harness.step()
    held = harness.store.held[0]
    harness.store.wedged.add(held)
    harness.add("b", OTHERS[0], 1)
    for _ in range(4):
        harness.step()
    assert harness.outputs["b"] == PatternModel.answer(OTHERS[0], 1)
    harness.store.finish(held)
    harness.drain()
    assert stored(harness) == 0


def test_a_load_into_blocks_that_a_store_still_reads_waits_for_that_store_alone(build: Build) -> None:
    # vLLM #47282
    harness = build(num_blocks=11)
    a_store_that_reads_the_blocks_of_the_next_load(harness)
    harness.add("loader", PROMPT, 1)
    for _ in range(4):
        harness.step()
    assert harness.load.held == []
    assert harness.store.waited == [], "no step had to wait"
    harness.store.finish()
    for _ in range(2):
        harness.step()
    assert len(harness.load.held) == 1
    harness.drain()
    assert harness.outputs["loader"] == PatternModel.answer(PROMPT, 1)


def test_a_load_behind_a_store_that_never_ends_is_given_up_and_computed(build: Build) -> None:
    harness = build(num_blocks=11, transfer_deadline_s=0.02)
    reading = a_store_that_reads_the_blocks_of_the_next_load(harness)
    harness.store.wedged.update(reading)
    harness.add("loader", PROMPT, 1)
    harness.step()
    time.sleep(0.03)
    for _ in range(6):
        harness.step()
    assert harness.outputs["loader"] == PatternModel.answer(PROMPT, 1)
    assert harness.counted.data["failed_load_requests|"] == 1
    harness.drain()


def test_preempted_requests_end_with_the_right_tokens(build: Build) -> None:
    harness = build(num_blocks=17, budget_tokens=40)
    prompts = [prompt[:14] for prompt in OTHERS[:6]]
    for index, prompt in enumerate(prompts):
        harness.add(f"r{index}", prompt, 16)
    preempted = 0
    for index in range(400):
        preempted += len(harness.step().preempted_req_ids or ())
        if index % 3 == 0:  # late, and sometimes out of order
            harness.load.finish()
        if index % 5 == 0:
            for job in reversed(harness.store.held):
                harness.store.finish(job)
        if not harness.scheduler.has_requests():
            break
    harness.drain()
    assert preempted > 0
    for index, prompt in enumerate(prompts):
        assert harness.outputs[f"r{index}"] == PatternModel.answer(prompt, 16)


@pytest.mark.parametrize("steps", range(8))
def test_a_request_aborted_in_any_phase_leaves_nothing_behind(build: Build, steps: int) -> None:
    harness = build()
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("victim", PROMPT, 6)
    for index in range(steps):
        harness.step()
        if index == 3:
            harness.load.finish()
    harness.abort("victim")
    for _ in range(2):
        harness.step()
    harness.drain()
    run(harness, "after", PROMPT)


def test_a_request_aborted_before_it_was_scheduled_builds_no_job(build: Build) -> None:
    # vLLM #49118: a pool of 8 blocks, and one request holds it
    harness = build(num_blocks=9)
    harness.add("holder", PROMPT[:26], 4)
    harness.step()
    harness.add("waiting", OTHERS[0], 1)
    harness.step()
    jobs = harness.describe()["open jobs"]
    harness.abort("waiting")
    assert harness.describe()["open jobs"] == jobs
    harness.drain()
    assert harness.outputs["holder"] == PatternModel.answer(PROMPT[:26], 4)


def test_a_reset_with_a_load_in_flight_is_computed_and_never_served_again(build: Build) -> None:
    harness = build()
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("loader", PROMPT, 4)
    for _ in range(3):
        harness.step()
    assert len(harness.load.held) == 1
    before = hit_tokens(harness)
    assert harness.connector.reset_cache()
    harness.drain()
    assert harness.outputs["loader"] == PatternModel.answer(PROMPT, 4)
    assert hit_tokens(harness) == before
    assert harness.errors == []


def test_a_reset_with_a_store_in_flight_never_makes_it_visible(build: Build) -> None:
    harness = build()
    harness.add("a", PROMPT, 1)
    for _ in range(3):
        harness.step()
    assert harness.store.held
    assert harness.connector.reset_cache()
    harness.drain()
    assert stored(harness) == 0
    assert harness.connector._deciding._manager.used_count == 0


def test_what_a_running_request_computed_before_a_reset_is_not_stored_after_it(build: Build) -> None:
    harness = build()
    harness.add("a", PROMPT, 12)
    for _ in range(4):
        harness.step()
    harness.connector.reset_cache()
    harness.drain()
    assert harness.outputs["a"] == PatternModel.answer(PROMPT, 12)
    assert stored(harness) == 0


def test_a_request_longer_than_the_host_pool_stores_the_prefix_that_fits(build: Build) -> None:
    harness = build(num_blocks=130, host_pages=1)  # 42 chunks of 96 bytes
    long = [(3 * i) % 80 for i in range(300)]
    run(harness, "long", long, 2)
    manager = harness.connector._deciding._manager
    assert manager.used_count == manager.capacity == 42
    harness.scheduler.reset_prefix_cache()
    before = hit_tokens(harness)
    run(harness, "again", long, 2)
    assert hit_tokens(harness) - before == 42 * 4


def test_what_found_no_room_is_not_offered_again_each_step(build: Build) -> None:
    harness = build(num_blocks=130, host_pages=1)
    harness.store.auto_finish = True
    harness.add("long", [(3 * i) % 80 for i in range(300)], 60)
    for _ in range(12):
        harness.step()
    skipped = harness.counted.data["skipped_store_chunks|pool_full"]
    assert skipped >= 75 - 42
    for _ in range(30):
        harness.step()
    assert harness.counted.data["skipped_store_chunks|pool_full"] == skipped
    harness.drain()


def test_prompt_only_leaves_out_what_was_generated(build: Build) -> None:
    harness = build(offload_prompt_only=True)
    run(harness, "a", PROMPT[:6], 14)
    assert harness.connector._deciding._manager.used_count == 1


def test_below_the_threshold_nothing_is_stored_and_at_it_everything(build: Build) -> None:
    harness = build(store_threshold=2)
    run(harness, "a", PROMPT, 1)
    assert stored(harness) == 0
    run(harness, "b", PROMPT, 1)
    assert stored(harness) == 7


def test_a_request_that_may_not_read_loads_nothing_and_still_stores(build: Build) -> None:
    harness = build()
    run(harness, "first", PROMPT)
    push_out(harness)
    before = hit_tokens(harness)
    harness.add("reader", PROMPT, 2, skip_reading_prefix_cache=True)
    harness.drain()
    assert harness.outputs["reader"] == PatternModel.answer(PROMPT, 2)
    assert hit_tokens(harness) == before


def test_a_hit_of_less_than_one_chunk_is_a_miss(build: Build) -> None:
    harness = build(blocks_per_chunk=3)
    run(harness, "first", PROMPT[:20])
    push_out(harness)
    # The engine has one block of the chunk's three again; the two others are less than a chunk.
    run(harness, "little", [*PROMPT[:5], 9])
    before = hit_tokens(harness)
    run(harness, "again", PROMPT[:20])
    assert hit_tokens(harness) == before
    assert harness.outputs["again"] == PatternModel.answer(PROMPT[:20], 4)


def test_a_chunk_the_engine_has_in_part_is_loaded_in_part(build: Build) -> None:
    harness = build(blocks_per_chunk=3)
    run(harness, "first", PROMPT)
    push_out(harness)
    run(harness, "little", [*PROMPT[:5], 9])  # the first block is back on the device
    before = hit_tokens(harness)
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) - before == 20


def test_an_idle_engine_drains_and_then_sleeps(build: Build) -> None:
    # SGLang PR #20560
    harness = build()
    harness.add("a", PROMPT, 1)
    for _ in range(5):
        harness.step()
    assert harness.store.held
    assert harness.scheduler.has_requests(), "an open copy keeps the engine stepping"
    harness.store.finish()
    for _ in range(3):
        harness.step()
    assert not harness.scheduler.has_requests()
    harness.check()


def test_a_full_store_queue_skips_and_catches_up_later(build: Build) -> None:
    # llm-d-kv-cache #457: the queue grew to thousands
    harness = build(store_queue=96 * 3)
    harness.add("a", PROMPT, 6)
    for _ in range(4):
        harness.step()
    assert harness.counted.data["skipped_store_chunks|queue_full"] > 0
    assert harness.connector._deciding._jobs.store_chunk_count <= 3
    harness.drain()
    for _ in range(2):
        run(harness, "more", PROMPT)
    assert stored(harness) == 7
