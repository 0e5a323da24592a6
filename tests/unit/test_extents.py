"""Extents: every number has one owner, neighbours stay neighbours, and what grows is left some room."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.manager.extents import Extent, ExtentAllocator


def allocator(capacity: int, reserve: int = 0, reserve_share: int = 64) -> ExtentAllocator:
    extents = ExtentAllocator(reserve, reserve_share)
    extents.grow(capacity)
    return extents


def numbers_of(extents: list[Extent]) -> list[int]:
    return [start + i for start, count in extents for i in range(count)]


def test_neighbouring_numbers_for_neighbouring_chunks() -> None:
    extents = allocator(16)
    assert extents.allocate(4) == [(0, 4)]
    assert extents.allocate(2, after=3) == [(4, 2)]
    extents.free(1, 2)
    assert extents.allocate(3, after=5) == [(6, 3)], "behind the run, before a hole that is too small"
    assert extents.allocate(2) == [(1, 2)], "a hole that fits before the long extent"


def test_nothing_is_nothing() -> None:
    extents = allocator(4)
    assert extents.allocate(0) == []
    extents.free_all(np.empty(0, dtype=np.int32))
    assert (extents.free_count, extents.extents()) == (4, [(0, 4)])


def test_nothing_more_behind_a_run_is_nothing() -> None:
    extents = allocator(8, reserve=2, reserve_share=2)
    extents.allocate(3)
    assert extents.allocate(0, after=2) == []
    assert extents.free_count == 5


def test_an_allocator_without_numbers_has_none() -> None:
    extents = ExtentAllocator()
    assert (extents.capacity, extents.free_count, extents.longest, extents.extents()) == (0, 0, 0, [])
    assert extents.allocate(0) == []
    with pytest.raises(ValueError, match="1 asked for, 0 free"):
        extents.allocate(1)


def test_what_is_scattered_is_taken_in_as_few_extents_as_there_are() -> None:
    extents = allocator(10)
    extents.allocate(10)
    extents.free_all(np.array([9, 0, 6, 2, 5, 1], dtype=np.int32))
    assert extents.extents() == [(0, 3), (5, 2), (9, 1)]
    assert len(extents.allocate(5)) == 2
    assert extents.extents() == [(9, 1)]


def test_a_hole_between_others_joins_both() -> None:
    extents = allocator(9)
    extents.allocate(9)
    extents.free(0, 3)
    extents.free(6, 3)
    extents.free(3, 3)
    assert extents.extents() == [(0, 9)]
    assert extents.longest == 8, "half of the truth at worst"


def test_numbers_given_back_in_any_order_join() -> None:
    extents = allocator(64)
    extents.allocate(64)
    extents.free_all(np.random.default_rng(0).permutation(64).astype(np.int32))
    assert extents.extents() == [(0, 64)]


def test_growing_joins_the_free_end_and_never_shrinks() -> None:
    extents = allocator(4)
    extents.allocate(2)
    extents.grow(8)
    extents.grow(6)
    assert (extents.capacity, extents.extents(), extents.free_count) == (8, [(2, 6)], 6)


def test_more_than_is_free_is_refused_and_nothing_is_taken() -> None:
    extents = allocator(2)
    with pytest.raises(ValueError, match="3 asked for, 2 free"):
        extents.allocate(3)
    assert extents.extents() == [(0, 2)]


def test_beginning_anew_frees_all_but_what_is_taken() -> None:
    extents = allocator(12, reserve=2, reserve_share=2)
    extents.allocate(3)
    extents.clear(np.array([11, 4, 0, 5], dtype=np.int32))
    assert (extents.capacity, extents.free_count) == (12, 8)
    assert extents.extents() == [(1, 3), (6, 5)]
    extents.clear(np.empty(0, dtype=np.int32))
    assert extents.extents() == [(0, 12)]
    extents.clear(np.arange(12, dtype=np.int32))
    assert (extents.free_count, extents.extents()) == (0, [])
    extents.free(3, 2)
    assert extents.extents() == [(3, 2)]


# -- what is kept behind runs that grow ----------------------------------------------------------------


def test_runs_that_grow_in_turn_stay_in_one_piece_each() -> None:
    extents = allocator(256, reserve=8, reserve_share=2)
    lasts = []
    for _ in range(4):
        ((start, count),) = extents.allocate(4)
        lasts += [extents.allocate(1, after=start + count - 1)[0][0]]
    for step in range(8):
        for start in lasts:
            last = start + step
            given = extents.allocate(1, after=last)
            assert given == [(last + 1, 1)], f"run of {start}, chunk {last + 1}"


def test_without_a_reserve_they_shred_each_other() -> None:
    extents = allocator(256)
    first, second = extents.allocate(4), extents.allocate(4)
    assert second == [(4, 4)]
    assert extents.allocate(1, after=first[0][1] - 1) != [(4, 1)]


def grown(extents: ExtentAllocator, count: int) -> None:
    """Take a run that has grown by its last number: what is behind it is kept."""
    ((start, _),) = extents.allocate(count - 1)
    extents.allocate(1, after=start + count - 2)


def test_nothing_is_kept_behind_a_run_that_does_not_grow() -> None:
    extents = allocator(64, reserve=4, reserve_share=4)
    extents.allocate(4)
    assert extents.extents() == [(4, 60)]


def test_what_is_kept_is_free_and_is_not_given_to_others_while_there_is_more() -> None:
    extents = allocator(64, reserve=4, reserve_share=4)
    grown(extents, 4)
    assert extents.free_count == 60
    assert extents.extents() == [(4, 4), (8, 56)], "kept behind the run, one extent of its own"
    assert extents.allocate(8) == [(8, 8)]
    assert extents.allocate(4, after=3) == [(4, 4)], "for the one it was kept for"


def test_what_is_kept_is_given_up_before_anybody_is_refused_oldest_first() -> None:
    extents = allocator(32, reserve=4, reserve_share=4)
    grown(extents, 4)
    grown(extents, 4)
    assert extents.extents() == [(4, 4), (12, 4), (16, 16)]
    extents.allocate(16)
    assert numbers_of(extents.allocate(2)) == [4, 5], "what was kept longest"
    assert extents.free_count == 6
    assert len(numbers_of(extents.allocate(6))) == 6
    with pytest.raises(ValueError, match="1 asked for, 0 free"):
        extents.allocate(1)


@pytest.mark.parametrize("share", [2, 4, 64])
def test_only_a_share_of_all_numbers_is_kept(share: int) -> None:
    extents = allocator(512, reserve=16, reserve_share=share)
    for _ in range(100):
        grown(extents, 2)
        assert extents._reserved_count * share <= 512


def test_a_pool_smaller_than_the_share_keeps_nothing() -> None:
    extents = allocator(63, reserve=32)
    grown(extents, 4)
    assert extents.extents() == [(4, 59)]


def test_a_run_that_is_freed_does_not_swallow_what_is_kept_behind_it_twice() -> None:
    extents = allocator(64, reserve=4, reserve_share=4)
    grown(extents, 4)
    extents.free(0, 4)
    assert extents.free_count == 64
    assert sorted(numbers_of(extents.extents())) == list(range(64))
    assert sorted(numbers_of(extents.allocate(64))) == list(range(64))


def test_what_a_call_has_taken_itself_does_not_count_as_free() -> None:
    extents = allocator(8, reserve=2, reserve_share=2)
    grown(extents, 2)
    extents.allocate(4)
    extents.free(7, 1)
    assert extents.extents() == [(2, 2), (7, 1)]
    assert extents.allocate(2, after=6) == [(7, 1), (2, 1)], "behind the run, and what was kept for another"
    assert extents.allocate(1) == [(3, 1)]


@pytest.mark.parametrize("seed", range(6))
def test_numbers_given_back_in_pieces_in_any_order_are_what_one_by_one_would_be(seed: int) -> None:
    chance = random.Random(seed)
    whole, single = allocator(4000), allocator(4000)
    for one in (whole, single):
        one.allocate(4000)
    bounds = sorted(chance.sample(range(4000), 60))
    pieces = [list(range(a, b)) for a, b in itertools.pairwise(bounds) if chance.random() < 0.7]
    chance.shuffle(pieces)
    numbers = [one for piece in pieces for one in (reversed(piece) if chance.random() < 0.3 else piece)]
    whole.free_all(np.array(numbers, dtype=np.int32))
    for number in numbers:
        single.free(number, 1)
    assert whole.extents() == single.extents()
    assert whole.free_count == single.free_count == len(numbers)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(1, 60),
    reserve=st.integers(0, 6),
    share=st.sampled_from((1, 2, 8, 64)),
)
def test_any_order_of_taking_and_giving_back_keeps_the_books(seed, capacity, reserve, share) -> None:
    chance, extents = random.Random(seed), allocator(capacity, reserve, share)
    owned: list[list[int]] = []
    for _ in range(60):
        action = chance.random()
        if owned and action < 0.4:
            held = owned.pop(chance.randrange(len(owned)))
            if chance.random() < 0.3 and len(held) > 1:  # the end of it alone, as eviction does
                cut = chance.randrange(1, len(held))
                owned.append(held[:cut])
                held = held[cut:]
            chance.shuffle(held)
            extents.free_all(np.array(held, dtype=np.int32))
        elif action < 0.45:
            capacity += chance.randint(0, 9)
            extents.grow(capacity)
        elif action < 0.48:
            chance.shuffle(owned)
            owned = owned[: len(owned) // 2]
            extents.clear(np.array([one for held in owned for one in held], dtype=np.int32))
        elif extents.free_count:
            after = chance.choice(owned)[-1] if owned and chance.random() < 0.6 else None
            count = chance.randint(1, min(9, extents.free_count))
            behind = after is not None and after + 1 in numbers_of(extents.extents())
            given = extents.allocate(count, after)
            assert len(numbers_of(given)) == count
            assert not behind or given[0][0] == after + 1, "a neighbour that is free comes first"
            owned.append(numbers_of(given))
        taken = [one for held in owned for one in held]
        free = numbers_of(extents.extents())
        assert sorted(taken + free) == list(range(capacity)), "every number has one owner"
        assert extents.free_count == len(free)
        assert extents.capacity == capacity
        kept = set(extents._reserved)
        loose = [(a, n) for a, n in extents.extents() if a not in kept]
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(loose)), "neighbours are joined"
        if free:
            longest = max((count for _, count in loose), default=0)
            assert extents.longest <= longest < 2 * extents.longest or not longest
    assert sorted(numbers_of(extents.allocate(extents.free_count))) == sorted(free), "all of it can be had"
