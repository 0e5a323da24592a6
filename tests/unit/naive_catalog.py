"""The catalog in dicts, slow and meant to be obviously right, and both driven together."""

from collections.abc import Sequence

import numpy as np
from fakes import chained_hashes

from kvtide.keys import PackedKeys, split_offload_key
from kvtide.manager.catalog import ABSENT, Catalog, CatalogGroup, Evicted
from kvtide.policies import EvictionPolicy, LRUPolicy

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
        self.has_holes = False

    def chunk(self, group: int, keys: Sequence[bytes], index: int) -> bytes:
        return keys[(index + 1) * self.groups[group].stride - 1]

    def insert(self, tier: int, group: int, keys: Sequence[bytes], start: int, slots: Sequence[int]) -> None:
        for i, slot in enumerate(slots):
            name = self.chunk(group, keys, start + i)
            assert name not in self.slot[tier][group], "the driver stores nothing twice"
            self.slot[tier][group][name] = slot
            if name not in self.recency[tier]:
                self.recency[tier].append(name)
        self.touch(keys, (start + len(slots)) * self.groups[group].stride, (tier,))

    def touch(self, keys: Sequence[bytes], stop: int, tiers: Sequence[int] | None = None) -> None:
        self.parent.update(zip(keys, (None, *keys), strict=False))
        for tier in self.tiers if tiers is None else tiers:
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
        """Pins aside: what extends it must not lose it, here or in a tier that relies on this one.

        Once a tier has lost something, only what follows at once counts, and no tier relies on another.
        """
        if self.has_holes:
            return name not in {self.parent[held] for held in self.recency[tier]}
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

    def lose(self, tier: int, group: int, keys: Sequence[bytes], index: int) -> bool:
        """Strike out a chunk; pins keep nothing any more of what it extends, in this tier."""
        name = self.chunk(group, keys, index)
        if self.slot[tier][group].pop(name, None) is None:
            return False
        self.has_holes = True
        if not any(name in row for row in self.slot[tier]):
            self.recency[tier].remove(name)
        above: bytes | None = name
        while above is not None:
            for pin in self.pins.values():
                if above in pin[tier]:
                    pin[tier].remove(above)
            above = self.parent[above]
        return True

    def clear(self) -> None:
        """Forget everything, pins included; every tier is in service."""
        self.__init__(self.groups, len(self.tiers))  # type: ignore[misc]

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

    def restore_point(self, keys: Sequence[bytes], stop: int, only: Sequence[int] | None = None) -> int:
        tiers = [t for t in self.tiers if self.in_service[t]] if only is None else only
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
        self.policies = policies
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

    def lose(self, tier: int, group: int, keys: Sequence[bytes], index: int) -> bool:
        lost = self.catalog.lose(tier, group, keys, index)
        assert lost == self.naive.lose(tier, group, keys, index)
        assert self.catalog.has_holes == self.naive.has_holes
        return lost

    def clear(self) -> None:
        for policy in self.policies:
            if policy is not None:
                policy.clear()
        self.catalog.clear()
        self.naive.clear()

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
            for only in (None, *((tier,) for tier in naive.tiers), tuple(naive.tiers)):
                assert catalog.restore_point(keys, stop, only) == naive.restore_point(keys, stop, only)
        for node in catalog.tree.nodes():
            for count in {1, catalog.tree.count[node]}:
                prefix = catalog.tree.prefix(node, count)
                chain = [None, *prefix]
                assert [naive.parent[name] for name in prefix] == chain[:-1]
                assert len(prefix) == catalog.tree.start[node] + count
