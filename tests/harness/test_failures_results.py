"""Failures of the field, F5 and F9: a failure taken for a success, and ranks that disagree.

Each test has in ``failure_rules.py`` the line of the connector without which it fails.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from held_ranks import HeldRanks
from test_lives import OTHERS, PROMPT, Build, hit_tokens, push_out, run, stored

from kvtide.jobs import HopResult
from kvtide.scheduler import quarantine
from kvtide.transfer.pool import HostPool
from kvtide.vllm.testing.model import PatternModel

DONE, FAILED = HopResult.DONE, HopResult.FAILED

one_group_and_two = pytest.mark.parametrize("window_tokens", [None, 5])


# -- F5: failure taken for success ------------------------------------------------------------------------


@one_group_and_two
def test_a_chunk_that_is_gone_between_lookup_and_load_is_computed(
    build: Build, monkeypatch: pytest.MonkeyPatch, window_tokens: int | None
) -> None:
    # vLLM #39732, as it can happen in host memory: there is no other record to delete.
    harness = build(window_tokens=window_tokens)
    run(harness, "first", PROMPT)
    harness.scheduler.reset_prefix_cache()
    deciding, found = harness.connector._deciding, []

    def find_and_lose(*arguments: Any) -> tuple[int | None, bool]:
        found.append(find(*arguments))
        if found[-1][0]:
            deciding._manager._evict(3)
        return found[-1]

    find = deciding.get_num_new_matched_tokens
    monkeypatch.setattr(deciding, "get_num_new_matched_tokens", find_and_lose)
    run(harness, "again", PROMPT)
    assert [answer for answer in found if answer[0]] == [(28, True)], "and it is offered once"
    assert harness.errors == []
    assert harness.counted.data["failed_load_requests|"] == 1
    assert hit_tokens(harness) == 0


@one_group_and_two
def test_who_shares_a_prefix_whose_load_fails_runs_when_it_was_recomputed(
    build: Build, window_tokens: int | None
) -> None:
    # vLLM #49250
    harness = build(window_tokens=window_tokens, num_blocks=65, host_pages=16)
    run(harness, "first", PROMPT)
    push_out(harness)
    harness.scheduler.reset_prefix_cache()
    prompts = {"loads": PROMPT, "shares": [*PROMPT[:28], 9, 8]}
    for name, prompt in prompts.items():
        harness.add(name, prompt, 4)
    for _ in range(3):
        harness.step()
    assert len(harness.load.held) == 1
    assert harness.outputs["shares"] == []
    harness.load.fail()
    harness.drain()
    assert harness.errors == []
    for name, prompt in prompts.items():
        assert harness.outputs[name] == PatternModel.answer(prompt, 4)


@one_group_and_two
def test_a_load_that_fails_ends_as_a_recomputation_and_not_as_an_error(
    build: Build, window_tokens: int | None
) -> None:
    harness = build(window_tokens=window_tokens)
    run(harness, "first", PROMPT)
    harness.scheduler.reset_prefix_cache()
    harness.add("again", PROMPT, 4)
    harness.step()
    harness.load.fail()
    harness.drain()
    assert harness.errors == []
    assert harness.outputs["again"] == PatternModel.answer(PROMPT, 4)


@one_group_and_two
def test_a_load_that_is_late_ends_as_a_recomputation_and_not_as_an_error(
    build: Build, monkeypatch: pytest.MonkeyPatch, window_tokens: int | None
) -> None:
    monkeypatch.setattr(quarantine, "GRACE_S", 0.0)
    harness = build(window_tokens=window_tokens, transfer_deadline_s=0.05)
    run(harness, "first", PROMPT)
    harness.scheduler.reset_prefix_cache()
    harness.add("again", PROMPT, 4)
    harness.step()
    assert len(harness.load.held) == 1
    time.sleep(0.06)
    for _ in range(12):
        harness.step()
    assert harness.outputs["again"] == PatternModel.answer(PROMPT, 4)
    assert harness.errors == []
    harness.drain()


# -- F9: ranks that disagree ------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(tmp_path: Path, asynchronous: bool) -> Callable[..., HeldRanks]:
    return lambda **arguments: HeldRanks(tmp_path, asynchronous, **arguments)


def begin_a_store(engine: HeldRanks) -> int:
    """Let a request of which both ranks hold the store finish."""
    engine.add("stored", PROMPT, 1)
    for _ in range(3):
        engine.step()
    (job_id,) = engine.stores[0].held
    assert engine.stores[1].held == [job_id]
    return job_id


def test_source_blocks_are_not_free_before_the_last_rank_has_copied_them(
    two_ranks: Callable[..., HeldRanks],
) -> None:
    # tpu-inference #3152
    engine = two_ranks(num_blocks=11)
    job_id = begin_a_store(engine)
    engine.stores[0].finish()
    for _ in range(2):
        engine.step()
    engine.add("next", OTHERS[0], 1)
    for _ in range(3):
        engine.step()
    assert engine.stores[1].waited == [job_id], "whose blocks are about to be written"
    engine.settle()
    assert engine.outputs["next"] == PatternModel.answer(OTHERS[0], 1)
    engine.scheduler.reset_prefix_cache()
    engine.add("again", PROMPT, 1)
    engine.settle()
    assert hit_tokens(engine) == 28


def test_a_store_that_one_rank_could_not_make_is_none_and_nobody_waits_for_it(
    two_ranks: Callable[..., HeldRanks],
) -> None:
    # SGLang #30760
    engine = two_ranks(num_blocks=65)
    begin_a_store(engine)
    engine.stores[1].fail()
    for _ in range(2):
        engine.step()
    engine.add("beside", OTHERS[0], 2)
    for _ in range(5):
        engine.step()
    assert engine.outputs["beside"] == PatternModel.answer(OTHERS[0], 2)
    engine.stores[0].finish()
    for _ in range(3):
        engine.step()
    assert stored(engine) == 0
    engine.scheduler.reset_prefix_cache()
    engine.add("again", PROMPT, 1)
    engine.settle()
    assert engine.outputs["again"] == PatternModel.answer(PROMPT, 1)


def test_a_load_that_one_rank_could_not_make_is_computed_on_all(two_ranks: Callable[..., HeldRanks]) -> None:
    # SGLang #30760
    engine = two_ranks(num_blocks=65)
    engine.add("first", PROMPT, 1)
    engine.settle()
    engine.scheduler.reset_prefix_cache()
    engine.add("again", PROMPT, 4)
    engine.add("beside", OTHERS[0], 2)
    engine.step()
    engine.loads[0].finish()
    for _ in range(5):
        engine.step()
    assert engine.outputs["beside"] == PatternModel.answer(OTHERS[0], 2)
    assert engine.outputs["again"] == [], "the other rank has not brought its part"
    engine.loads[1].fail()
    engine.settle()
    assert engine.outputs["again"] == PatternModel.answer(PROMPT, 4)
    assert engine.errors == []


def test_where_one_rank_was_given_less_memory_all_use_what_it_has(
    two_ranks: Callable[..., HeldRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLang #30760
    pools, build_pool = [], HostPool.__init__

    def build_less(pool: HostPool, *arguments: Any) -> None:
        build_pool(pool, *arguments)
        pools.append(pool)
        pool._ready_slots = (20, 5)[len(pools) - 1]

    monkeypatch.setattr(HostPool, "__init__", build_less)
    engine = two_ranks()
    assert engine.connector._deciding._manager.capacity == 5
    for name in ("first", "again"):
        engine.scheduler.reset_prefix_cache()
        engine.add(name, PROMPT, 1)
        engine.settle()
    assert hit_tokens(engine) == 20


def test_the_second_answer_of_a_rank_changes_nothing(two_ranks: Callable[..., HeldRanks]) -> None:
    engine = two_ranks()
    job_id = begin_a_store(engine)
    for results in ({0: DONE}, {0: FAILED}, {0: DONE}):
        engine.answer(job_id, results)
        assert stored(engine) == 0, "the other rank has not answered"
    engine.settle()
    assert stored(engine) == 7


def test_an_answer_for_a_job_that_has_ended_changes_nothing(two_ranks: Callable[..., HeldRanks]) -> None:
    engine = two_ranks()
    job_id = begin_a_store(engine)
    engine.settle()
    for results in ({0: FAILED}, {0: FAILED, 1: FAILED}, {0: DONE}):
        engine.answer(job_id, results)
        engine.check()
    engine.answer(job_id + 1, {0: DONE, 1: DONE})  # never planned
    assert stored(engine) == 7
    engine.settle()


def test_an_answer_of_a_forgotten_generation_changes_nothing(two_ranks: Callable[..., HeldRanks]) -> None:
    engine = two_ranks()
    job_id = begin_a_store(engine)
    assert engine.connector.reset_cache()
    engine.answer(job_id, {0: DONE, 1: DONE})
    assert stored(engine) == 0
    engine.settle()
    assert stored(engine) == engine.connector._deciding._manager.used_count == 0
