"""What other servers and people do to a store that an engine under test uses too.

They write what it once wrote, take away and damage what they like; and one of them was reset, computes with
other weights, and keeps what it computes under names of its own. Knows records; does not know the engine.
"""

import random
from collections import Counter
from collections.abc import Sequence

from kvtide.errors import CorruptRecordError
from kvtide.testing.lane_faults import flip
from kvtide.testing.shared_memory_tier import SharedMemoryTier, Store
from kvtide.tiers.base import TierPlace
from kvtide.tiers.records import HEADER_BYTES, unpack

DEEDS = {
    "writes": 6.0,
    "removes": 4.0,
    "removes much": 0.3,
    "damages": 1.0,
    "cuts off": 0.5,
    "swaps": 0.5,
    "keeps its own": 2.0,
}
"""What they do, and how often."""

AT_ONCE = 12
"""Records that one deed touches, at most; much is all."""


class Neighbours:
    """Those who use a store.

    Args:
        store: Which.
        happened: Where to count.
        chance: The only source of choice.
    """

    def __init__(self, store: Store, happened: Counter[str], chance: random.Random) -> None:
        self._store = store
        self._happened = happened
        self._chance = chance
        self._own: list[SharedMemoryTier] = []

    def move_in(self, tiers: Sequence[SharedMemoryTier]) -> None:
        """Have one that was reset once, and one that was twice, beside these, the tiers of each rank."""
        self._own = []
        for tier in tiers:
            for reset_count in (1, 2):
                place = TierPlace(
                    tier.identity, tier._rank, 0, {"store": tier._name}, "a neighbour", tier._writes
                )
                own = SharedMemoryTier(place)
                for _ in range(reset_count):
                    own.begin_generation()
                self._own.append(own)

    def act(self) -> None:
        """Do something."""
        deed = self._chance.choices(list(DEEDS), list(DEEDS.values()))[0]
        done = self._do(deed)
        self._happened[f"neighbour {deed}"] += done > 0

    def keep_their_own(self) -> None:
        """Have those that were reset compute and keep whatever is known."""
        for name in self._store.archive:
            self._happened["neighbour keeps its own"] += self._keep(name)

    def _do(self, deed: str) -> int:
        chance, store = self._chance, self._store
        if deed in ("writes", "keeps its own"):
            known = list(store.archive)
            names = chance.sample(known, min(len(known), chance.randrange(1, AT_ONCE)))
            return sum(self._write(name) if deed == "writes" else self._keep(name) for name in names)
        count = len(store.records) if deed == "removes much" else chance.randrange(1, AT_ONCE)
        names = chance.sample(list(store.records), min(len(store.records), count))
        if deed == "swaps" and len(names) > 1:
            first, second = (store.records[name] for name in names[:2])
            first.data, second.data = second.data, first.data
            store.gone |= {first.key, second.key}
            return 1
        for name in names:
            stored = store.records[name]
            store.gone.add(stored.key)
            if deed == "damages":
                flip(stored.data, chance)
            elif deed == "cuts off":
                store.put(name, stored.key, stored.data[: chance.randrange(len(stored.data) + 1)])
            elif deed != "swaps":
                store.take(name)
        return len(names)

    def _write(self, name: str) -> bool:
        """Write what was written once and is not there."""
        if name in self._store.records:
            return False
        written = self._store.archive[name]
        self._store.put(name, written.key, written.data)
        return True

    def _keep(self, name: str) -> bool:
        """Compute a chunk with other weights, and keep it."""
        written = self._store.archive[name]
        try:
            header = unpack(written.data)
        except CorruptRecordError:
            return False
        rubbish = bytearray(self._chance.randbytes(len(written.data) - HEADER_BYTES))
        kept = False
        for own in self._own:
            if own.identity.owns(header) and own.writes(written.key):
                own.write(header.name, memoryview(rubbish), 1.0)
                kept = True
        return kept
