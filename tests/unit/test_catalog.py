"""The catalog in any order of calls, against dicts: several groups, two tiers, one of them out of service."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import chained_hashes

from kvtide.keys import PackedKeys, split_offload_key
from kvtide.manager.catalog import ABSENT, Catalog, CatalogGroup, Evicted
from kvtide.policies import ARCPolicy, EvictionPolicy, LRUPolicy

FULL, HALF, QUARTER = CatalogGroup(), CatalogGroup(2), CatalogGroup(4)
GROUPS = [
    (FULL,),
    (HALF,),
    (FULL, HALF, QUARTER),
    (FULL, CatalogGroup(1, window=3)),
    (FULL, CatalogGroup(2, window=1)),
    (QUARTER, CatalogGroup(1, window=2), CatalogGroup(2, window=1)),
    (CatalogGroup(1, window=2),),
    (FULL, CatalogGroup(1, window=3, local=True)),
    (HALF, CatalogGroup(1, window=4, local=True), CatalogGroup(2, window=1)),
]


def prompt(*tokens: int) -> list[bytes]:
    return chained_hashes(tokens, tokens_per_block=1)


def first_needed(group: CatalogGroup, chunk_count: int) -> int:
    """A reader who continues after so many chunks looks back to this one."""
    if group.window is None:
        return 0
    if group.local:
        return chunk_count // group.window * group.window
    return max(0, chunk_count - group.window)


class NaiveCatalog:
    """Slots by tier, group and hash; per tier the positions of anything, the least recently used in front."""

    def __init__(self, groups: Sequence[CatalogGroup], tiers: int) -> None:
        self.groups, self.tiers = groups, range(tiers)
        self.slot: list[list[dict[bytes, int]]] = [[{} for _ in groups] for _ in self.tiers]
        self.recency: list[list[bytes]] = [[] for _ in self.tiers]
        self.in_service = [True] * tiers
        self.pins: dict[int, list[list[bytes]]] = {}  # handle -> per tier, what must stay there
        self.pinned: dict[int, list[bytes]] = {}  # handle -> what was known then, and may stay if it comes
        self.parent: dict[bytes, bytes | None] = {}

    def chunk(self, group: int, keys: Sequence[bytes], index: int) -> bytes:
        return keys[(index + 1) * self.groups[group].stride - 1]

    def insert(self, tier: int, group: int, keys: Sequence[bytes], start: int, slots: Sequence[int]) -> None:
        for i, slot in enumerate(slots):
            name = self.chunk(group, keys, start + i)
            assert name not in self.slot[tier][group], "the driver stores nothing twice"
            self.slot[tier][group][name] = slot
            if name not in self.recency[tier]:
                self.recency[tier].append(name)
        self.touch(keys, (start + len(slots)) * self.groups[group].stride)

    def touch(self, keys: Sequence[bytes], stop: int) -> None:
        self.parent.update(zip(keys, (None, *keys), strict=False))
        for tier in self.tiers:
            for name in reversed(keys[:stop]):
                if name in self.recency[tier]:
                    self.recency[tier].remove(name)
                    self.recency[tier].append(name)

    def extended(self, tier: int) -> set[bytes]:
        """What is extended by anything that the tier holds, near or far."""
        found: set[bytes | None] = {None}
        for name in self.recency[tier]:
            while (name := self.parent[name]) not in found:
                found.add(name)
        return found - {None}

    def may_leave(self, tier: int, name: bytes) -> bool:
        """Pins aside: what extends it must not lose it, here or in a tier that relies on this one."""
        others = [other for other in self.tiers if other != tier]
        return name not in self.extended(tier) and (
            any(name in self.recency[other] for other in others)
            or not any(name in self.extended(other) for other in others)
        )

    def victim(self, tier: int) -> bytes | None:
        kept = self.kept(tier) | self.may_stay(tier)
        names = (name for name in self.recency[tier] if name not in kept)
        return next((name for name in names if self.may_leave(tier, name)), None)

    def pin(self, handle: int, prefix: Sequence[bytes]) -> None:
        """What a tier holds of the prefix now stays; what comes into its gaps later may."""
        self.pinned[handle] = list(prefix)
        self.pins[handle] = [[name for name in prefix if name in self.recency[tier]] for tier in self.tiers]

    def kept(self, tier: int) -> set[bytes]:
        return {name for pin in self.pins.values() for name in pin[tier]}

    def may_stay(self, tier: int) -> set[bytes]:
        """What came where a pin had found nothing."""
        return {name for prefix in self.pinned.values() for name in prefix if name in self.recency[tier]}

    def drop(self, tier: int, name: bytes) -> list[tuple[int, bytes, int]]:
        self.recency[tier].remove(name)
        rows = enumerate(self.slot[tier])
        return [(group, name, row.pop(name)) for group, row in rows if name in row]

    def has(self, tiers: Sequence[int], group: int, keys: Sequence[bytes], index: int) -> bool:
        return any(self.chunk(group, keys, index) in self.slot[tier][group] for tier in tiers)

    def resident(
        self, group: int, keys: Sequence[bytes], start: int, stop: int, tier: int | None = None
    ) -> int:
        tiers = [t for t in self.tiers if self.in_service[t]] if tier is None else [tier]
        index = start
        while index < stop and self.has(tiers, group, keys, index):
            index += 1
        return index - start

    def restore_point(self, keys: Sequence[bytes], stop: int) -> int:
        tiers = [t for t in self.tiers if self.in_service[t]]
        for point in range(stop, -1, -1):
            if all(
                not point % group.stride
                and all(
                    self.has(tiers, index, keys, chunk)
                    for chunk in range(first_needed(group, point // group.stride), point // group.stride)
                )
                for index, group in enumerate(self.groups)
            ):
                return point
        raise AssertionError("position 0 needs nothing")


def left(gone: Evicted) -> list[tuple[int, bytes, int]]:
    """(group, hash, slot) of all that left, in the order in which it left."""
    listed = []
    for (group, names), slots in zip(gone.names, gone.slots, strict=True):
        keys = [split_offload_key(key)[0] for key in PackedKeys(((group, names),), 32)]
        assert len(keys) == len(slots)
        listed += [(group, key, slot) for key, slot in zip(keys, reversed(slots.tolist()), strict=True)]
    assert gone.count == len(listed)
    return listed


class Pair:
    """A catalog and its model, driven together."""

    def __init__(self, groups: Sequence[CatalogGroup], policies: Sequence[EvictionPolicy | None]) -> None:
        self.catalog = Catalog(groups, policies)
        self.naive = NaiveCatalog(groups, len(policies))
        # What tiers may let go for each other is decided by entries, of all groups together: with several
        # groups, or holes, dicts of chunks cannot say which.
        self.plain = len(policies) == 1 or (len(groups) == 1 and groups[0].window is None)
        self.exact = [self.plain and isinstance(policy, LRUPolicy) for policy in policies]
        self.slots = 0

    def insert(self, tier: int, group: int, keys: Sequence[bytes], start: int, count: int, visit: int = 0):
        slots = np.arange(self.slots, self.slots + count, dtype=np.int32)
        self.slots += count
        self.catalog.insert(tier, group, keys, start, slots, visit)
        self.naive.insert(tier, group, keys, start, slots.tolist())

    def touch(self, keys: Sequence[bytes], stop: int, visit: int = 0) -> None:
        self.catalog.touch(keys, stop, visit)
        self.naive.touch(keys, stop)

    def pin(self, keys: Sequence[bytes], stop: int) -> int:
        known = self.catalog.tree.find(keys, stop)[1]
        handle = self.catalog.pin(keys, known)
        if known:
            self.naive.pin(handle, keys[:known])
        return handle

    def unpin(self, handle: int) -> None:
        self.catalog.unpin(handle)
        self.naive.pins.pop(handle, None)
        self.naive.pinned.pop(handle, None)

    def evict(self, tier: int, wanted: int) -> list[tuple[int, bytes, int]]:
        listed = left(self.catalog.evict(tier, wanted, 1000))
        if self.exact[tier] and self.naive.may_stay(tier) <= self.naive.kept(tier):
            expected: list[tuple[int, bytes, int]] = []
            while len(expected) < len(listed) and (name := self.naive.victim(tier)) is not None:
                expected += self.naive.drop(tier, name)
            for group in range(len(self.naive.groups)):
                assert [one for one in listed if one[0] == group] == [
                    one for one in expected if one[0] == group
                ]
        else:
            names = {name for _, name, _ in listed}
            for name in names:
                assert name not in self.naive.kept(tier), "pinned"
                self.naive.drop(tier, name)
            for name in self.naive.recency[tier]:
                assert self.naive.parent[name] not in names, "what extends a chunk leaves before it"
        if len(listed) < wanted and self.plain:
            assert self.naive.victim(tier) is None, f"{len(listed)} of {wanted} left, more could"
        return listed

    def check(self, keys: Sequence[bytes]) -> None:
        catalog, naive, groups = self.catalog, self.naive, self.naive.groups
        catalog.check_invariants()
        assert catalog.pin_count == len(naive.pins)
        for tier in naive.tiers:
            names = [
                (group, split_offload_key(key)[0])
                for group, packed in catalog.names(tier)
                for key in PackedKeys(((group, packed),), 32)
            ]
            held = [(group, name) for group in range(len(groups)) for name in naive.slot[tier][group]]
            assert sorted(names) == sorted(held)
            slots = [slot for row in naive.slot[tier] for slot in row.values()]
            assert sorted(catalog.all_slots(tier)) == sorted(slots)
        for group, shape in enumerate(groups):
            stop = len(keys) // shape.stride
            for start in {0, stop // 2, max(0, stop - 1)}:
                for tier in (None, *naive.tiers):
                    found = catalog.resident(group, keys, start, stop, tier)
                    assert found == naive.resident(group, keys, start, stop, tier), (group, start, tier)
                for tier in naive.tiers:
                    found = catalog.slots(tier, group, keys, start, stop)
                    row = naive.slot[tier][group]
                    expected = [
                        row.get(naive.chunk(group, keys, index), ABSENT) for index in range(start, stop)
                    ]
                    assert found.tolist() == expected[: len(found)], (group, start, tier)
                    assert all(slot == ABSENT for slot in expected[len(found) :])
        for stop in {len(keys), len(keys) // 2}:
            assert catalog.restore_point(keys, stop) == naive.restore_point(keys, stop)


def walk(
    seed: int, groups: Sequence[CatalogGroup], policies: Sequence[EvictionPolicy | None], pins=True
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
        if action < 0.45 and chunks:
            naive = pair.naive
            if shape.window is None:
                start = naive.resident(group, keys, 0, chunks, tier)
                if not start and chance.random() < 0.3:  # what other tiers hold need not be here as well
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
