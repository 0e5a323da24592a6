"""The catalog in any order of calls, against dicts: several groups, two tiers, one of them out of service."""

import random
from collections.abc import Sequence

import pytest
from naive_catalog import FULL, GROUPS, HALF, QUARTER, Pair, left, prompt

from kvtide.manager.catalog import ABSENT, CatalogGroup
from kvtide.policies import ARCPolicy, EvictionPolicy, LRUPolicy


def walk(
    seed: int,
    groups: Sequence[CatalogGroup],
    policies: Sequence[EvictionPolicy | None],
    pins: bool = True,
    losses: float = 0.0,
) -> None:
    chance, pair = random.Random(seed), Pair(groups, policies)
    alphabet, depth = chance.choice((1, 2, 3)), chance.choice((4, 8, 16))
    prompts, handles = [[0] * 4], []
    for policy in policies:
        if policy is not None:
            policy.resize(chance.choice((4, 12, 30)))
    for _ in range(60):
        if chance.random() < 0.4:
            old = chance.choice(prompts)
            prompts.append(
                (old[: chance.randint(0, len(old))] + [chance.randrange(alphabet) for _ in range(depth)])[:24]
            )
            prompts = prompts[-6:]
        tokens = chance.choice(prompts)
        keys = prompt(*tokens[: chance.randint(1, len(tokens))])
        tier, group = chance.randrange(len(policies)), chance.randrange(len(groups))
        shape, visit = groups[group], chance.randrange(4)
        chunks = len(keys) // shape.stride
        action = chance.random()
        if chance.random() < losses:
            lower = chance.randrange(1, len(policies))
            if chunks and chance.random() < 0.9:
                pair.lose(lower, group, keys, chance.randrange(chunks))
            else:
                pair.clear()  # handles of before mean nothing
        elif action < 0.45 and chunks:
            naive = pair.naive
            if shape.window is None:
                start = naive.resident(group, keys, 0, chunks, tier)
                if not start and not losses and chance.random() < 0.3:
                    # What other tiers hold need not be here as well. Where tiers lose chunks each is closed
                    # by itself: a tier that was relied on before the first loss is not looked at again.
                    start = min(
                        chunks,
                        max(naive.resident(group, keys, 0, chunks, other) for other in naive.tiers),
                    )
            else:
                start = chance.randrange(chunks)
            count = 0
            while start + count < chunks and not naive.has([tier], group, keys, start + count):
                count += 1
            if count:
                pair.insert(tier, group, keys, start, chance.randint(1, count), visit)
        elif action < 0.6:
            pair.touch(keys, chance.randint(0, len(keys)), visit)
        elif action < 0.8 and policies[tier] is not None:
            pair.evict(tier, chance.choice((1, 1, 1, 2, 5, 50)))
        elif action < 0.88 and pins:
            handles.append(pair.pin(keys, chance.randint(0, len(keys))))
        elif action < 0.96 and handles:
            pair.unpin(handles.pop(chance.randrange(len(handles))))
        elif len(policies) > 1:
            masked = chance.randrange(len(policies))
            pair.naive.in_service[masked] = not pair.naive.in_service[masked]
            pair.catalog.mask(masked, pair.naive.in_service[masked])
        pair.check(keys)
    for handle in handles:
        pair.unpin(handle)
    assert not pair.catalog.pin_count
    for tier, policy in enumerate(policies):
        if policy is not None:
            pair.evict(tier, 1000)
            # With more tiers, what another one relies on stays.
            assert len(policies) > 1 or not pair.catalog.all_slots(tier)
    pair.check(keys)


TIERS = {
    "LRU": (LRUPolicy,),
    "ARC": (ARCPolicy,),
    "LRU and a tier of its own": (LRUPolicy, None),
    "ARC and a tier of its own": (ARCPolicy, None),
    "LRU, LRU": (LRUPolicy, LRUPolicy),
    "ARC, LRU": (ARCPolicy, LRUPolicy),
    "ARC, ARC": (ARCPolicy, ARCPolicy),
}


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("tiers", TIERS)
def test_any_order_of_calls_agrees_with_dicts(groups, tiers: str) -> None:
    for seed in range(8):
        try:
            walk(seed, groups, [None if policy is None else policy() for policy in TIERS[tiers]])
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("tiers", [name for name in TIERS if len(TIERS[name]) > 1])
def test_any_order_of_calls_agrees_with_dicts_where_tiers_lose_chunks_and_all_is_forgotten(
    groups, tiers: str
) -> None:
    for seed in range(1000, 1006):
        try:
            policies = [None if policy is None else policy() for policy in TIERS[tiers]]
            walk(seed, groups, policies, losses=0.15)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


CHAIN = prompt(*range(30))


def test_a_chunk_is_named_and_found_in_the_tier_that_holds_it() -> None:
    pair = Pair((FULL,), [LRUPolicy(), None])
    pair.insert(0, 0, CHAIN, 0, 4)
    pair.insert(1, 0, CHAIN, 0, 8)
    assert [pair.catalog.resident(0, CHAIN, 0, 30, tier) for tier in (None, 0, 1)] == [8, 4, 8]
    pair.catalog.mask(1, False)
    assert [pair.catalog.resident(0, CHAIN, 0, 30, tier) for tier in (None, 0, 1)] == [4, 4, 8]
    pair.catalog.mask(0, False)
    assert pair.catalog.resident(0, CHAIN, 0, 30) == 0
    assert pair.catalog.restore_point(CHAIN, 30) == 0
    pair.catalog.mask(0, True)
    pair.catalog.mask(1, True)
    assert pair.catalog.restore_point(CHAIN, 30) == 8
    pair.check(CHAIN)


