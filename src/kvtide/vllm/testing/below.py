"""What has to be true of tiers below host memory: what the books say is there, and nothing else.

Of a shared one they may say what is not so, but nothing that nobody has told them. Looks at the books, at the
tiers themselves and at their files; what the bytes have to be is the oracle's business.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvtide.errors import TierError
from kvtide.jobs import Direction
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.manager.ladder import Ladder
from kvtide.scheduler.below import Promotion
from kvtide.scheduler.lower_tiers import LowerTiers
from kvtide.spec_tiers import NAMES_LIMIT
from kvtide.testing.shared_memory_tier import SharedMemoryTier, Store, store_named
from kvtide.testing.virtual_lane import VirtualLane
from kvtide.tiers.base import PrivateTier, Tier
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.replicas import Replicas
from kvtide.transfer.tier_hops import TierHops
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.ledger import EventLedger
from kvtide.vllm.testing.promises import LeakError
from kvtide.vllm.testing.ranks import own_connector
from kvtide.vllm.testing.stored import Chunks, check_bytes, ready_in

SAMPLED = 6
"""Chunks of a group and tier whose bytes are looked at."""


def lower_of(engine: ModelEngine) -> LowerTiers | None:
    """Find the ladder's part of the scheduler half."""
    return engine.connector._deciding._lower


def ladder_of(engine: ModelEngine) -> Ladder:
    """Find the ladder of an engine that has one."""
    lower = lower_of(engine)
    assert lower is not None
    return lower._ladder


def hops_of(engine: ModelEngine) -> list[TierHops]:
    """Find the tiers of each rank; none without any."""
    workers = [own_connector(rank)._worker for rank in engine.ranks]
    return [worker._hops for worker in workers if worker is not None and worker._hops is not None]


def tiers_of(engine: ModelEngine, index: int) -> list[Tier]:
    """Find one tier on each rank; ``index`` counts from 1."""
    tiers = []
    for hops in hops_of(engine):
        lane = hops._seats[index - 1].lane
        assert isinstance(lane, VirtualLane)
        tiers.append(lane.tier)
    return tiers


def shared_of(engine: ModelEngine) -> list[SharedMemoryTier]:
    """Find the shared tier on each rank; none without one."""
    lanes = [seat.lane for hops in hops_of(engine) for seat in hops._seats]
    tiers = [lane.tier for lane in lanes if isinstance(lane, VirtualLane)]
    return [tier for tier in tiers if isinstance(tier, SharedMemoryTier)]


def store_of(settings: Mapping[str, Any]) -> Store:
    """Find the store of a shared tier that settings name; one that nobody uses without any."""
    for tier in settings.get("tiers", ()):
        if "store" in tier.get("options", {}):
            return store_named(tier["options"])
    return Store()


def hops_under_way(engine: ModelEngine) -> dict[str, int]:
    """Count open hops between host memory and the tiers below it, by direction."""
    lower = lower_of(engine)
    hops = [] if lower is None else list(lower._below)
    up = sum(isinstance(hop.what, Promotion) for hop in hops)
    return {Direction.PROMOTE.value: up, Direction.DEMOTE.value: len(hops) - up}


def is_settled(engine: ModelEngine) -> bool:
    """Whether no hop is open, no rank has anything to be told, and every tier has told what it holds."""
    lower = lower_of(engine)
    if lower is None:
        return True
    if not all(tier.serves for tier in lower._ladder.tiers):
        return False  # left out for a while
    told = all(warming.is_done for warming in lower._warming.values())
    if lower._probes is not None and (lower._probes.open_count or not lower._probes.are_reached):
        return False
    untold = any(tier._discards for tier in lower._ladder.tiers) or lower._promotions._cancelled
    return (
        lower.is_idle and told and not untold and all(hops.generation_is_durable for hops in hops_of(engine))
    )


def check_budgets(engine: ModelEngine) -> None:
    """Check what must hold at any time.

    Raises:
        LeakError: A budget is exceeded.
    """
    lower = lower_of(engine)
    if lower is None:
        return
    promotions, host = lower._promotions, lower._ladder.host
    taken = promotions._open_count + promotions._kept_count
    most = max(1, int(host.capacity * promotions._share))
    if taken > most:
        raise LeakError(f"{taken} slots are taken by promotions, {most} may be")
    for tier in lower._ladder.tiers:
        if tier.open_bytes > tier.plan.queue_bytes:
            raise LeakError(f"{tier.plan.name}: {tier.open_bytes} bytes of writes are open")
    for hops in hops_of(engine):
        for seat in hops._seats:
            lane = seat.lane
            assert isinstance(lane, VirtualLane)
            queued, limit = lane.books.write_bytes, lane._settings.queue_bytes
            if queued > limit:
                raise LeakError(f"{lane.name}: {queued} bytes are queued, {limit} may be")
            check_limit(lane)
    for shared in shared_of(engine):
        check_store(shared.store)


def check_limit(lane: VirtualLane) -> None:
    """Check what the files of a disk take.

    Raises:
        LeakError: More than they may.
    """
    tier = lane.tier._own if isinstance(lane.tier, Replicas) else lane.tier
    if not isinstance(tier, DiskTier) or not lane.opened:
        return
    taken = sum(path.stat().st_blocks * 512 for path in tier._folder.glob("slab-*"))
    if taken > tier._limit_bytes:
        raise LeakError(f"{lane.name}: the files take {taken} bytes, {tier._limit_bytes} may be")


