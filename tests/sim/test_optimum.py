"""The optimum, against every way to keep blocks there is, and against Belady's rule told block by block."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from traced import Prompt, blocks_of, leading, prompts, traced

from kvtide.sim.optimum import NextUses, optimum, unbounded

NEVER = 1 << 30


def most_hits(trace: list[Prompt], capacity: int) -> int:
    """Try everything a cache could keep after each request, closed or not."""
    best: dict[frozenset[Prompt], int] = {frozenset(): 0}
    for prompt in trace:
        after: dict[frozenset[Prompt], int] = {}
        for held, hits_before in best.items():
            hits = hits_before + leading(prompt, set(held))
            offered = sorted(held | set(blocks_of(prompt)))
            for size in range(min(capacity, len(offered)) + 1):
                for kept in map(frozenset, combinations(offered, size)):
                    after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


def belady(trace: list[Prompt], capacity: int) -> tuple[int, int, int, list[set[Prompt]]]:
    """Keep what is used soonest, of two the less deep; hits, writes, departures and what was held when."""
    held: set[Prompt] = set()
    hits = stored = evicted = 0
    states = []
    for now, prompt in enumerate(trace):
        hits += leading(prompt, held)

        def urgency(block: Prompt, now: int = now) -> tuple[int, int]:
            users = (at for at in range(now + 1, len(trace)) if trace[at][: len(block)] == block)
            return next(users, NEVER), len(block)

        ranked = sorted(held | set(blocks_of(prompt)), key=urgency)
        kept = {block for block in ranked[:capacity] if urgency(block)[0] < NEVER}
        stored += len(kept - held)
        evicted += len(held - kept)
        held = kept
        states.append(held)
    return hits, stored, evicted, states


@given(trace=prompts(tokens=2, longest=3, most=5), capacity=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_nothing_that_a_cache_could_keep_hits_more(trace: list[Prompt], capacity: int) -> None:
    assert optimum(NextUses(traced(trace)), capacity).hit_count == most_hits(trace, capacity)


@given(trace=prompts(tokens=3, longest=9, most=40), capacity=st.integers(0, 30))
@settings(max_examples=80, deadline=None)
def test_hits_and_writes_are_those_of_belady_s_rule(trace: list[Prompt], capacity: int) -> None:
    found = optimum(NextUses(traced(trace)), capacity)
    hits, stored, evicted, states = belady(trace, capacity)
    assert (found.hit_count, found.stored_count, found.evicted_count) == (hits, stored, evicted)
    assert found.access_count == sum(map(len, trace))
    assert all(block[:-1] in held for held in states for block in held if len(block) > 1), "closed"


@given(trace=prompts(tokens=3, longest=6, most=20))
@settings(max_examples=30, deadline=None)
def test_with_room_for_everything_the_optimum_is_the_unbounded_cache(trace: list[Prompt]) -> None:
    accesses = traced(trace)
    everything = unbounded(accesses)
    assert optimum(NextUses(accesses), accesses.unique_count).hit_count == everything.hit_count
    seen: set[Prompt] = set()
    hits = 0
    for prompt in trace:
        hits += leading(prompt, seen)
        seen |= set(blocks_of(prompt))
    assert everything.hit_count == hits
    assert everything.stored_count == len(seen)


def test_what_is_used_last_is_not_even_stored() -> None:
    trace = [(1,), (2,), (3,), (1,), (2,), (3,)]
    found = optimum(NextUses(traced(trace)), 1)
    assert (found.hit_count, found.stored_count) == (1, 1)


def test_a_trace_without_a_full_block_hits_nothing() -> None:
    for trace in ([], [()], [(), ()]):
        accesses = traced(trace)
        assert optimum(NextUses(accesses), 4).hit_ratio == 0
        assert unbounded(accesses).hit_ratio == 0
