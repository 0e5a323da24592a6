"""From settings to objects: the one place that knows every name.

``OffloadingSpec`` makes the manager and the scheduler half in the scheduler process, and the worker half
in each rank. It refuses a wrong setting by name before anything is allocated.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence

import torch

from kvtide.advising import Adviser
from kvtide.config import KVTideConfig, hint_of
from kvtide.errors import ConfigError
from kvtide.geometry import KVGeometry
from kvtide.jobs import COPIES, Direction
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.manager.lower import LowerTier
from kvtide.manager.reuse import ReuseFilter
from kvtide.manager.shared import SharedTierBooks
from kvtide.metrics import MetricsDelta
from kvtide.policies.named import POLICIES
from kvtide.probing import Prober
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig
from kvtide.sim.traces.recorder import TraceRecorder
from kvtide.spec_tiers import TierIdentity, ghost_tiers, prober_of, tier_plans, tier_seats
from kvtide.tiers.named import check_tier
from kvtide.transfer.cores import copy_cores
from kvtide.transfer.cuda_devices import cuda_copier, current_device
from kvtide.transfer.devices import CPUCopier, DeviceCopier
from kvtide.transfer.engine import OffloadingWorker
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.memory import available_host_bytes, check_budget, humanised
from kvtide.transfer.pool import HostPool, PageRegistrar
from kvtide.transfer.region import GroupRegions, group_regions, layer_views, slot_bytes_of
from kvtide.transfer.self_test import round_trip
from kvtide.transfer.tier_hops import TierHops, TierSeat

logger = logging.getLogger(__name__)

CopierOf = Callable[[Direction], DeviceCopier]


def cpu_copiers(config: KVTideConfig, rank_count: int) -> CopierOf:
    """Find the cores for both directions, before a thread of either is there to be found."""
    chosen = copy_cores(config.copy_threads, torch.get_num_threads(), rank_count)
    cores = ", ".join(map(str, sorted(chosen.cores)))
    logger.info("kvtide: threads that copy each way: %d, on cores %s", chosen.thread_count, cores)
    return lambda direction: CPUCopier(direction.value, chosen.thread_count, chosen.cores)


COPIERS: dict[str, Callable[[KVTideConfig, int], CopierOf]] = {
    "cpu": cpu_copiers,
    "cuda": lambda config, rank_count: cuda_copier,
}
"""By type of device."""

REGISTRARS: dict[str, Callable[[], PageRegistrar]] = {"cuda": current_device}
"""Who makes host memory known to a device, where that is needed."""


NOT_REGISTERED = "none of it could be registered with the device: raise the limit on locked memory"

FIRST_SLOT_S = 60.0
"""So long the start waits for host memory that the device may reach."""


class OffloadingSpec:
    """What was asked for, ready to be built.

    Args:
        config: Checked settings.
        copiers: Who copies, by type of device; replaced in tests.
        seats: Who leads to tiers; replaced in simulations.
        prober: Who asks shared ones what they have; likewise.
        adviser: Makes who keeps ghosts of tiers, where the settings want any; None for nobody.

    Raises:
        ConfigError: A name nobody knows.
    """

    def __init__(
        self,
        config: KVTideConfig,
        copiers: Mapping[str, CopierOf] | None = None,
        seats: Callable[[KVTideConfig, TierIdentity, Sequence[int]], list[TierSeat]] = tier_seats,
        prober: Callable[[KVTideConfig, Callable[[], TierIdentity]], Prober | None] = prober_of,
        adviser: Callable[[], Adviser] | None = None,
    ) -> None:
        if config.eviction_policy not in POLICIES:
            raise ConfigError("eviction_policy", config.eviction_policy, hint_of("eviction_policy"))
        self.config = config
        self._copiers = copiers
        self._seats = seats
        self._prober = prober
        self._adviser = adviser
        for tier in config.tiers:
            check_tier(tier.path, tier.label, tier.limit, tier.options)

    def scheduler(
        self,
        geometry: KVGeometry,
        metrics: MetricsDelta,
        with_events: bool,
        holds_stored_blocks: bool = False,
        blocks_per_step: int = 0,
        identity_of: Callable[[], TierIdentity] | None = None,
    ) -> OffloadingConnectorScheduler:
        """Build the scheduler half. Its pool is empty until ranks report theirs.

        Args:
            geometry: Groups, blocks and chunks.
            metrics: Where to count.
            with_events: Whether anyone listens to KV events.
            holds_stored_blocks: See ``SchedulerOffloadConfig``.
            blocks_per_step: See there.
            identity_of: Says whose bytes shared tiers are asked for; not called in this thread.
        """
        config = self.config
        lazy = config.store_policy == "lazy"
        if lazy and holds_stored_blocks:
            # A block that is held leaves the free list, and comes back as the last to be handed out.
            logger.warning(
                "store_policy is eager for this model: the engine writes new blocks before it asks"
            )
            lazy = False
        plans = tier_plans(config)
        manager = CPUOffloadingManager(
            POLICIES[config.eviction_policy](),
            ReuseFilter(config.store_threshold, config.store_filter_entries),
            metrics,
            with_events,
            tuple(
                CatalogGroup(
                    geometry.positions_per_chunk(group), group.window_chunks, group.local_tokens is not None
                )
                for group in geometry.groups
            ),
            [POLICIES[plan.eviction_policy]() for plan in plans],
        )
        lower = [
            (SharedTierBooks if plan.books.is_shared else LowerTier)(
                index,
                plan.books,
                manager.catalog,
                manager.groups,
                geometry.shard_count,
                metrics,
                with_events,
            )
            for index, plan in enumerate(plans, 1)
        ]
        limits = SchedulerOffloadConfig(
            geometry,
            config.offload_prompt_only,
            config.defer_limit_s,
            config.transfer_deadline_s,
            config.store_queue,
            with_events,
            restore_interval_tokens=config.restore_interval,
            holds_stored_blocks=holds_stored_blocks,
            lazy=lazy,
            blocks_per_step=blocks_per_step,
            promotion_share=config.promotion_share,
            probe_wait_s=config.probe_wait_s,
            reset_keeps_tiers=config.reset_keeps_tiers,
        )
        ladder = Ladder(manager, lower) if lower else None
        prober = None if identity_of is None else self._prober(config, identity_of)
        adviser = self._adviser() if config.adviser and self._adviser is not None else None
        ghosts = ghost_tiers(config)
        return OffloadingConnectorScheduler(limits, manager, metrics, ladder, prober, adviser, ghosts)

    def recorder(self, geometry: KVGeometry, now_s: float) -> TraceRecorder | None:
        """Begin to record what is asked; None where nobody wants it.

        Raises:
            ConfigError: The file cannot be made.
        """
        if not self.config.record_trace:
            return None
        block_tokens = geometry.finest.tokens_per_hash
        return TraceRecorder(self.config.record_trace, block_tokens, self.config.record_trace_limit, now_s)

    def worker(
        self,
        rank: int,
        geometry: KVGeometry,
        kv_caches: Mapping[str, torch.Tensor],
        group_layers: Sequence[Sequence[str]],
        num_blocks: int,
        metrics: MetricsDelta,
        identity: TierIdentity | None = None,
    ) -> OffloadingWorker:
        """Build one rank's worker half over the tensors that the engine has allocated.

        Args:
            rank: From 0.
            geometry: Groups, blocks and chunks.
            kv_caches: Tensors by layer.
            group_layers: Names of the layers of each group.
            num_blocks: Blocks of the engine.
            metrics: Where to count.
            identity: Of what this rank writes below host memory; None without tiers there.

        Raises:
            ConfigError: The budget does not fit this machine, or holds no chunk; a tier cannot be had.
            LayoutError: Tensors of a shape nobody has verified, or a device without a copier.
        """
        groups = [
            group_regions(layer_views(kv_caches, names, num_blocks), group.blocks_per_chunk)
            for names, group in zip(group_layers, geometry.groups, strict=True)
        ]
        device = next(iter(kv_caches.values())).device.type
        copier = self._copier(device, geometry.shard_count)
        slot_count = self._slot_count(groups, geometry.shard_count)
        registrar = REGISTRARS[device]() if device in REGISTRARS else None
        pool = HostPool(slot_count, slot_bytes_of(groups), self.config.prefault, registrar)
        logger.info(
            "kvtide: %s of host memory on rank %d, %d chunks of %d tokens: %d tokens",
            humanised(pool.byte_count),
            rank,
            slot_count,
            geometry.groups[0].tokens_per_chunk,
            slot_count * geometry.groups[0].tokens_per_chunk,
        )
        handlers = {
            direction: SingleDirectionOffloadingHandler(direction, groups, pool, copier(direction))
            for direction in COPIES
        }
        store, load = handlers[Direction.STORE], handlers[Direction.LOAD]
        if self.config.self_test:
            if registrar is not None and not pool.await_slots(1, FIRST_SLOT_S):
                raise ConfigError("host_memory", int(self.config.host_memory), NOT_REGISTERED)
            chunk_blocks = [group.blocks_per_chunk for group in geometry.groups]
            round_trip(kv_caches, group_layers, num_blocks, chunk_blocks, store, load)
        hops = None
        if identity is not None:
            chunk_bytes = [group.chunk_bytes for group in groups]
            seats = self._seats(self.config, identity, chunk_bytes)
            hops = TierHops(seats, pool, chunk_bytes, metrics)
        return OffloadingWorker(rank, pool, store, load, metrics, self.config.flush_limit_s, hops)

    def check_budget(self, device: str, kv_bytes: int) -> None:
        """Refuse a budget that cannot fit, before anything of it is taken.

        Args:
            device: Type of the engine's device.
            kv_bytes: Of its KV cache, which on the CPU backend comes from the same memory.
        """
        reserved = kv_bytes if device == "cpu" else 0
        check_budget(self.config.host_memory, reserved, available_host_bytes())

    def _copier(self, device: str, rank_count: int) -> CopierOf:
        """Say who copies on a device."""
        known = COPIERS if self._copiers is None else self._copiers
        if device not in known:
            raise ConfigError("device", device, f"kvtide copies on: {', '.join(known)}")
        if self._copiers is not None:
            return self._copiers[device]
        return COPIERS[device](self.config, rank_count)

    def _slot_count(self, groups: Sequence[GroupRegions], rank_count: int) -> int:
        slot_bytes = slot_bytes_of(groups)
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        # The mapping is whole pages: what the last one wastes belongs to the budget too.
        share = self.config.host_memory // rank_count // page_bytes * page_bytes
        slot_count = share // slot_bytes
        if slot_count < 1:
            least = -(-slot_bytes // page_bytes) * page_bytes * rank_count
            raise ConfigError(
                "host_memory",
                int(self.config.host_memory),
                f"holds 0 chunks: one takes {slot_bytes} bytes on each of {rank_count} ranks;"
                f" give at least {least} bytes",
            )
        return slot_count
