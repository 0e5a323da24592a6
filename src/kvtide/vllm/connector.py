"""The connector that vLLM loads: its hooks, answered by our two halves.

Knows vLLM's objects and order of calls, hands both on and keeps nothing but the halves. Importing this
module touches no device, thread or shared memory: vLLM imports it in the front end too.
"""

import logging
import os
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm

from kvtide.adviser.process import ProcessAdviser
from kvtide.config import KVTideConfig, load_config, sized_for
from kvtide.jobs import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtide.metrics import MetricsDelta
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.sim.traces.recorder import TraceRecorder
from kvtide.spec import OffloadingSpec
from kvtide.transfer.engine import OffloadingWorker
from kvtide.vllm.compat import require_supported

require_supported(vllm.__version__)

from vllm.distributed.kv_events import KVCacheEvent  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

from kvtide.vllm.events import to_vllm  # noqa: E402
from kvtide.vllm.identity import refuse_random_hashes, tier_identity_of  # noqa: E402
from kvtide.vllm.layout import (  # noqa: E402
    blocks_per_step,
    geometry_of,
    kv_bytes_of,
    refuse_blind_stores,
    refuse_unverified,
    required_layout,
    step_bytes_of,
    writes_new_blocks_first,
)
from kvtide.vllm.metadata import StepMetadata, WorkerAnswers  # noqa: E402
from kvtide.vllm.metrics import KVTidePromMetrics, KVTideStats  # noqa: E402

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


def config_of(extra_config: dict[str, Any] | None) -> KVTideConfig:
    """Read the settings that reached this process.

    Raises:
        ConfigError: One of them is wrong; names it.
    """
    return load_config(extra_config=extra_config, environment=os.environ)


class KVTideConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offloads KV blocks to host memory and brings them back.

    vLLM builds one per process and role: the scheduler role decides, the worker role copies.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unverified(vllm_config)
        settings = config_of(self._kv_transfer_config.kv_connector_extra_config)
        refuse_blind_stores(vllm_config, settings.store_policy)
        self._geometry = geometry_of(vllm_config, kv_cache_config, settings.blocks_per_chunk)
        step_bytes = step_bytes_of(vllm_config, kv_cache_config, self._geometry)
        self._settings = sized_for(settings, step_bytes, self._geometry.shard_count)
        self._spec = OffloadingSpec(self._settings, adviser=ProcessAdviser)
        self._metrics = MetricsDelta()
        self._scheduler: OffloadingConnectorScheduler | None = None
        self._recorder: TraceRecorder | None = None
        self._worker: OffloadingWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._demand_recomputation()
            events = vllm_config.kv_events_config
            with_events = events is not None and events.enable_kv_cache_events
            if with_events and self._geometry.finest.lookahead_hashes:
                # A chunk goes by a hash of tokens after it: a router would look for it in the wrong place.
                logger.warning("no KV events are announced for host memory: a drafter is in use")
                with_events = False
            self._scheduler = self._spec.scheduler(
                self._geometry,
                self._metrics,
                with_events,
                writes_new_blocks_first(vllm_config, kv_cache_config),
                blocks_per_step(vllm_config, self._geometry),
                partial(tier_identity_of, vllm_config, kv_cache_config, self._geometry),
            )
            self._recorder = self._spec.recorder(self._geometry, time.monotonic())
        else:
            device = vllm_config.device_config.device_type
            self._spec.check_budget(device, kv_bytes_of(kv_cache_config))

    def _demand_recomputation(self) -> None:
        # vLLM's default turns a load that fails into an error for the client. It reads the policy after
        # the connector was built.
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            logger.info("kv_load_failure_policy is recompute with kvtide: a failed load is a miss")

    @property
    def _deciding(self) -> OffloadingConnectorScheduler:
        if self._scheduler is None:
            raise RuntimeError("a hook of the scheduler role was called on a worker's connector")
        return self._scheduler

    # -- what vLLM asks of the class --------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped save is a future miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Ask for the cheapest layout, and be the first to refuse what cannot work."""
        refuse_unverified(vllm_config)
        settings = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        refuse_blind_stores(vllm_config, settings.store_policy)
        if settings.tier_names:
            refuse_random_hashes(vllm_config.cache_config.prefix_caching_hash_algo, os.environ)
        OffloadingSpec(settings)
        return required_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No layer hooks; but on an accelerator this is where a wrong setting can be refused first."""
        OffloadingSpec(config_of(extra_config))
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked by vLLM 0.33: KV tensors must stay where they were registered."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTideStats:
        return KVTideStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTidePromMetrics:
        transfer = vllm_config.kv_transfer_config
        settings = config_of(transfer.kv_connector_extra_config if transfer is not None else None)
        return KVTidePromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, settings.tier_names
        )

    # -- the scheduler half -----------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        now_s = time.monotonic()
        self._deciding.on_new_request(request, now_s)
        if self._recorder is not None:
            self._recorder.arrived(request.request_id, now_s)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        began_s = time.monotonic()
        answer = self._deciding.get_num_new_matched_tokens(request, num_computed_tokens, began_s)
        self._metrics.observe("lookup_seconds", time.monotonic() - began_s)
        return answer

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._deciding.update_state_after_alloc(
            request, blocks.get_block_ids(), num_external_tokens, time.monotonic()
        )

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        return StepMetadata(self._deciding.build_connector_meta(scheduler_output, time.monotonic()))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        answers = connector_output.kv_connector_worker_meta
        self._deciding.update_connector_output(
            answers.answers if isinstance(answers, WorkerAnswers) else None,
            time.monotonic(),
            connector_output.failed_recving or (),
        )

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        now_s = time.monotonic()
        self._deciding.request_finished_all_groups(request, block_ids, now_s)
        if self._recorder is not None:
            prompt_tokens = request.num_prompt_tokens
            output_tokens = request.num_tokens - prompt_tokens
            hashes = request.block_hashes
            self._recorder.ended(request.request_id, prompt_tokens, output_tokens, hashes, now_s)
        return False, None

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def take_events(self) -> Iterable[KVCacheEvent]:
        return list(to_vllm(self._deciding.take_events(), self._geometry))

    def has_pending_push_work(self) -> bool:
        return self._deciding.has_pending_push_work(time.monotonic())

    def reset_cache(self) -> bool:
        return self._deciding.reset_cache()

    # -- the worker half --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        config = self._kv_cache_config
        identity = None
        if self._settings.tier_names:
            identity = tier_identity_of(self._vllm_config, config, self._geometry)
        self._worker = self._spec.worker(
            self._vllm_config.parallel_config.rank,
            self._geometry,
            kv_caches,
            [config.kv_cache_groups[group.engine_index].layer_names for group in self._geometry.groups],
            config.num_blocks,
            self._metrics,
            identity,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None:
            self._worker.begin_step(_step(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and self.has_connector_metadata():
            self._worker.start_loads(_step(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, a request runs after its own has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: stores go out at the start of the next step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.forward_ended()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        loads = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=loads.finished, failed_recving=loads.failed)

    def build_connector_worker_meta(self) -> WorkerAnswers | None:
        answers: OffloadingWorkerMetadata | None = None
        if self._worker is not None:
            answers = self._worker.take_answers()
        return None if answers is None else WorkerAnswers(answers)

    # -- both -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVTideStats | None:
        metrics = self._metrics if self._scheduler is None else self._scheduler.metrics()
        data = metrics.take()
        return KVTideStats(data=data) if data else None

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._recorder is not None:
            self._recorder.close()


def _step(metadata: KVConnectorMetadata) -> OffloadingConnectorMetadata:
    if not isinstance(metadata, StepMetadata):
        raise TypeError(f"kvtide was handed {type(metadata).__name__} of another connector")
    return metadata.step
