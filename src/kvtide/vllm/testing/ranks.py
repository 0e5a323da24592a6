"""The worker connectors of all ranks: built over their own tensors, and their answers joined.

Knows how vLLM builds a worker's connector and sums up what the ranks say. Does not know what a step does.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvtide.config import KVTideConfig
from kvtide.jobs import Direction, OffloadingConnectorMetadata
from kvtide.probing import Prober
from kvtide.spec import OffloadingSpec
from kvtide.spec_tiers import TierIdentity, tier_seats
from kvtide.tiers import disk, shared, slabs
from kvtide.tiers.base import Tier
from kvtide.transfer import engine as transfer_engine
from kvtide.transfer.devices import DeviceCopier
from kvtide.transfer.lane import Lane
from kvtide.transfer.tier_hops import TierSeat
from kvtide.transfer.tier_lane import LaneSettings, TierLane
from kvtide.vllm import connector as connector_module
from kvtide.vllm.connector import KVTideConnector
from kvtide.vllm.metadata import StepMetadata
from kvtide.vllm.testing.memory import DeviceMemory
from kvtide.vllm.testing.shape import of_rank
from kvtide.vllm.testing.sibling import SiblingConnector

Copiers = Callable[[int, Direction], DeviceCopier]
"""Who copies, by rank and direction."""

ProberOf = Callable[[KVTideConfig, Callable[[], TierIdentity]], Prober | None]
"""Who asks shared tiers, given the settings and whose bytes they are."""

LaneOf = Callable[[Tier, str, LaneSettings], Lane]
"""Who makes the lane before a tier, given its name."""


def use_clock(clock: Any, for_waits_alone: bool = False) -> None:
    """Let the connector, in this process, ask this clock for the time; ``time`` is the real one.

    Args:
        clock: Has what is used of ``time``.
        for_waits_alone: What dates records asks whom it asked before.
    """
    dating = () if for_waits_alone else (shared,)
    for module in (connector_module, transfer_engine, disk, slabs, *dating):
        vars(module)["time"] = clock


@contextmanager
def asking(prober: ProberOf) -> Iterator[None]:
    """Have connectors of the scheduler role that are built within ask shared tiers in this way."""
    before = vars(connector_module)["OffloadingSpec"]
    vars(connector_module)["OffloadingSpec"] = partial(OffloadingSpec, prober=prober)
    try:
        yield
    finally:
        vars(connector_module)["OffloadingSpec"] = before


def own_connector(connector: KVConnectorBase_V1) -> KVTideConnector:
    """Find ours, alone or within a ``MultiConnector``."""
    among = connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]
    (own,) = (one for one in among if isinstance(one, KVTideConnector))
    return own


def own_metadata(metadata: Any) -> OffloadingConnectorMetadata:
    """Find what a step tells our workers."""
    among = (metadata,) if isinstance(metadata, StepMetadata) else metadata.metadata
    (own,) = (one.step for one in among if isinstance(one, StepMetadata))
    assert isinstance(own, OffloadingConnectorMetadata)
    return own


def build_ranks(
    config: VllmConfig,
    kv_cache_configs: Sequence[KVCacheConfig],
    memory: DeviceMemory,
    copiers: Copiers,
    lane_of: LaneOf = TierLane,
    names_limit: int | None = None,
) -> list[KVConnectorBase_V1]:
    """Build one connector of the worker role for each rank, over its own tensors.

    Args:
        config: Of the engine.
        kv_cache_configs: Of each rank.
        memory: The device.
        copiers: Who copies.
        lane_of: Who makes lanes.
        names_limit: Chunks that are remembered to be in a shared tier; None for as many as in production.
    """
    use_clock(time, for_waits_alone=True)  # a self-test waits in real time
    ranks = []
    for rank, (kv_caches, kv_cache_config) in enumerate(zip(memory.kv_caches, kv_cache_configs, strict=True)):
        mine = of_rank(config, rank)
        kind = MultiConnector if "Multi" in config.kv_transfer_config.kv_connector else KVTideConnector
        connector = kind(mine, KVConnectorRole.WORKER, kv_cache_config)
        own = own_connector(connector)
        seats = partial(_seats, lane_of, names_limit)
        own._spec = OffloadingSpec(own._settings, {"cpu": partial(copiers, rank)}, seats)
        connector.register_kv_caches(kv_caches)
        ranks.append(connector)
    return ranks


def _seats(
    lane_of: LaneOf,
    names_limit: int | None,
    config: KVTideConfig,
    identity: TierIdentity,
    chunk_bytes: Sequence[int],
) -> list[TierSeat]:
    seats = tier_seats(config, identity, chunk_bytes, lane_of)
    if names_limit is None:
        return seats
    return [seat if seat.names_limit is None else replace(seat, names_limit=names_limit) for seat in seats]


def siblings_of(ranks: list[KVConnectorBase_V1]) -> list[SiblingConnector]:
    """Find the sibling on each rank; none without a ``MultiConnector``."""
    return [
        one
        for rank in ranks
        if isinstance(rank, MultiConnector)
        for one in rank.sub_connectors
        if isinstance(one, SiblingConnector)
    ]


def results_of(connector: KVConnectorBase_V1, finished_req_ids: set[str]) -> KVConnectorOutput:
    """Ask a rank for what has ended, in the runners' order."""
    results = connector.get_transfer_results(finished_req_ids)
    return KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
        kv_connector_stats=connector.get_kv_connector_stats(),
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )


