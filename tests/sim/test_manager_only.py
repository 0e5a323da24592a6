"""The production host tier on a trace, held against LRU told block by block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced import NaiveLRU, Prompt, prompts, traced

from kvtide.errors import KVTideError
from kvtide.manager.cpu import RUNS_PER_STEP
from kvtide.sim.accesses import accesses_of
from kvtide.sim.manager_only import manager_of, managers, replay
from kvtide.sim.optimum import NextUses, optimum, unbounded
from kvtide.sim.traces.request import TraceRequest
from kvtide.testing.workloads import chained_hashes


@given(trace=prompts(tokens=3, longest=8, most=40), capacity=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_lru_hits_and_writes_what_lru_over_single_blocks_does(trace: list[Prompt], capacity: int) -> None:
    naive = NaiveLRU(capacity)
    hits = sum(naive.ask(prompt, now) for now, prompt in enumerate(trace))
    manager = manager_of("lru", capacity)
    found = replay(traced(trace), manager)
    assert (found.hit_count, found.stored_count) == (hits, naive.stored)
    assert found.evicted_count == naive.stored - len(naive.used)
    manager.check_invariants(idle=True)


@pytest.mark.parametrize("name", list(managers()))
@given(trace=prompts(tokens=3, longest=8, most=30), capacity=st.integers(0, 30))
@settings(max_examples=20, deadline=None)
def test_nobody_beats_the_optimum_and_the_books_balance(
    name: str, trace: list[Prompt], capacity: int
) -> None:
    accesses = traced(trace)
    manager = manager_of(name, capacity)
    found = replay(accesses, manager)
    assert found.hit_count <= optimum(NextUses(accesses), capacity).hit_count
    assert found.stored_count - found.evicted_count == manager.used_count <= capacity
    manager.check_invariants(idle=True)


def test_with_room_for_everything_lru_is_the_unbounded_cache() -> None:
    accesses = traced([(1, 2, 3), (1, 2, 4), (5,), (1, 2, 3), (1, 2, 3, 6)])
    assert replay(accesses, manager_of("lru", accesses.unique_count)) == unbounded(accesses)


def test_every_slot_holds_a_block_once_there_were_enough() -> None:
    manager = manager_of("lru", 1000)
    replay(traced([(first, *range(40)) for first in range(60)]), manager)
    assert manager.free_count == 0


def test_a_prompt_that_has_more_leave_than_a_step_may_evict_is_stored_as_a_whole() -> None:
    crumbs = 2 * RUNS_PER_STEP + 7
    trace = [*((one,) for one in range(crumbs)), (crumbs, *range(crumbs - 1)), (crumbs, *range(crumbs - 1))]
    assert replay(traced(trace), manager_of("lru", crumbs)).hit_count == crumbs


def test_second_sight_stores_what_a_second_request_asks_for() -> None:
    trace = traced([(1, 2), (3,), (1, 2), (1, 2)])
    found = replay(trace, manager_of("second_sight", 8))
    assert (found.hit_count, found.stored_count) == (2, 2)


def test_requests_are_counted_as_they_pass() -> None:
    passed: list[int] = []
    replay(traced([(1,), (), (1, 2)]), manager_of("lru", 2), passed.append)
    assert sum(passed) == 3


def asked(hashes: list[bytes], block_tokens: int = 16) -> TraceRequest:
    return TraceRequest(0.0, hashes, block_tokens, block_tokens * len(hashes))


ONE, TWO, THREE = chained_hashes((1, 2, 3), 8)


@pytest.mark.parametrize(
    "hashes",
    [
        [[ONE, TWO], [THREE, TWO]],
        [[ONE, TWO, THREE], [TWO]],
        [[ONE], [TWO, ONE]],
        [[ONE, TWO, ONE]],
        [[ONE, ONE]],
    ],
)
def test_a_block_with_other_blocks_before_it_is_refused_by_its_place(hashes: list[list[bytes]]) -> None:
    with pytest.raises(KVTideError, match=rf"^block \d of request {len(hashes)} has other blocks before it"):
        accesses_of(map(asked, hashes))


def test_blocks_of_two_sizes_are_refused() -> None:
    with pytest.raises(KVTideError, match="request 3 has blocks of 32 tokens, those before it of 16"):
        accesses_of([asked([ONE]), asked([ONE]), asked([ONE], 32)])


def test_accesses_are_numbered_in_the_order_in_which_blocks_are_first_seen() -> None:
    accesses = traced([(), (1, 2), (1, 3), ()])
    assert accesses.blocks.tolist() == [0, 1, 0, 2]
    assert accesses.starts.tolist() == [0, 0, 2, 4, 4]
    assert (accesses.request_count, accesses.access_count, accesses.unique_count) == (4, 4, 3)
    assert list(accesses.prompts()) == [
        (1.0, chained_hashes((1, 2), 8)),
        (2.0, chained_hashes((1, 3), 8)),
    ]
