"""Failures of the field, F1 and F2: blocks that change owner under a copy, and holes in a request's life.

Each test has in ``failure_rules.py`` the line of the connector without which it fails. Bytes are judged by
the model engine: whoever reads, loads or finds in a cache what its prefix does not demand, fails the test.
"""

from collections.abc import Callable

import pytest
from test_found_by_walks import Ordered, held_by_the_sibling
from test_lives import OTHERS, PROMPT, Build, hit_tokens, push_out, run
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from kvtide.vllm.testing import Harness, Siblings
from kvtide.vllm.testing.model import PatternModel


def step_until(harness: Harness, condition: Callable[[SchedulerOutput], bool], limit: int = 100) -> None:
    assert any(condition(harness.step()) for _ in range(limit)), f"not within {limit} steps"


# -- F1: a block changes owner while a copy touches it ----------------------------------------------------


def test_a_pending_store_does_not_read_what_another_connector_brings_into_its_blocks(build: Build) -> None:
    # vLLM #46951: blocks can be reused although we are asked for 0 tokens.
    harness = build(num_blocks=11, siblings=Siblings.BEFORE)
    harness.sibling.chance = Ordered(steps=0)
    harness.add("finished", PROMPT, 1)
    for _ in range(3):
        harness.step()
    pending = harness.store.held
    assert pending
    harness.add("brought", OTHERS[0], 1, **held_by_the_sibling(28))
    for _ in range(4):
        harness.step()
    assert harness.store.waited == pending
    harness.drain()
    assert harness.outputs["brought"] == PatternModel.answer(OTHERS[0], 1)
    harness.scheduler.reset_prefix_cache()
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) == 28


def test_the_late_copy_of_an_aborted_load_lands_in_nobody_elses_blocks(build: Build) -> None:
    # vLLM #32255
    harness = build(num_blocks=11)
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.add("aborted", PROMPT, 1)
    harness.step()
    assert len(harness.load.held) == 1
    harness.abort("aborted")
    harness.add("next", [*OTHERS[0][::-1]], 1)  # 8 of 10 blocks, and 7 are the copy's
    for _ in range(4):
        harness.step()
    harness.load.finish()
    harness.drain()
    assert harness.outputs["next"] == PatternModel.answer(OTHERS[0][::-1], 1)
    assert harness.check_cached() >= 7


@pytest.mark.parametrize("asynchronous", [True])
def test_a_request_that_ends_while_a_step_of_it_is_under_way_stores_nothing_of_that_step(
    build: Build,
) -> None:
    # vLLM #45357: it ends at step N, and step N + 1 still writes.
    harness = build()
    harness.add("ends", PROMPT[:5], 9)
    while len(harness.outputs["ends"]) < 3:
        harness.step()
    request = harness.scheduler.requests["ends"]
    assert request.num_tokens == 8, "two blocks are known"
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (8, 1), "one token is being written"
    harness.abort("ends")
    harness.drain()
    assert harness.connector._deciding._manager.used_count == 1


# -- F2: holes in a request's life ------------------------------------------------------------------------


def test_a_request_preempted_with_a_store_in_flight_comes_back_with_a_hit_on_its_own_prefix(
    build: Build,
) -> None:
    # vLLM #46014
    harness = build(num_blocks=20, budget_tokens=20, defer_limit_s=0.0, flush_limit_s=0.001)
    harness.add("grows", OTHERS[0], 40)
    for _ in range(4):
        harness.step()
    harness.store.finish()
    harness.add("preempted", PROMPT, 12)
    step_until(harness, lambda _: len(harness.store.held) == 1)
    harness.store.finish()
    step_until(harness, lambda _: len(harness.store.held) == 1)
    in_flight = harness.store.held[0]
    harness.store.wedged.add(in_flight)
    step_until(harness, lambda step: "preempted" in (step.preempted_req_ids or ()))
    request = harness.scheduler.requests["preempted"]
    step_until(harness, lambda _: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert harness.store.held[0] == in_flight, "the store from before the preemption is still in flight"
    harness.drain()
    assert harness.outputs["preempted"] == PatternModel.answer(PROMPT, 12)
    assert hit_tokens(harness) >= 4


def test_a_request_that_shares_its_blocks_with_another_connectors_load_is_stored_as_they_fill(
    build: Build,
) -> None:
    # vLLM #52170: all hashes are known when the first blocks come, and the blocks come piece by piece.
    harness = build(siblings=Siblings.BEFORE, budget_tokens=8)
    harness.sibling.chance = Ordered(steps=4)
    harness.add("brought", PROMPT, 8, **held_by_the_sibling(8))
    manager = harness.connector._deciding._manager
    for _ in range(3):
        harness.step()
    assert manager.used_count == 0, "nothing is there to be stored yet"
    harness.store.auto_finish = True
    step_until(harness, lambda _: len(harness.outputs["brought"]) == 3)
    assert manager.used_count == 7, "the whole prompt, while its request runs"
    harness.drain()
    assert harness.outputs["brought"] == PatternModel.answer(PROMPT, 8)
    harness.scheduler.reset_prefix_cache()
    run(harness, "again", PROMPT)
    assert hit_tokens(harness) == 28
