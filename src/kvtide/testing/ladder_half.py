"""A scheduler half with tiers below host memory, and what ranks tell it of those, in names."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import (
    Hop,
    InventoryPiece,
    JobId,
    OffloadingWorkerMetadata,
    PoolReport,
    StorageLoadStoreSpec,
    TierReport,
    TransferJob,
)
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.metrics import MetricsDelta
from kvtide.policies import AdaptivePolicy, ARCPolicy, LRUPolicy
from kvtide.scheduler.below import BelowJobs
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig
from kvtide.testing.asked import HASH_BYTES, Asked
from kvtide.testing.naive_ladder import NaiveLadder
from kvtide.testing.workloads import chained_hashes

FULL = GroupGeometry(0, GroupKind.FULL_ATTENTION, 1, 1, 1)
GEOMETRIES = (
    (FULL,),
    (FULL,),
    (GroupGeometry(0, GroupKind.FULL_ATTENTION, 1, 2, 1),),
    (FULL, GroupGeometry(1, GroupKind.SLIDING_WINDOW, 1, 1, 1, window_tokens=3)),
    (FULL, GroupGeometry(1, GroupKind.FULL_ATTENTION, 2, 1, 1)),
    (GroupGeometry(0, GroupKind.SLIDING_WINDOW, 1, 1, 1, window_tokens=4),),
)


@dataclass(slots=True, eq=False)
class RankHop:
    """A hop that a rank has begun, or will when the one before it has ended."""

    job: TransferJob
    index: int
    hop: Hop
    void: bool = False
    cancelled: bool = False
    late: bool = False


@dataclass(slots=True)
class Rank:
    """One rank, in names."""

    index: int
    generation: int = 0
    slots: dict[int, OffloadKey] = field(default_factory=dict)
    copies: list[RankHop] = field(default_factory=list)
    hops: list[RankHop] = field(default_factory=list)
    inventory: dict[int, list[OffloadKey]] = field(default_factory=dict)  # what is left to be told, by tier
    answers: OffloadingWorkerMetadata = field(default_factory=OffloadingWorkerMetadata)


class LadderHalf:
    """The scheduler half, the state of all ranks, and the naive ladder beside them.

    Args:
        chance: Decides everything.

    Attributes:
        seen: How often what happened, for whoever wants to know that a day is not empty.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.geometry = KVGeometry(chance.choice(GEOMETRIES), chance.choice((1, 1, 2, 3)))
        self.keeps = chance.random() < 0.4
        self.capacity = chance.choice((4, 6, 8, 12, 16, 40))
        self.share = chance.choice((0.25, 0.5, 1.0))
        groups = [
            CatalogGroup(self.geometry.positions_per_chunk(group), group.window_chunks)
            for group in self.geometry.groups
        ]
        tier_count = chance.choice((1, 1, 2))
        demotions = (Demotion.AT_ONCE, *Demotion)
        policies = [chance.choice((LRUPolicy, ARCPolicy, AdaptivePolicy)) for _ in range(1 + tier_count)]
        metrics = MetricsDelta()
        self.host = CPUOffloadingManager(
            policies[0](), None, metrics, True, groups, [policy() for policy in policies[1:]]
        )
        self.tiers = [
            LowerTier(
                index,
                TierPlan(
                    f"tier{index}",
                    chance.choice(demotions),
                    chance.choice((30, 100, 1000)),
                    True,
                ),
                self.host.catalog,
                groups,
                self.geometry.shard_count,
                metrics,
                True,
            )
            for index in range(1, 1 + tier_count)
        ]
        self.ladder = Ladder(self.host, self.tiers)
        self.scheduler = OffloadingConnectorScheduler(
            SchedulerOffloadConfig(
                self.geometry,
                defer_limit_s=2.0,
                with_events=True,
                generated_store_tokens=4,
                promotion_share=self.share,
                reset_keeps_tiers=self.keeps,
            ),
            self.host,
            metrics,
            self.ladder,
        )
        self.naive = NaiveLadder(
            tier_count, self.geometry.shard_count, [one.looks_back for one in self.geometry.groups]
        )
        self.ranks = [Rank(index) for index in self.naive.ranks]
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()
        self._alphabet = chance.choice((1, 2, 3, 6))
        self._trouble = chance.choice((0.0, 0.1, 0.4))
        self._loading: dict[str, Asked] = {}
        self._running: list[Asked] = []
        self._blocks: dict[tuple[int, int], OffloadKey] = {}  # by rank and block
        self._requests: dict[str, Asked] = {}
        self._below: dict[JobId, tuple[TransferJob, set[int]]] = {}  # promotions, and who owes an answer
        self._gone: dict[JobId, set[int]] = {}  # of open promotions, chunks that some rank has not got
        self._record_bytes = tuple(chance.choice((1, 2, 5)) for _ in groups)
        self._capacity_bytes = [chance.choice((12, 30, 200, 500)) for _ in self.tiers]
        self._leave_earlier_records()
        self._report_all()

    # -- what the tiers say -----------------------------------------------------------------------

    def _report_any(self) -> None:
        self._report(self.chance.choice(self.ranks), self.chance.randrange(len(self.tiers)))

    def _report_all(self) -> None:
        pools = {rank.index: PoolReport(self.capacity, self.capacity, 1) for rank in self.ranks}
        self.scheduler.update_connector_output(OffloadingWorkerMetadata(pools=pools), self.now_s)
        for rank in self.ranks:
            for index in range(len(self.tiers)):
                self._report(rank, index, well=True)

    def _report(self, rank: Rank, index: int, well: bool = False) -> None:
        chance = self.chance
        serves = well or chance.random() < 0.85
        if not well and chance.random() < 0.2:
            self._capacity_bytes[index] = chance.choice((12, 30, 200))
        report = TierReport(
            serves,
            serves and (well or chance.random() < 0.8),
            self._capacity_bytes[index],
            self._record_bytes,
        )
        answers = OffloadingWorkerMetadata(tiers={(rank.index, index + 1): report})
        self.scheduler.update_connector_output(answers, self.now_s)

    @property
    def _is_warming(self) -> bool:
        assert self.scheduler._lower is not None
        return not all(one.is_done for one in self.scheduler._lower._warming.values())

    @property
    def _is_busy_below(self) -> bool:
        return bool(self.naive.writes or self._below or self._is_warming or len(self.ladder_hops))

    @property
    def ladder_hops(self) -> BelowJobs:
        """Hops below host memory that are open."""
        assert self.scheduler._lower is not None
        return self.scheduler._lower._below

    def _leave_earlier_records(self) -> None:
        """Have ranks hold what an earlier life has left: mostly the same, mostly whole."""
        for tier, state in enumerate(self.naive.tiers, 1):
            for _ in range(self.chance.choice((0, 2, 6))):
                tokens = [self.chance.randrange(self._alphabet) for _ in range(self.chance.randint(1, 12))]
                hashes = chained_hashes(tokens, HASH_BYTES)
                for group in self.geometry.groups:
                    run = group.run(hashes, 0, group.hashed_chunks(len(hashes)))
                    if run:
                        keys = self.naive.names(StorageLoadStoreSpec.of(tier, run))
                        for held in state.held:
                            held.update(key for key in keys if self.chance.random() < 0.97)
            for rank in self.ranks:
                rank.inventory[tier] = self._listed(state.held[rank.index])

    def _listed(self, keys: set[OffloadKey]) -> list[OffloadKey]:
        listed = sorted(keys)
        self.chance.shuffle(listed)
        return listed

    def _tell_inventory(self, limit: int) -> None:
        for rank in self.ranks:
            for tier, lists in list(rank.inventory.items()):
                if rank.generation != self.host.generation:
                    continue
                told, rest = lists[:limit], lists[limit:]
                rank.inventory[tier] = rest
                if not rest:
                    del rank.inventory[tier]
                self._told(rank, tier, told, last=not rest)

    def _told(self, rank: Rank, tier: int, keys: Sequence[OffloadKey], last: bool) -> None:
        state = self.naive.tiers[tier - 1]
        names = [split_offload_key(key) for key in keys]
        parents = [self.naive.parent[key] for key in keys]
        piece = InventoryPiece(
            tier,
            rank.generation,
            (len(self.ranks),) * len(self.geometry.groups),
            b"".join(group.to_bytes(2, "little") for _, group in names),
            b"".join(self.naive.index[key].to_bytes(4, "little") for key in keys),
            b"".join((1000 + self.chance.randrange(9)).to_bytes(8, "little") for _ in keys),
            b"".join(name for name, _ in names),
            b"".join(bytes(HASH_BYTES) if one is None else split_offload_key(one)[0] for one in parents),
            HASH_BYTES,
            last,
        )
        for key in keys:
            if all(key in held | broken for held, broken in zip(state.held, state.broken, strict=True)):
                state.found.add(key)
        answers = OffloadingWorkerMetadata(inventory=(piece,))
        self.scheduler.update_connector_output(answers, self.now_s)