@dataclass(slots=True)
class _RankOutput:
    """What vLLM's aggregator reads and writes of a rank's output."""

    kv_connector_output: KVConnectorOutput


class RankAnswers:
    """Joins what the ranks say, with vLLM's own ``KVOutputAggregator``.

    Args:
        rank_count: Ranks; a single one's answer is handed through, as vLLM does.
        chance: Draws which rank's answer comes a step late.
        late_share: How often; 0 for never.
    """

    def __init__(self, rank_count: int, chance: random.Random, late_share: float = 0.0) -> None:
        self._aggregator = KVOutputAggregator(rank_count)
        self._chance = chance
        self.late_share = late_share
        self._held: list[KVConnectorOutput | None] = [None] * rank_count
        self.late_count = 0

    def joined(self, outputs: list[KVConnectorOutput]) -> KVConnectorOutput:
        """Join one step's answers."""
        if len(outputs) == 1:
            return outputs[0]
        arrived = []
        for rank, output in enumerate(outputs):
            held, self._held[rank] = self._held[rank], None
            answer = output if held is None else _both(held, output)
            if self.late_share and self._chance.random() < self.late_share:
                self.late_count += not answer.is_empty()
                self._held[rank], answer = answer, KVConnectorOutput()
            arrived.append(_RankOutput(answer))
        joined = self._aggregator.aggregate(arrived).kv_connector_output
        assert isinstance(joined, KVConnectorOutput)
        return joined


def _both(earlier: KVConnectorOutput, later: KVConnectorOutput) -> KVConnectorOutput:
    stats, meta = earlier.kv_connector_stats, earlier.kv_connector_worker_meta
    if later.kv_connector_stats is not None:
        stats = later.kv_connector_stats if stats is None else stats.aggregate(later.kv_connector_stats)
    if later.kv_connector_worker_meta is not None:
        meta = (
            later.kv_connector_worker_meta if meta is None else meta.aggregate(later.kv_connector_worker_meta)
        )
    return KVConnectorOutput(
        finished_sending=(earlier.finished_sending or set()) | (later.finished_sending or set()),
        finished_recving=(earlier.finished_recving or set()) | (later.finished_recving or set()),
        failed_recving=earlier.failed_recving | later.failed_recving,
        invalid_block_ids=earlier.invalid_block_ids | later.invalid_block_ids,
        kv_connector_stats=stats,
        kv_connector_worker_meta=meta,
    )
