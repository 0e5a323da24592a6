"""What becomes of the calls to a tier in virtual time: when each ends, and how.

Draws from a seed; knows kinds of calls and of trouble, and how a record on a medium is damaged. Does not know
jobs.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvtide.keys import OffloadKey
from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.shared_memory_tier import SharedMemoryTier
from kvtide.tiers.base import Tier
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import HEADER_BYTES
from kvtide.tiers.replicas import Replicas
from kvtide.tiers.slabs import ALIGNMENT, slot_bytes_of
from kvtide.transfer.lane_calls import Kind

TROUBLES = {
    "instant": frozenset(Kind),
    "quick": frozenset(Kind),
    "slow": frozenset(Kind),
    "late": frozenset({Kind.READ, Kind.WRITE, Kind.DISCARD, Kind.GENERATION}),
    "never returns": frozenset({Kind.READ, Kind.WRITE, Kind.DISCARD, Kind.GENERATION}),
    "fails": frozenset({Kind.READ, Kind.WRITE, Kind.GENERATION}),
    "fails, and is kept": frozenset({Kind.WRITE}),
    "is full": frozenset({Kind.WRITE}),
    "is damaged": frozenset({Kind.READ}),
    "is gone": frozenset({Kind.READ}),
}
"""What calls are drawn like, and for which it makes sense."""

UNHARMED = frozenset({"instant", "quick", "slow"})


@dataclass(frozen=True, slots=True)
class CallFate:
    """What will happen to one call.

    Attributes:
        kind: One of ``TROUBLES``.
        lasts_s: Until it returns; for ever is ``inf``.
    """

    kind: str
    lasts_s: float = 0.0


class LanePlan:
    """Draws the fate of each call, and of how a tier is opened.

    Args:
        chance: The only source of choice.

    Attributes:
        weights: Of the kinds of fate; may be replaced at any time. One that is left out does not happen.
        happened: How often each was drawn, and what became of calls.
        harmed: Records of private tiers that were damaged or removed behind everybody's back.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.weights: Mapping[str, float] = {"instant": 1.0}
        self.happened: Counter[str] = Counter()
        self.harmed: set[OffloadKey] = set()

    def draw(self, kind: Kind, deadline_s: float) -> CallFate:
        """Decide over one call."""
        chance = self.chance
        able = {name: weight for name, weight in self.weights.items() if kind in TROUBLES[name]}
        if not any(able.values()):
            return CallFate("instant")
        (name,) = chance.choices(list(able), list(able.values()))
        self.happened[f"call: {kind.name.lower()} {name}"] += 1
        lasts_s = min(chance.expovariate(500.0), 0.9 * deadline_s)
        match name:
            case "instant":
                lasts_s = 0.0
            case "slow":
                lasts_s = chance.random() * deadline_s
            case "late":
                lasts_s = deadline_s * (1.05 + chance.expovariate(1.0))
            case "never returns":
                lasts_s = math.inf
        return CallFate(name, lasts_s)

    def harm(self, tier: Tier, key: OffloadKey, name: str) -> None:
        """Damage or remove a record before it is read, unless it is not there."""
        removed = name == "is gone"
        if isinstance(tier, SharedMemoryTier):
            there = harm_shared(tier, key, removed, self.chance)
        elif removed:
            there = isinstance(tier, Replicas | DiskTier | MemoryTier) and tier.contains([key], 0.0)[0]
            tier.discard([key])
        else:
            there = damage(tier, key, self.chance)
        if there:
            if not isinstance(tier, SharedMemoryTier):
                self.harmed.add(key)
            self.happened["record removed" if removed else "record damaged"] += 1


def harm_shared(tier: SharedMemoryTier, key: OffloadKey, removed: bool, chance: random.Random) -> bool:
    """Damage or remove a record of a store; False when it is not there."""
    store, name = tier.store, tier.name_of(key)
    stored = store.records.get(name)
    if stored is None:
        return False
    store.gone.add(key)
    if removed:
        store.take(name)
    else:
        flip(stored.data, chance)
    return True


def flip(record: bytearray, chance: random.Random) -> None:
    """Flip a bit of a record."""
    if record:
        record[chance.randrange(len(record))] ^= 1 << chance.randrange(8)


def damage(tier: Tier, key: OffloadKey, chance: random.Random) -> bool:
    """Flip a bit of a record where it lies; False when it is not there."""
    if isinstance(tier, MemoryTier):
        record = tier.records.get(key)
        if record is None:
            return False
        flip(record, chance)
        return True
    if isinstance(tier, Replicas):
        tier = tier._own
    if not isinstance(tier, DiskTier) or (place := tier._entries.get(key)) is None:
        return False
    of_class, size = tier._slabs._known(place), place.payload_bytes
    at = chance.randrange(HEADER_BYTES + size)
    offset = place.slot * slot_bytes_of(size) + (at if at < HEADER_BYTES else at - HEADER_BYTES + ALIGNMENT)
    (byte,) = os.pread(of_class.descriptor, 1, offset)
    os.pwrite(of_class.descriptor, bytes([byte ^ 1 << chance.randrange(8)]), offset)
    return True
