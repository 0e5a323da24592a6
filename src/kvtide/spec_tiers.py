"""From settings to tiers below host memory: their books for the scheduler half, their lanes for each rank."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.config import KVTideConfig
from kvtide.manager.lower import Demotion, TierPlan
from kvtide.tiers.base import PrivateTier, Tier, TierPlace
from kvtide.tiers.disk_folder import KnownFingerprints
from kvtide.tiers.fingerprint import Fingerprint
from kvtide.tiers.named import tier_named
from kvtide.tiers.records import RecordIdentity, Shard
from kvtide.tiers.replicas import disk_tier, writers_of
from kvtide.transfer.lane import Lane
from kvtide.transfer.tier_hops import TierSeat
from kvtide.transfer.tier_lane import LaneSettings, TierLane

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """Whose bytes a rank writes below host memory.

    Attributes:
        rank: From 0.
        fingerprint: Of all that shapes them beside the tokens.
        model: Its name, for people.
        shards: For each rank, its part of each chunk, by group; ranks with identical bytes hold the same.
    """

    rank: int
    fingerprint: Fingerprint
    model: str
    shards: tuple[tuple[Shard, ...], ...]

    def records(self) -> list[RecordIdentity]:
        """Say what every record of each rank has in common."""
        return [RecordIdentity(self.fingerprint.digest, of_rank) for of_rank in self.shards]


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


def tier_seats(
    config: KVTideConfig,
    identity: TierIdentity,
    chunk_bytes: Sequence[int],
    lane_of: Callable[[Tier, str, LaneSettings], Lane] = TierLane,
) -> list[TierSeat]:
    """Build a rank's tiers and the lanes before them; they open in the background.

    Args:
        config: Settings.
        identity: Whose bytes.
        chunk_bytes: Per group, bytes of one chunk on this rank.
        lane_of: Makes the lane before a tier, given its name; replaced in simulations.

    Raises:
        ConfigError: Another instance uses the folder, or a class cannot be had.
    """
    seats: list[TierSeat] = []
    records, rank = identity.records(), identity.rank
    counts = tuple(shard.count for shard in identity.shards[rank])
    if config.disk:
        folder = Path(config.disk)
        writers = {writers_of(identity.shards, other) for other in range(len(records))}
        share = config.disk_limit // len({writer for of_rank in writers for writer in of_rank})
        disk = disk_tier(folder, records, rank, share, config.disk_reserve, config.disk_direct)
        if rank == 0:
            _note_fingerprint(folder, identity)
        settings = LaneSettings(
            config.disk_threads, config.disk_queue, config.disk_deadline_s, config.transfer_deadline_s
        )
        mine = writers_of(identity.shards, rank)
        costs = tuple(
            disk.record_bytes(count) if writer == rank else 0
            for count, writer in zip(chunk_bytes, mine, strict=True)
        )
        seats.append(TierSeat(lane_of(disk, "disk", settings), costs, counts))
    for wanted in config.tiers:
        place = TierPlace(records[rank], rank, wanted.limit // len(records), wanted.options)
        tier = tier_named(wanted.path, place)
        settings = LaneSettings(wanted.threads, wanted.queue, wanted.deadline_s, config.transfer_deadline_s)
        costs = tuple(
            tier.record_bytes(count) if isinstance(tier, PrivateTier) else 0 for count in chunk_bytes
        )
        # Whatever ranks have alike: each writes its own.
        everybody = (len(records),) * len(counts)
        seats.append(TierSeat(lane_of(tier, wanted.label, settings), costs, everybody))
    return seats


def _note_fingerprint(folder: Path, identity: TierIdentity) -> None:
    """Say once whether what lies there is of this model, and remember it."""
    known = KnownFingerprints(folder)
    changed = known.changed(identity.fingerprint)
    if changed:
        logger.warning("disk: %s starts cold: since it was used last, %s changed", folder, ", ".join(changed))
    known.note(identity.fingerprint, identity.model)