def check_store(store: Store) -> None:
    """Check what a store was told, whoever told it.

    Raises:
        LeakError: Something that cannot be, or that is not ours to decide.
    """
    if store.mistakes:
        raise LeakError(f"a store was told what cannot be: {store.mistakes[0]}")
    if store.discarded:
        raise LeakError(f"what others use too was discarded: {store.discarded[0]}")


def check_announced(engine: ModelEngine, ledger: EventLedger) -> None:
    """Check that what is announced below host memory is what the books say is there.

    Raises:
        LeakError: It is not.
    """
    lower = lower_of(engine)
    if lower is None:
        return
    catalog = engine.connector._deciding._manager.catalog
    held = sum(len(catalog.all_slots(tier.index)) for tier in lower._ladder.tiers)
    if (announced := ledger.below.total()) != held:
        raise LeakError(f"{announced} chunks are announced below host memory, {held} are held")


def check_below(engine: ModelEngine, chance: random.Random, harmed: set[bytes]) -> int:
    """Check tiers of an engine at rest: every chunk in the books is there, and no other; some of their bytes.

    Args:
        engine: At rest, every tier settled.
        chance: Draws which are read.
        harmed: Keys that were damaged or removed by a fault in private tiers.

    Returns:
        Chunks read.

    Raises:
        WrongBytesError: A chunk is not what its name demands.
        LeakError: Books and tier do not agree.
    """
    lower = lower_of(engine)
    if lower is None:
        return 0
    engine.note_hashes()
    checked = 0
    for tier in lower._ladder.tiers:
        if not tier.serves:
            raise LeakError(f"{tier.plan.name} is out of service at rest")
        if tier.used_bytes > tier.capacity_bytes:
            raise LeakError(f"{tier.plan.name}: {tier.used_bytes} bytes held, {tier.capacity_bytes} fit")
        named: set[bytes] = set()
        for group in engine.connector._geometry.groups:
            names = [name for name, _ in ready_in(engine, group.group_index, tier.index)]
            named |= {make_offload_key(name, group.group_index) for name in names}
            whole = [name for name in names if make_offload_key(name, group.group_index) not in harmed]
            if tier.plan.is_shared:
                whole = [name for name in names if _is_whole(engine, name, group.group_index)]
            at_once = (engine.shape.num_blocks - 1) // group.blocks_per_chunk
            sample = chance.sample(whole, min(len(whole), SAMPLED, at_once))
            if sample:
                chunks = Chunks(group, sample, list(_read(engine, tier.index, group.group_index, sample)))
                check_bytes(engine, chunks, tier.plan.name)
                checked += len(sample)
        if tier.plan.is_shared:
            _compare_shared(engine, tier.index, named)
        else:
            _compare(engine, tier.index, named, harmed)
    return checked


def _is_whole(engine: ModelEngine, name: bytes, group_index: int) -> bool:
    """Whether every rank can read a chunk from the shared tier."""
    return all(tier.holds(make_offload_key(name, group_index)) for tier in shared_of(engine))


def _compare_shared(engine: ModelEngine, tier: int, named: set[bytes]) -> None:
    """Hold a store against the books: it may lack what is in them only if nobody has told us so."""
    record_bytes, limit = ladder_of(engine).tiers[tier - 1]._record_bytes, engine.shape.names_limit
    # Chunks of other groups may be smaller.
    most = (limit or NAMES_LIMIT) * max(record_bytes) // min(record_bytes)
    if len(named) > most:
        raise LeakError(f"tier {tier}: {len(named)} chunks are in the books, {most} may be")
    for shared in shared_of(engine):
        unexcused = [OffloadKey(key) for key in named - shared.store.gone]
        if missing := shared.contains(unexcused, 0.0).count(False):
            raise LeakError(
                f"tier {tier}: {missing} of {len(named)} chunks are in the books and not there, and"
                " nobody has said that they are"
            )


def _read(engine: ModelEngine, tier: int, group_index: int, names: list[bytes]) -> Iterator[np.ndarray]:
    """Read chunks on every rank: ``uint8[n * slot_bytes]`` each."""
    for rank, (hops, place) in enumerate(zip(hops_of(engine), tiers_of(engine, tier), strict=True)):
        step, count = hops._pool.slot_bytes, hops._chunk_bytes[group_index]
        held = np.zeros(len(names) * step, dtype=np.uint8)
        for at, name in enumerate(names):
            payload = memoryview(held)[at * step : at * step + count]  # type: ignore[arg-type]
            try:
                there = place.read_into(make_offload_key(name, group_index), payload, 1.0)
            except TierError as error:
                raise LeakError(f"tier {tier}, rank {rank}: {name.hex()} cannot be read: {error}") from error
            if not there:
                raise LeakError(f"tier {tier}, rank {rank}: {name.hex()} is in the books and not there")
        yield held


def _compare(engine: ModelEngine, tier: int, named: set[bytes], harmed: set[bytes]) -> None:
    """Hold what lies in a tier against the books."""
    kept: set[bytes] = set()
    for rank, place in enumerate(tiers_of(engine, tier)):
        assert isinstance(place, PrivateTier)
        here = {header.name.key for header in place.inventory()}
        kept |= here
        if here - named:
            raise LeakError(f"tier {tier}, rank {rank}: {len(here - named)} records are in no book")
    if missing := named - kept - harmed:
        raise LeakError(f"tier {tier}: {len(missing)} of {len(named)} chunks are in the books and not there")
