"""vLLM's own ``Scheduler`` or ``AsyncScheduler`` driving the production connector, both roles.

Real classes, real block pool, real hashes; the forward is a ``PatternModel`` and the copier is told when
to finish. Fences, preemption and asynchronous scheduling cannot be seen on the CPU engine.
"""

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtide.jobs import Direction
from kvtide.metrics import MetricsDelta
from kvtide.spec import OffloadingSpec
from kvtide.testing import HeldDevice
from kvtide.vllm import plugin
from kvtide.vllm.connector import KVTideConnector
from kvtide.vllm.testing.model import PatternModel, WrongBytesError

LAYERS = ("layers.0", "layers.1", "layers.2")

__all__ = ["Harness", "WrongBytesError"]


class Harness:
    """An engine of one rank that is stepped by hand.

    Args:
        folder: An empty folder, for a model configuration.
        num_blocks: Of the device, the null block included.
        tokens_per_block: Of the device.
        asynchronous: Plan a step before the results of the last one are in.
        block_first: All layers of a block lie together.
        budget_tokens: Tokens a step may compute.
        host_pages: Pages of host memory; kvtide maps whole ones.
        settings: Of kvtide, beside the host memory.

    Attributes:
        store: Copier of stores.
        load: Copier of loads.
        longest_hook_s: CPU seconds of the slowest call of any connector hook, and its name.
        outputs: Tokens generated so far, per request.
        errors: Requests that ended with an error.
        counted: What the connector counted, both roles.
    """

    def __init__(
        self,
        folder: Path,
        num_blocks: int = 33,
        tokens_per_block: int = 4,
        asynchronous: bool = False,
        block_first: bool = False,
        budget_tokens: int = 256,
        host_pages: int = 8,
        **settings: Any,
    ) -> None:
        self.settings = {"host_memory": host_pages * mmap.PAGESIZE, "prefault": False, **settings}
        self.store, self.load = HeldDevice(Direction.STORE), HeldDevice(Direction.LOAD)
        self.longest_hook_s: tuple[float, str] = (0.0, "")
        self._model = PatternModel(LAYERS, num_blocks, tokens_per_block, block_first)
        self._config = self._vllm_config(folder, tokens_per_block, budget_tokens)
        self._config.scheduler_config.async_scheduling = asynchronous
        self._config.cache_config.num_gpu_blocks = num_blocks
        page_bytes = tokens_per_block * 8
        spec = FullAttentionSpec(
            block_size=tokens_per_block, num_kv_heads=1, head_size=1, head_size_v=1, dtype=torch.float32
        )
        tensor = KVCacheTensor(page_bytes * num_blocks * len(LAYERS), list(LAYERS), 0, page_bytes)
        self._kv_config = KVCacheConfig(
            num_blocks, [tensor], [KVCacheGroupSpec(list(LAYERS), spec)], hash_block_size=tokens_per_block
        )
        self._worker = self._build_worker()
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = scheduler_class(
            self._config,
            self._kv_config,
            StructuredOutputManager(self._config),
            tokens_per_block,
            hash_block_size=tokens_per_block,
            log_stats=True,
        )
        self.connector: KVTideConnector = self.scheduler.connector
        for hooks in (self.connector, self._worker):
            self._watch(hooks)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(tokens_per_block, hash_function)
        self._tokens: dict[str, list[int]] = {}
        self._tables: dict[str, list[int]] = {}
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._depth = 2 if asynchronous else 1
        self.outputs: dict[str, list[int]] = {}
        self.errors: list[str] = []
        self.counted = MetricsDelta()
        while self.connector._deciding._manager.capacity == 0:
            self.step()  # the pool is known from the first answers on

    # -- the engine's front ---------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **arguments: Any) -> Request:
        """Queue a request."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **arguments)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._tokens[request_id] = list(prompt)
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request in whatever phase it is."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Plan and compute one step; take in results as late as the kind of scheduling allows."""
        step = self.scheduler.schedule()
        self._queue.append((step, self._execute(step)))
        while len(self._queue) >= self._depth:
            self._update()
        return step

    def drain(self, limit: int = 200) -> None:
        """Step until the engine would go idle, copies finishing by themselves.

        Raises:
            AssertionError: It would not within ``limit`` steps, or the books do not balance.
        """
        self.store.auto_finish = self.load.auto_finish = True
        self.store.finish()
        self.load.finish()
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self._queue:
                break
            self.step()
            while self._queue and not self.scheduler.has_requests():
                self._update()
        assert not self.scheduler.has_requests(), f"not idle after {limit} steps"
        self.store.auto_finish = self.load.auto_finish = False
        self.check()

    def check(self) -> None:
        """Check the connector's books."""
        self.connector._deciding.check_invariants()

    # -- the worker, in the order of vLLM's first model runner ------------------------------------------

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        worker = self._worker
        worker.handle_preemptions(step.kv_connector_metadata)
        worker.bind_connector_metadata(step.kv_connector_metadata)
        self._update_tables(step)
        sampled = {
            request_id: self._forward(request_id, count)
            for request_id, count in step.num_scheduled_tokens.items()
        }
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        req_ids = list(sampled)
        return ModelRunnerOutput(
            req_ids,
            {request_id: index for index, request_id in enumerate(req_ids)},
            list(sampled.values()),
            kv_connector_output=output,
        )

    def _update_tables(self, step: SchedulerOutput) -> None:
        self._computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = list(new_ids[0])
            elif new_ids is not None:
                self._tables[request_id] += new_ids[0]
            self._computed[request_id] = computed

    def _forward(self, request_id: str, count: int) -> list[int]:
        tokens, begin = self._tokens[request_id], self._computed[request_id]
        end = begin + count
        token = self._model.forward(tokens, begin, end, self._tables[request_id], request_id)
        if end < len(tokens):
            return []
        tokens.append(token)
        return [token]

    def _update(self) -> None:
        step, output = self._queue.popleft()
        for outputs in self.scheduler.update_from_output(step, output).values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.counted.merge(stats.kv_connector_stats)
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None and "error" in str(one.finish_reason).lower():
                    self.errors.append(one.request_id)

    # -- building ---------------------------------------------------------------------------------------

    def _vllm_config(self, folder: Path, tokens_per_block: int, budget_tokens: int) -> VllmConfig:
        plugin.register()
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=len(LAYERS),
            vocab_size=128,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        cache = CacheConfig(block_size=tokens_per_block, enable_prefix_caching=True)
        return VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, max_model_len=1024, dtype="float32"
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=budget_tokens,
                max_model_len=1024,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=plugin.CONNECTOR_NAME,
                kv_role="kv_both",
                kv_connector_extra_config=self.settings,
            ),
        )

    def _build_worker(self) -> KVTideConnector:
        worker = KVTideConnector(self._config, KVConnectorRole.WORKER, self._kv_config)
        copiers = {Direction.STORE: self.store, Direction.LOAD: self.load}
        worker._spec = OffloadingSpec(worker._settings, {"cpu": copiers.__getitem__})
        worker.register_kv_caches(self._model.kv_caches)
        self.store.waited.clear()
        self.load.waited.clear()
        return worker

    def _watch(self, connector: KVTideConnector) -> None:
        """Take the CPU time of every hook: what it waits is the copier's business, and is seen there."""

        def watched(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                began_s = time.thread_time()
                result = hook(*args, **kwargs)
                self.longest_hook_s = max(self.longest_hook_s, (time.thread_time() - began_s, name))
                return result

            return call

        for name in HOOKS:
            setattr(connector, name, watched(name, getattr(connector, name)))


HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    "reset_cache",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)