def test_a_pin_keeps_a_prefix_in_every_tier_that_holds_a_part_of_it() -> None:
    pair = Pair((FULL,), [LRUPolicy(), None])
    pair.insert(0, 0, CHAIN, 0, 4)
    pair.insert(1, 0, CHAIN, 0, 8)
    handle = pair.pin(CHAIN, 8)
    assert pair.evict(0, 100) == []
    pair.unpin(handle)
    assert len(pair.evict(0, 100)) == 4
    pair.check(CHAIN)


def test_what_another_tier_relies_on_stays_until_somebody_else_holds_it() -> None:
    pair = Pair((FULL,), [LRUPolicy(), None])
    pair.insert(0, 0, CHAIN, 0, 4)
    pair.insert(1, 0, CHAIN, 4, 4)
    assert pair.evict(0, 100) == []
    assert pair.catalog.resident(0, CHAIN, 0, 30) == 8
    pair.insert(1, 0, CHAIN, 0, 4)
    assert len(pair.evict(0, 100)) == 4
    assert pair.catalog.resident(0, CHAIN, 0, 30) == 8
    pair.check(CHAIN)


def test_what_nobody_knows_is_not_pinned() -> None:
    pair = Pair((FULL,), [LRUPolicy()])
    pair.insert(0, 0, CHAIN, 0, 4)
    with pytest.raises(ValueError, match="4 of 5 positions are known"):
        pair.catalog.pin(CHAIN, 5)
    assert pair.catalog.pin_count == 0
    pair.unpin(pair.catalog.pin(CHAIN, 0))
    pair.unpin(12345)
    pair.check(CHAIN)


def test_holes_of_a_window_have_no_slots_and_leave_no_names() -> None:
    pair = Pair((CatalogGroup(1, window=2),), [LRUPolicy()])
    pair.insert(0, 0, CHAIN, 4, 3)
    assert pair.catalog.slots(0, 0, CHAIN, 2, 7).tolist() == [ABSENT, ABSENT, 0, 1, 2]
    assert [pair.catalog.restore_point(CHAIN, stop) for stop in (4, 5, 6, 7, 8)] == [0, 0, 6, 7, 7]
    assert [slot for _, _, slot in pair.evict(0, 100)] == [2, 1, 0]
    pair.check(CHAIN)


def test_a_reader_starts_where_every_group_can() -> None:
    groups = (FULL, CatalogGroup(4, window=1))
    pair = Pair(groups, [LRUPolicy()])
    pair.insert(0, 0, CHAIN, 0, 11)
    assert pair.catalog.restore_point(CHAIN, 30) == 0
    pair.insert(0, 1, CHAIN, 1, 1)
    assert [pair.catalog.restore_point(CHAIN, stop) for stop in (7, 8, 11, 30)] == [0, 8, 8, 8]
    pair.insert(0, 1, CHAIN, 2, 1)
    assert pair.catalog.restore_point(CHAIN, 30) == 8, "the twelfth position of the other group is missing"
    pair.insert(0, 0, CHAIN, 11, 1)
    assert pair.catalog.restore_point(CHAIN, 30) == 12
    pair.check(CHAIN)


def test_a_coarse_chunk_lies_with_its_last_position_on_either_side_of_a_branch() -> None:
    pair = Pair((FULL, QUARTER), [LRUPolicy()])
    pair.insert(0, 0, CHAIN, 0, 8)
    pair.insert(0, 1, CHAIN, 0, 2)
    branch = [*CHAIN[:6], *prompt(*range(6), 99, 98, 97, 96, 95, 94)[6:]]
    pair.insert(0, 0, branch, 6, 6)
    pair.insert(0, 1, branch, 1, 2)
    for keys in (CHAIN, branch):
        pair.check(keys)
    assert pair.catalog.resident(1, CHAIN, 0, 2) == 2
    assert pair.catalog.resident(1, branch, 0, 3) == 3
    pair.evict(0, 5)
    pair.evict(0, 100)
    pair.check(branch)


def test_the_second_tier_keeps_what_the_first_has_let_go() -> None:
    pair = Pair((FULL,), [ARCPolicy(), None])
    pair.insert(0, 0, CHAIN, 0, 6)
    pair.insert(1, 0, CHAIN, 0, 6)
    assert len(pair.evict(0, 4)) == 4
    assert [pair.catalog.resident(0, CHAIN, 0, 30, tier) for tier in (None, 0, 1)] == [6, 2, 6]
    pair.insert(0, 0, CHAIN, 2, 2)
    assert pair.catalog.resident(0, CHAIN, 0, 30, 0) == 4
    pair.check(CHAIN)


def test_a_run_limit_ends_an_eviction_early_and_the_next_goes_on() -> None:
    pair = Pair((FULL,), [LRUPolicy()])
    for name in range(6):
        pair.insert(0, 0, prompt(50 + name), 0, 1)
    first = pair.catalog.evict(0, 5, 2)
    assert (first.count, first.run_count) == (2, 2)
    second = pair.catalog.evict(0, 3, 100)
    names = [name for gone in (first, second) for _, name, _ in left(gone)]
    assert names == [prompt(50 + name)[0] for name in range(5)]
    pair.catalog.check_invariants()


def test_nodes_that_are_used_again_begin_with_nothing() -> None:
    pair = Pair((FULL, HALF), [LRUPolicy(), None])
    for round_number in range(8):
        keys = prompt(*([round_number] * 9))
        pair.insert(0, 0, keys, 0, 9)
        pair.insert(0, 1, keys, 0, 4)
        handle = pair.pin(keys, 5)
        pair.evict(0, 3)
        pair.unpin(handle)
        pair.evict(0, 100)
        assert pair.catalog.tree.node_count == 0
        assert pair.catalog.tree.entry_count == 0
        pair.check(keys)
