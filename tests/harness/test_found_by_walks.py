"""What the random walks have found, each as short as it can be told."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.testing import Ending, Fate, FaultPlan, FaultyDevice, VirtualClock
from kvtide.vllm.testing import EngineShape, Harness, ModelEngine, Siblings
from kvtide.vllm.testing.model import PatternModel

Build = Callable[..., Harness]
PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens


class Ordered:
    """Takes the place of chance in a sibling: so many steps, and well or not."""

    def __init__(self, steps: int, fails: bool = False) -> None:
        self._steps = steps
        self._fails = fails

    def randrange(self, _: int) -> int:
        return self._steps

    def random(self) -> float:
        return 0.0 if self._fails else 1.0


def held_by_the_sibling(tokens: int) -> dict[str, object]:
    return {"extra_args": {"kv_transfer_params": {"sibling_tokens": tokens}}}


def test_a_request_aborted_while_another_connector_loads_is_not_stored(build: Build) -> None:
    harness = build(siblings=Siblings.AFTER)
    harness.sibling.chance = Ordered(steps=4)
    harness.add("loading", PROMPT, 1, **held_by_the_sibling(28))
    harness.step()
    harness.abort("loading")
    harness.store.auto_finish = True  # before the sibling has brought anything
    harness.drain()
    harness.scheduler.reset_prefix_cache()
    harness.add("reader", PROMPT, 1)
    harness.drain()
    assert harness.outputs["reader"] == PatternModel.answer(PROMPT, 1)


def test_a_request_whose_load_failed_is_not_offered_another_load(build: Build) -> None:
    # vLLM 0.32 keeps a request whose load has failed among its in-flight prefills: the blocks it still needs
    # are reserved against its own next load, and where both do not fit the engine stands still.
    harness = build(num_blocks=13, siblings=Siblings.BEFORE)
    harness.sibling.chance = Ordered(steps=0, fails=True)
    harness.add("writer", PROMPT, 1)
    harness.drain()
    harness.scheduler.reset_prefix_cache()
    harness.add("reader", PROMPT, 1, **held_by_the_sibling(28))
    harness.drain()
    assert harness.outputs["reader"] == PatternModel.answer(PROMPT, 1)


def test_requests_whose_loads_failed_together_end(build: Build) -> None:
    harness = build(num_blocks=19, window_tokens=5)
    for prompt in (PROMPT, PROMPT[::-1]):
        harness.add(f"writer {prompt[0]}", prompt, 1)
        harness.drain()
    harness.scheduler.reset_prefix_cache()
    harness.add("a", PROMPT, 1)
    harness.add("b", PROMPT[::-1], 1)
    for _ in range(3):
        harness.step()
    harness.load.fail()
    harness.drain()
    assert harness.outputs["a"] == PatternModel.answer(PROMPT, 1)
    assert harness.outputs["b"] == PatternModel.answer(PROMPT[::-1], 1)


@pytest.mark.parametrize("defer_limit_s", [2.0, 0.0])
def test_a_loaded_request_is_not_stuck_behind_one_whose_load_failed(
    build: Build, defer_limit_s: float
) -> None:
    # vLLM #45387, #57104: requests that wait for loads hold the pool
    # vLLM 0.32 keeps a request whose load has failed, and that owns nothing, in the queue of those that own
    # blocks; while it does not fit, nobody behind it is looked at, and those are who could make room.
    harness = build(num_blocks=19, window_tokens=5, defer_limit_s=defer_limit_s)
    harness.add("a", PROMPT, 1)
    harness.drain()
    harness.add("b", PROMPT[::-1], 1)
    harness.drain()
    harness.scheduler.reset_prefix_cache()
    harness.add("fails", PROMPT, 1)
    harness.add("loaded", PROMPT[::-1], 1)
    for _ in range(3):
        harness.step()
    harness.load.fail(harness.load.held[0])
    harness.drain()
    assert harness.outputs["fails"] == PatternModel.answer(PROMPT, 1)
    assert harness.outputs["loaded"] == PatternModel.answer(PROMPT[::-1], 1)


def test_loaded_requests_leave_room_to_run_where_a_group_sees_a_window(build: Build) -> None:
    # vLLM #45387, #57104
    # vLLM 0.32 admits the second load because it takes the first one's window for all it will ever need of
    # that group. Then neither has room for its next tokens, and nobody runs who could be preempted.
    harness = build(num_blocks=32, window_tokens=5, budget_tokens=24, host_pages=16)
    prefixes = [list(range(1, 41)), list(range(50, 90))]
    for prefix in prefixes:
        harness.add(f"writer {prefix[0]}", [*prefix, 99], 1)
        harness.drain()
    harness.scheduler.reset_prefix_cache()
    prompts = [prefix + list(range(100, 120)) for prefix in prefixes]
    for prompt in prompts:
        harness.add(f"reader {prompt[0]}", prompt, 1)
    for _ in range(3):
        harness.step()
    assert harness.load.held
    harness.drain()
    for prompt in prompts:
        assert harness.outputs[f"reader {prompt[0]}"] == PatternModel.answer(prompt, 1)


def test_a_window_shorter_than_a_chunk_is_hit_again_after_a_prefill_in_pieces(build: Build) -> None:
    harness = build(asynchronous=False, num_blocks=64, window_tokens=5, blocks_per_chunk=3, budget_tokens=7)
    for name in ("first", "second"):
        harness.add(name, PROMPT, 1)
        harness.drain()
        harness.scheduler.reset_prefix_cache()
    assert harness.counted.data.get("hit_tokens|host", 0) == 24


@pytest.fixture
def fates() -> list[Fate]:
    """Of the copies to come, in order; after the last one copies are instant."""
    return []


@pytest.fixture
def engine(tmp_path: Path, asynchronous: bool, fates: list[Fate]) -> Iterator[ModelEngine]:
    """An engine of 10 blocks in virtual time, whose steps may wait 0.25 s for a copy."""
    plan, clock = FaultPlan(random.Random(0), {"instant": 1.0}), VirtualClock()
    plan.draw = lambda: fates.pop(0) if fates else Fate("instant")  # type: ignore[method-assign]
    shape = EngineShape(11, asynchronous=asynchronous, settings={"flush_limit_s": 0.25})
    engine = ModelEngine(tmp_path, shape, lambda rank, direction: FaultyDevice(plan, clock), clock)
    yield engine
    engine.close()


WEDGED = Fate("never ends", ending=Ending.NEVER, share=0.5, deaf=True)


def turn_over_the_device(engine: ModelEngine, fates: list[Fate], fate: Fate, times: int) -> None:
    """One store of this fate, and then other requests that are given its blocks again and again."""
    fates.append(fate)
    engine.add(f"stored {fate.kind}", PROMPT, 1)
    for index in range(times + 1):
        for _ in range(6):
            engine.step()
        engine.add(f"{fate.kind} {index}", [100 + index, *PROMPT[1:]], 1)


def test_a_step_waits_for_a_wedged_store_no_longer_than_the_limit(
    engine: ModelEngine, fates: list[Fate]
) -> None:
    # llm-d-kv-cache #457: preemption waited for the queue of stores
    turn_over_the_device(engine, fates, WEDGED, times=1)
    assert 0.2 < engine.longest_hook_s[0] <= 0.2501


def test_a_store_known_to_be_wedged_is_not_waited_for_again(engine: ModelEngine, fates: list[Fate]) -> None:
    turn_over_the_device(engine, fates, WEDGED, times=1)
    engine.longest_hook_s = 0.0, ""
    turn_over_the_device(engine, fates, Fate("instant"), times=4)
    assert engine.longest_hook_s[0] < 0.1
