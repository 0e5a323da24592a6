"""Failures of the field, F6 and F7: an answer that never comes, and starvation under pressure.

Each test has in ``failure_rules.py`` the line of the connector without which it fails.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_lives import OTHERS, PROMPT, Build, push_out, run, stored
from vllm.v1.core.sched.output import SchedulerOutput

from kvtide.scheduler import quarantine
from kvtide.testing import Fate, FaultPlan, FaultyDevice, VirtualClock
from kvtide.vllm.testing import EngineShape, Harness, ModelEngine
from kvtide.vllm.testing import shape as shapes
from kvtide.vllm.testing.groups import GroupShape
from kvtide.vllm.testing.model import PatternModel

NEVER = Fate("never begins", begin_after_s=float("inf"))


def leave_a_store_open(harness: Harness) -> None:
    """Let a request finish whose store does not end, and empty the device."""
    harness.add("storing", PROMPT, 1)
    for _ in range(3):
        harness.step()
    harness.store.wedged.update(harness.store.held)
    assert harness.store.held
    harness.scheduler.reset_prefix_cache()


# -- F6: an answer that never comes -----------------------------------------------------------------------


def test_who_waits_for_a_store_that_never_ends_computes_when_its_patience_ends(build: Build) -> None:
    # vLLM #49829: it asked 1.27 million times.
    harness = build(defer_limit_s=0.05)
    leave_a_store_open(harness)
    harness.add("waits", PROMPT, 4)
    for _ in range(3):
        harness.step()
    assert harness.outputs["waits"] == [], "what it lacks is on its way"
    time.sleep(0.06)
    for _ in range(8):
        harness.step()
    assert harness.outputs["waits"] == PatternModel.answer(PROMPT, 4)
    assert harness.counted.data["deferred_lookups|"] <= 4
    harness.drain()


def test_a_chunk_whose_store_never_ends_stops_being_waited_for_and_is_stored_anew(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM #49829: the slot was pinned for good.
    monkeypatch.setattr(quarantine, "GRACE_S", 0.0)
    harness = build(defer_limit_s=600.0, transfer_deadline_s=0.05)
    leave_a_store_open(harness)
    wedged = list(harness.store.held)
    time.sleep(0.06)
    harness.step()
    harness.add("anew", PROMPT, 1)
    for _ in range(6):
        harness.step()
    assert harness.outputs["anew"] == PatternModel.answer(PROMPT, 1)
    for job_id in set(harness.store.held) - set(wedged):
        harness.store.finish(job_id)
    for _ in range(2):
        harness.step()
    assert stored(harness) == 7
    assert harness.connector._deciding._manager.used_count == 14, "slots stay taken while a copy may write"
    for job_id in wedged:
        harness.store.finish(job_id)
    harness.drain()
    assert harness.connector._deciding._manager.used_count == 7
    harness.scheduler.reset_prefix_cache()
    run(harness, "again", PROMPT)


def test_a_lookup_that_is_asked_again_does_not_go_on_saying_hit_for_what_has_left(build: Build) -> None:
    # vLLM #49176
    harness = build(num_blocks=13)
    run(harness, "first", PROMPT)
    harness.scheduler.reset_prefix_cache()
    harness.add("runs", OTHERS[0], 12)
    for _ in range(4):
        harness.step()
    harness.add("asks", PROMPT, 4)  # there is no room for it before the other one ends
    for _ in range(2):
        harness.step()
    assert harness.load.held == []
    assert stored(harness) == 7
    harness.connector._deciding._manager._evict(64)
    assert stored(harness) == 0
    harness.drain()
    assert harness.outputs["asks"] == PatternModel.answer(PROMPT, 4)
    assert "failed_load_requests|" not in harness.counted.data


def test_a_reset_ends_the_waiting_for_a_store_that_was_under_way(build: Build) -> None:
    # vLLM #48102
    harness = build(defer_limit_s=600.0)
    leave_a_store_open(harness)
    reset_while_one_waits(harness)


def test_a_reset_ends_the_waiting_for_a_load_that_was_under_way(build: Build) -> None:
    # vLLM #48102
    harness = build(defer_limit_s=600.0)
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("loading", PROMPT, 4)
    harness.step()
    harness.load.wedged.update(harness.load.held)
    reset_while_one_waits(harness)


def reset_while_one_waits(harness: Harness) -> None:
    harness.add("waits", PROMPT, 4)
    for _ in range(3):
        harness.step()
    assert harness.outputs["waits"] == [], "what it lacks is on its way"
    assert harness.connector.reset_cache()
    for _ in range(8):
        harness.step()
    assert harness.outputs["waits"] == PatternModel.answer(PROMPT, 4)
    harness.drain()


# -- F7: deadlock and starvation under pressure -----------------------------------------------------------


@pytest.mark.parametrize("ends", ["well well", "badly well", "well badly", "badly badly"])
def test_two_loads_that_do_not_fit_the_pool_together_both_end(build: Build, ends: str) -> None:
    # vLLM #45387, #57104: 7 blocks, one wants 4 loaded and 1 computed, the other 3 and 1.
    harness = build(num_blocks=8)
    prompts = {"a": list(range(1, 19)), "b": list(range(50, 64))}
    for name, prompt in prompts.items():
        run(harness, f"stores {name}", prompt, 1)
    harness.scheduler.reset_prefix_cache()
    for name, prompt in prompts.items():
        harness.add(name, prompt, 1)
    for end in ends.split():
        for _ in range(8):
            harness.step()
        for job_id in harness.load.held:
            (harness.load.finish if end == "well" else harness.load.fail)(job_id)
    harness.drain()
    for name, prompt in prompts.items():
        assert harness.outputs[name] == PatternModel.answer(prompt, 1)
    assert harness.errors == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ends", ["well well", "badly well", "well badly", "badly badly"])
def test_two_parked_loads_that_leave_one_block_between_them_both_end(
    build: Build, ends: str, first: int
) -> None:
    # vLLM #45387, #57104: with an eighth block vLLM parks both; each wants one more at once, and more later.
    harness = build(num_blocks=9)
    prompts = {"a": list(range(1, 19)), "b": list(range(50, 64))}
    for name, prompt in prompts.items():
        run(harness, f"stores {name}", prompt, 1)
    harness.scheduler.reset_prefix_cache()
    for name, prompt in prompts.items():
        harness.add(name, prompt, 9)
    for _ in range(4):
        harness.step()
    parked = harness.load.held
    assert len(parked) == 2
    for job_id, end in zip((parked[first], parked[1 - first]), ends.split(), strict=True):
        (harness.load.finish if end == "well" else harness.load.fail)(job_id)
        for _ in range(8):
            harness.step()
    harness.drain()
    for name, prompt in prompts.items():
        assert harness.outputs[name] == PatternModel.answer(prompt, 9)
    assert harness.errors == []


def test_fifty_requests_do_not_wait_for_a_shared_prefix_longer_than_computing_it_takes(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM #44294: 50 requests share 10,000 tokens; the first is loading them.
    monkeypatch.setattr(shapes, "MAX_MODEL_LEN", 16384)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    clock, fates = VirtualClock(), []
    plan = FaultPlan(random.Random(0), {"instant": 1.0})
    plan.draw = lambda: fates.pop(0) if fates else Fate("instant")  # type: ignore[method-assign]
    shape = EngineShape(
        1300,
        (GroupShape(("layers.0",), 16),),
        asynchronous,
        budget_tokens=2048,
        host_pages=64,
        settings={"defer_limit_s": 600.0, "transfer_deadline_s": 3600.0},
    )
    engine = ModelEngine(tmp_path, shape, lambda rank, direction: FaultyDevice(plan, clock), clock)
    prefix = [(7 * index) % 89 for index in range(10_000)]

    def plan_and_compute(**arguments: Any) -> SchedulerOutput:
        step = plan_step(**arguments)
        clock.advance(0.001 + 1e-4 * step.total_num_scheduled_tokens)
        return step

    plan_step = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", plan_and_compute)

    def until(condition: Callable[[], bool]) -> float:
        began_s = clock.monotonic()
        for _ in range(2000):
            if condition():
                return clock.monotonic() - began_s
            if engine.scheduler.has_requests():
                engine.step()
            else:
                engine.update()
        raise AssertionError("it does not end")

    engine.add("stores", prefix, 1)
    computing_s = until(lambda: not engine.busy)
    engine.scheduler.reset_prefix_cache()
    fates.append(NEVER)
    names = [f"shares {index}" for index in range(50)]
    for index, name in enumerate(names):
        engine.add(name, [*prefix, index], 1)
    took_s = until(lambda: all(engine.outputs[name] for name in names[1:]))
    assert took_s <= 2.05 * computing_s, "to wait, and to compute the prefix once"
    assert not engine.outputs[names[0]], "the first is still loading"
    engine.close()
