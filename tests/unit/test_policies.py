"""LRU against the obvious list."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvtide.policies import LRUPolicy


def test_nobody_offered_means_no_victim() -> None:
    policy = LRUPolicy()
    policy.touched([1, 2])
    assert policy.victim() is None


def test_a_withdrawn_chunk_is_no_victim_and_comes_back_with_its_recency() -> None:
    policy = LRUPolicy()
    for chunk in (1, 2):
        policy.touched([chunk])
        policy.offer(chunk)
    policy.withdraw(1)
    assert policy.victim() == 2
    policy.offer(1)
    assert policy.victim() == 1


def test_an_id_that_comes_back_for_another_chunk_starts_anew() -> None:
    policy = LRUPolicy()
    policy.touched([1])
    policy.offer(1)
    policy.forget(1)
    assert policy.victim() is None
    policy.touched([2])
    policy.offer(2)
    policy.touched([1])
    policy.offer(1)
    assert policy.victim() == 2


@given(seed=st.integers(0, 2**32))
def test_the_victim_is_the_offered_chunk_touched_longest_ago(seed: int) -> None:
    chance, policy = random.Random(seed), LRUPolicy()
    order: list[int] = []
    offered: set[int] = set()
    for _ in range(120):
        chunk = chance.randrange(12)
        action = chance.choice(("touch", "touch", "offer", "offer", "withdraw", "forget", "evict"))
        if action == "touch":
            policy.touched([chunk])
            order = [other for other in order if other != chunk] + [chunk]
        elif action == "offer" and chunk in order:
            policy.offer(chunk)
            offered.add(chunk)
        elif action == "withdraw":
            policy.withdraw(chunk)
            offered.discard(chunk)
        elif action == "forget":
            policy.forget(chunk)
            offered.discard(chunk)
            order = [other for other in order if other != chunk]
        expected = next((other for other in order if other in offered), None)
        assert policy.victim() == expected
        if action == "evict" and expected is not None:
            policy.forget(expected)
            offered.discard(expected)
            order.remove(expected)
