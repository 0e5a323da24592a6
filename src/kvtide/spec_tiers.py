"""From settings to tiers below host memory: their books for the scheduler half, their lanes for each rank."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvtide.advising import GhostTier
from kvtide.config import KVTideConfig, TierSettings
from kvtide.manager.lower import Demotion, TierPlan
from kvtide.metrics import HOST
from kvtide.probing import Prober
from kvtide.tiers.base import PrivateTier, Tier, TierPlace
from kvtide.tiers.disk_folder import KnownFingerprints
from kvtide.tiers.fingerprint import Fingerprint
from kvtide.tiers.named import tier_class, tier_named
from kvtide.tiers.records import RecordIdentity, Shard
from kvtide.tiers.replicas import disk_tier, writers_of
from kvtide.tiers.shared import SharedTier
from kvtide.transfer.lane import Lane
from kvtide.transfer.prober import NamedMaker, threads_asking
from kvtide.transfer.tier_hops import TierSeat
from kvtide.transfer.tier_lane import LaneSettings, TierLane

logger = logging.getLogger(__name__)

NAMES_LIMIT = 1 << 20
"""Chunks that are remembered to be in a shared tier."""


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """Whose bytes a rank writes below host memory.

    Attributes:
        rank: From 0.
        fingerprint: Of all that shapes them beside the tokens.
        model: Its name, for people.
        shards: For each rank, its part of each chunk, by group; ranks with identical bytes hold the same.
        instance: Names this server's present life; no other has the same.
    """

    rank: int
    fingerprint: Fingerprint
    model: str
    shards: tuple[tuple[Shard, ...], ...]
    instance: str = ""

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
        shared = is_shared(tier)
        books = TierPlan(tier.label, Demotion(tier.demotion), tier.queue, not shared, shared)
        plans.append(PlannedTier(books, tier.eviction_policy))
    return plans


def ghost_tiers(config: KVTideConfig) -> list[GhostTier]:
    """Say of which tiers ghosts can be kept, host memory first; their sizes are not known yet.

    Others write to shared tiers, and those evict by rules of their own: what they would hold nobody can tell.
    """
    entries = config.store_filter_entries
    tiers = [GhostTier(HOST, config.eviction_policy, 0, config.store_threshold, entries)]
    for plan in tier_plans(config):
        if plan.books.is_shared:
            continue
        demotion = plan.books.demotion
        threshold = max(config.store_threshold, 2 if demotion is Demotion.SECOND_SIGHT else 1)
        extends = demotion is Demotion.ON_EVICTION
        tiers.append(GhostTier(plan.books.name, plan.eviction_policy, 0, threshold, entries, extends))
    return tiers


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
        tier = tier_named(wanted.path, _place_of(wanted, identity))
        settings = LaneSettings(wanted.threads, wanted.queue, wanted.deadline_s, config.transfer_deadline_s)
        costs = tuple(
            tier.record_bytes(count) if isinstance(tier, PrivateTier | SharedTier) else 0
            for count in chunk_bytes
        )
        # Whatever ranks have alike: in a tier of its own each writes it.
        everybody = (len(records),) * len(counts)
        names = NAMES_LIMIT if isinstance(tier, SharedTier) else None
        seats.append(TierSeat(lane_of(tier, wanted.label, settings), costs, everybody, names))
    return seats


def is_shared(tier: TierSettings) -> bool:
    """Whether a tier evicts by its own rules, and has to be asked what it holds."""
    return issubclass(tier_class(tier.path), SharedTier)


def prober_of(
    config: KVTideConfig,
    identity_of: Callable[[], TierIdentity],
    made: Callable[[Mapping[int, NamedMaker], float], Prober] = threads_asking,
) -> Prober | None:
    """Begin to ask the shared tiers that settings name; None without any.

    What is asked for is the part of a chunk that rank 0 holds: the others are written with it.

    Args:
        config: Settings.
        identity_of: Says whose bytes are asked for; called by threads, as it may take a while.
        made: Makes who asks; replaced in simulations.
    """
    first = 2 if config.disk else 1
    makers = {
        index: (wanted.label, partial(_shared_tier, wanted, identity_of))
        for index, wanted in enumerate(config.tiers, first)
        if is_shared(wanted)
    }
    return made(makers, config.probe_wait_s) if makers else None


def _shared_tier(wanted: TierSettings, identity_of: Callable[[], TierIdentity]) -> SharedTier:
    tier = tier_named(wanted.path, _place_of(wanted, replace(identity_of(), rank=0), reads_only=True))
    assert isinstance(tier, SharedTier)
    return tier


def _place_of(wanted: TierSettings, identity: TierIdentity, reads_only: bool = False) -> TierPlace:
    records, rank = identity.records(), identity.rank
    if not is_shared(wanted):
        return TierPlace(records[rank], rank, wanted.limit // len(records), wanted.options)
    # What ranks have alike is written by one of them, and read by all.
    writes = tuple(writer == rank and not reads_only for writer in writers_of(identity.shards, rank))
    limit = 0 if reads_only else wanted.limit
    return TierPlace(records[rank], rank, limit, wanted.options, identity.instance, writes)


def _note_fingerprint(folder: Path, identity: TierIdentity) -> None:
    """Say once whether what lies there is of this model, and remember it."""
    known = KnownFingerprints(folder)
    changed = known.changed(identity.fingerprint)
    if changed:
        logger.warning("disk: %s starts cold: since it was used last, %s changed", folder, ", ".join(changed))
    known.note(identity.fingerprint, identity.model)
