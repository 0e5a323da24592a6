"""Slots: every one has one owner, and neighbours stay neighbours."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.manager.slots import SlotAllocator


def allocator(capacity: int) -> SlotAllocator:
    slots = SlotAllocator()
    slots.grow(capacity)
    return slots


def test_neighbouring_slots_for_neighbouring_chunks() -> None:
    slots = allocator(16)
    first = slots.allocate(4)
    assert first == [0, 1, 2, 3]
    assert slots.allocate(2, after=3) == [4, 5]
    slots.free([1, 2])
    assert slots.allocate(3, after=5) == [6, 7, 8], "a run that fits before a hole that does not"
    assert slots.allocate(2) == [1, 2], "a hole that fits before the long run"


def test_what_is_scattered_is_taken_in_as_few_runs_as_there_are() -> None:
    slots = allocator(10)
    slots.allocate(10)
    slots.free([0, 1, 2, 5, 6, 9])
    assert slots.allocate(5) == [0, 1, 2, 5, 6]
    assert slots.runs() == [(9, 1)]


def test_growing_joins_the_free_end() -> None:
    slots = allocator(4)
    slots.allocate(2)
    slots.grow(8)
    slots.grow(6)
    assert (slots.capacity, slots.runs()) == (8, [(2, 6)])


def test_more_than_is_free_is_refused() -> None:
    slots = allocator(2)
    with pytest.raises(ValueError, match="3 slots asked for, 2 free"):
        slots.allocate(3)


@given(seed=st.integers(0, 2**32))
def test_any_order_of_taking_and_giving_back_keeps_the_books(seed: int) -> None:
    chance, slots, owned = random.Random(seed), allocator(40), []
    for _ in range(60):
        if owned and chance.random() < 0.45:
            held = owned.pop(chance.randrange(len(owned)))
            chance.shuffle(held)
            slots.free(held)
        elif slots.free_count:
            after = chance.choice(owned)[-1] if owned and chance.random() < 0.5 else None
            owned.append(slots.allocate(chance.randint(1, min(6, slots.free_count)), after))
        taken = [slot for held in owned for slot in held]
        free = [start + i for start, count in slots.runs() for i in range(count)]
        assert sorted(taken + free) == list(range(40))
        assert slots.free_count == len(free)
        assert all(a + n < b for (a, n), (b, _) in zip(slots.runs(), slots.runs()[1:], strict=False))
