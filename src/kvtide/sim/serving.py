"""A trace through the production scheduler half, all tiers and a modelled engine, in virtual time.

``serve`` builds the parts from a setup and reports. What an engine does is in ``serving_engine``, how fast it
is in ``serving_rates``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtide.errors import ConfigError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import OffloadingWorkerMetadata, PoolReport, TierReport
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.manager.reuse import ReuseFilter
from kvtide.metrics import MetricsDelta
from kvtide.policies.base import EvictionPolicy
from kvtide.policies.named import POLICIES
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig
from kvtide.sim.serving_engine import ServingEngine
from kvtide.sim.serving_media import Media, MediumRates
from kvtide.sim.serving_queue import EngineLimits, EngineQueue
from kvtide.sim.serving_rates import EngineRates
from kvtide.sim.serving_result import ServingResult, result_of
from kvtide.sim.traces.request import TraceRequest

SECOND_SIGHT = "second_sight"
"""LRU, and a chunk is stored when it is offered for the second time."""

RECORD_HEAD_BYTES = 4096
"""What a record on disk takes beside its chunk."""


@dataclass(frozen=True, slots=True)
class TierSetup:
    """A private tier below host memory.

    Attributes:
        name: In results.
        capacity_bytes: What it may hold.
        rates: How fast it is.
        demotion: When chunks are written to it.
        eviction_policy: By name.
        queue_bytes: Of writes that may be open at once.
    """

    name: str
    capacity_bytes: int
    rates: MediumRates
    demotion: Demotion = Demotion.AT_ONCE
    eviction_policy: str = "lru"
    queue_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """What is served with. Limits that a server's settings have go by their names and defaults.

    Attributes:
        bytes_per_token: Of KV cache, all devices together.
        host_memory: Bytes.
        engine: What vLLM is started with.
        rates: How fast it is.
        policy: Who leaves host memory, by name.
        tiers: Below it, the nearest first.
        arrival_factor: Arrivals are so many times as far apart as in the trace.
    """

    bytes_per_token: int
    host_memory: int
    engine: EngineLimits
    rates: EngineRates
    policy: str = "lru"
    tiers: tuple[TierSetup, ...] = ()
    blocks_per_chunk: int = 1
    store_threshold: int = 1
    store_filter_entries: int = 65536
    store_queue: int = 1 << 30
    defer_limit_s: float = 2.0
    transfer_deadline_s: float = 30.0
    promotion_share: float = 0.25
    arrival_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.policy not in policy_names():
            raise ConfigError("policy", self.policy, f"known policies: {', '.join(policy_names())}")
        for tier in self.tiers:
            if tier.eviction_policy not in POLICIES:
                hint = f"known policies: {', '.join(POLICIES)}"
                raise ConfigError(f"{tier.name}.eviction_policy", tier.eviction_policy, hint)
        if self.bytes_per_token < 1:
            raise ConfigError("bytes_per_token", self.bytes_per_token, "give 1 or more")
        if not self.arrival_factor > 0:
            raise ConfigError("arrival_factor", self.arrival_factor, "give a number above 0")


def policy_names() -> tuple[str, ...]:
    """Name what host memory can be served with."""
    return (*POLICIES, SECOND_SIGHT)


def serve(
    requests: Sequence[TraceRequest],
    setup: ServingSetup,
    seen: Callable[[int], None] = lambda count: None,
) -> ServingResult:
    """Serve a trace.

    Args:
        requests: In the order of their arrival, all with blocks of one size.
        setup: With what.
        seen: Is told now and then how many requests have ended.

    Raises:
        ConfigError: The trace is empty or of blocks of several sizes; host memory or a tier holds no chunk;
            the engine is too small for a request.
        AssertionError: The books of the production code do not balance at the end.
    """
    block_tokens = _block_tokens(requests)
    chunk_bytes = setup.bytes_per_token * block_tokens * setup.blocks_per_chunk
    slot_count = setup.host_memory // chunk_bytes
    if slot_count < 1:
        raise ConfigError("host_memory", setup.host_memory, f"holds 0 chunks: one takes {chunk_bytes} bytes")
    metrics = MetricsDelta()
    half, manager = _half(setup, block_tokens, metrics)
    half.update_connector_output(_reports(setup, slot_count, chunk_bytes), 0.0)
    media = Media(setup.rates, chunk_bytes, [tier.rates for tier in setup.tiers])
    queue = EngineQueue(half, setup.engine, block_tokens, setup.blocks_per_chunk, len(setup.tiers))
    engine = ServingEngine(half, queue, media, setup.rates)
    factor = setup.arrival_factor
    if factor != 1.0:
        requests = [replace(one, arrival_s=one.arrival_s * factor) for one in requests]
    served = engine.run(requests, seen)
    half.check_invariants()
    queue.check_invariants()
    assert not manager.pinned_count, "chunks are pinned and nothing is copied"
    names = ("host", *(tier.name for tier in setup.tiers))
    return result_of(setup.policy, names, served, queue.preemption_count, media, half.metrics().take())


def _block_tokens(requests: Sequence[TraceRequest]) -> int:
    sizes = {one.block_tokens for one in requests}
    if len(sizes) != 1:
        what = "is empty" if not sizes else f"has blocks of {sorted(sizes)} tokens; take traces of one size"
        raise ConfigError("trace", len(requests), what)
    return sizes.pop()


def _half(
    setup: ServingSetup, block_tokens: int, metrics: MetricsDelta
) -> tuple[OffloadingConnectorScheduler, CPUOffloadingManager]:
    """Put the production scheduler half together, as ``kvtide.spec`` does for a server."""
    group = GroupGeometry(0, GroupKind.FULL_ATTENTION, block_tokens, setup.blocks_per_chunk, block_tokens)
    geometry = KVGeometry((group,))

    def policy(name: str) -> EvictionPolicy:
        return POLICIES[name]()

    at_second_sight = setup.policy == SECOND_SIGHT
    manager = CPUOffloadingManager(
        policy("lru" if at_second_sight else setup.policy),
        ReuseFilter(2 if at_second_sight else setup.store_threshold, setup.store_filter_entries),
        metrics,
        False,
        (CatalogGroup(geometry.positions_per_chunk(group), group.window_chunks),),
        [policy(tier.eviction_policy) for tier in setup.tiers],
    )
    tiers = [
        LowerTier(
            index,
            TierPlan(tier.name, tier.demotion, tier.queue_bytes, reports_inventory=False),
            manager.catalog,
            manager.groups,
            geometry.shard_count,
            metrics,
        )
        for index, tier in enumerate(setup.tiers, 1)
    ]
    config = SchedulerOffloadConfig(
        geometry,
        defer_limit_s=setup.defer_limit_s,
        transfer_deadline_s=setup.transfer_deadline_s,
        store_queue_bytes=setup.store_queue,
        promotion_share=setup.promotion_share,
    )
    ladder = Ladder(manager, tiers) if tiers else None
    return OffloadingConnectorScheduler(config, manager, metrics, ladder), manager


def _reports(setup: ServingSetup, slot_count: int, chunk_bytes: int) -> OffloadingWorkerMetadata:
    """Say what a worker says when its pool and its tiers are open; they are empty."""
    record_bytes = chunk_bytes + RECORD_HEAD_BYTES
    for tier in setup.tiers:
        if tier.capacity_bytes < record_bytes:
            hint = f"holds 0 chunks: one takes {record_bytes} bytes"
            raise ConfigError(tier.name, tier.capacity_bytes, hint)
    return OffloadingWorkerMetadata(
        pools={0: PoolReport(slot_count, slot_count, chunk_bytes)},
        tiers={
            (0, index): TierReport(
                True, True, tier.capacity_bytes, (record_bytes,), tier.rates.chunk_s(chunk_bytes)
            )
            for index, tier in enumerate(setup.tiers, 1)
        },
    )
