"""From settings to tiers below host memory: their books for the scheduler half, their lanes for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.config import KVTideConfig
from kvtide.manager.lower import Demotion, TierPlan
from kvtide.tiers.base import PrivateTier, Tier, TierPlace
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.fingerprint import Fingerprint
from kvtide.tiers.named import tier_named
from kvtide.tiers.records import RecordIdentity, Shard
from kvtide.transfer.lane import Lane
from kvtide.transfer.tier_hops import TierSeat
from kvtide.transfer.tier_lane import LaneSettings, TierLane


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """A rank's part of each chunk of one group.

    Attributes:
        shard: Which part; ranks with identical bytes hold the same.
        writer: The rank that writes it below host memory: the lowest that holds it.
    """

    shard: Shard
    writer: int


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """Whose bytes a rank writes below host memory.

    Attributes:
        rank: From 0.
        rank_count: How many there are.
        fingerprint: Of all that shapes them beside the tokens.
        model: Its name, for people.
        places: Per group.
        writers: Ranks that write anything.
    """

    rank: int
    rank_count: int
    fingerprint: Fingerprint
    model: str
    places: tuple[ShardPlace, ...]
    writers: frozenset[int]

    @property
    def records(self) -> RecordIdentity:
        """What every record of this rank has in common."""
        return RecordIdentity(self.fingerprint.digest, tuple(place.shard for place in self.places))


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier that settings ask for, as the scheduler half sees it."""

    books: TierPlan
    eviction_policy: str


def tier_plans(config: KVTideConfig) -> list[PlannedTier]:
    """Say which tiers there are, the nearest first."""
    plans = []
    if config.disk:
        books = TierPlan("disk", Demotion(config.disk_demotion), config.disk_queue, True)
        plans.append(PlannedTier(books, config.disk_eviction_policy))
    for tier in config.tiers:
        books = TierPlan(tier.label, Demotion(tier.demotion), tier.queue, True)
        plans.append(PlannedTier(books, tier.eviction_policy))
    return plans


def tier_seats(config: KVTideConfig, identity: TierIdentity, chunk_bytes: Sequence[int]) -> list[TierSeat]:
    """Build a rank's tiers and the lanes before them; they open in the background.

    Args:
        config: Settings.
        identity: Whose bytes.
        chunk_bytes: Per group, bytes of one chunk on this rank.

    Raises:
        ConfigError: Another instance uses the folder, or a class cannot be had.
    """
    seats = []
    writers = max(1, len(identity.writers))
    if config.disk:
        disk = DiskTier(
            Path(config.disk),
            identity.records,
            config.disk_limit // writers,
            config.disk_reserve,
            config.disk_direct,
            identity.rank,
        )
        settings = LaneSettings(config.disk_threads, config.disk_queue, config.disk_deadline_s)
        seats.append(_seat(disk, TierLane(disk, "disk", settings), identity, chunk_bytes))
    for wanted in config.tiers:
        place = TierPlace(identity.records, identity.rank, wanted.limit // writers, wanted.options)
        tier = tier_named(wanted.path, place)
        settings = LaneSettings(wanted.threads, wanted.queue, wanted.deadline_s)
        seats.append(_seat(tier, TierLane(tier, wanted.label, settings), identity, chunk_bytes))
    return seats


def _seat(tier: Tier, lane: Lane, identity: TierIdentity, chunk_bytes: Sequence[int]) -> TierSeat:
    record_bytes = tuple(
        tier.record_bytes(count) if isinstance(tier, PrivateTier) and place.writer == identity.rank else 0
        for count, place in zip(chunk_bytes, identity.places, strict=True)
    )
    return TierSeat(lane, record_bytes, tuple(place.shard.count for place in identity.places))
