"""A real vLLM ``Scheduler`` with one of the two connectors, stepped by hand.

Real requests, real KV cache manager, real block pool; there is no model and no copier: every step is
computed and every copy done at once, unless it is told to hold the loads. Knows how to build and step;
does not know what is measured.
"""

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import float32
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.scheduler.answers import Jobs, all_done, jobs_of, pool_ready
from benchmarks.scheduler.hooks import HookClock
from benchmarks.scheduler.vocabulary import NATIVE, OURS, TOKENS_PER_BLOCK
from kvtide.vllm import plugin

LAYER = "layers.0"
DEVICE_BLOCKS = 48_000
BUDGET_TOKENS = 131_200  # a step: the long prompt is computed in one
LIMIT_TOKENS = 140_000
RUNNING_REQUESTS = 512
CHUNK_BYTES = CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT
PAGE_BYTES = TOKENS_PER_BLOCK * 8


class Engine:
    """One arm.

    Args:
        arm: ``kvtide`` or ``vllm``.
        chunks: Of the host pool.
        prompt_only: Whether what is generated stays out of the pool.
        folder: For a model's configuration.

    Attributes:
        clock: Of the connector's hooks.
        hold_loads: Loads do not end while this is set.
        schedule_us: Wall time of the last ``schedule()``.
        update_us: Wall time of the last ``update_from_output()``.
        jobs: Of the last step.
        stored_chunks: Chunks of all stores so far.
    """

    def __init__(self, arm: str, chunks: int, prompt_only: bool, folder: Path) -> None:
        self.arm = arm
        self.chunks = chunks
        self.clock = HookClock()
        self.hold_loads = False
        self.schedule_us = self.update_us = 0.0
        self.jobs = Jobs([], [], [], [])
        self.stored_chunks = 0
        self._held: list[tuple[list[str], list[Any]]] = []
        config = vllm_config(arm, chunks, prompt_only, folder)
        config.cache_config.num_gpu_blocks = DEVICE_BLOCKS
        spec = FullAttentionSpec(
            block_size=TOKENS_PER_BLOCK, num_kv_heads=1, head_size=1, head_size_v=1, dtype=float32
        )
        kv_config = KVCacheConfig(
            DEVICE_BLOCKS,
            [KVCacheTensor(PAGE_BYTES * DEVICE_BLOCKS, [LAYER], 0, PAGE_BYTES)],
            [KVCacheGroupSpec([LAYER], spec)],
            hash_block_size=TOKENS_PER_BLOCK,
        )
        self.scheduler = Scheduler(
            config,
            kv_config,
            StructuredOutputManager(config),
            TOKENS_PER_BLOCK,
            hash_block_size=TOKENS_PER_BLOCK,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.clock.watch(self.connector)
        if arm == OURS:
            self.tell(pool_ready(chunks, CHUNK_BYTES))

    @property
    def ours(self) -> bool:
        """Whether the connector is ours."""
        return self.arm == OURS

    def tell(self, answers: Any) -> None:
        """Hand the connector what workers say, outside of a step."""
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=answers))

    def noted(self, metadata: Any) -> Jobs:
        """Read what a step tells the workers, and count what is stored."""
        jobs = jobs_of(metadata)
        self.stored_chunks += sum(jobs.stored_chunks)
        return jobs

    def resident_chunks(self) -> int:
        """Count the chunks in the pool, by the connector's own account."""
        if not self.ours:
            return len(self.connector.scheduler.manager._policy.chunks)
        self.connector.get_kv_connector_stats()
        return round(self.clock.counted.get("pool_used_bytes|", 0) / CHUNK_BYTES)

    def evicted_chunks(self) -> int:
        """Count the chunks that have left the pool so far."""
        if not self.ours:
            return self.stored_chunks - self.resident_chunks()
        self.connector.get_kv_connector_stats()
        return round(self.clock.counted.get("evicted_chunks|", 0))

    def add(self, request_id: str, hashes: Sequence[bytes], prompt_tokens: int, max_tokens: int = 1) -> None:
        """Queue a request whose blocks have ``hashes``, as far as it has tokens for them."""
        one = request(request_id, hashes, prompt_tokens, max_tokens)
        # Its lists of tokens are the engine's: no hook shall pay for their being collected.
        gc.freeze()
        self.scheduler.add_request(one)

    def step(self) -> SchedulerOutput:
        """Plan a step, compute it, do its copies and take in the results."""
        began_ns = time.perf_counter_ns()
        planned = self.scheduler.schedule()
        self.schedule_us = (time.perf_counter_ns() - began_ns) / 1e3
        self.jobs = self.noted(planned.kv_connector_metadata)
        output = self._computed(planned)
        began_ns = time.perf_counter_ns()
        self.scheduler.update_from_output(planned, output)
        self.update_us = (time.perf_counter_ns() - began_ns) / 1e3
        return planned

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, and what was planned at their end."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.drain()

    def drain(self, limit: int = 50) -> None:
        """Step until nothing is left to do.

        Raises:
            RuntimeError: It does not end.
        """
        self.hold_loads = False
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.connector.has_pending_push_work():
                return
            self.step()
        raise RuntimeError(f"{self.arm}: not idle after {limit} steps")

    def forget_device(self) -> None:
        """Empty the engine's own prefix cache, so that the next hit is the connector's.

        Raises:
            RuntimeError: Requests still hold blocks.
        """
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError(f"{self.arm}: the device's prefix cache is in use")

    def _computed(self, planned: SchedulerOutput) -> ModelRunnerOutput:
        loading, keys = self._ended()
        connector_output = KVConnectorOutput(
            finished_recving=set(loading) or None,
            kv_connector_worker_meta=all_done(keys, self.ours) if keys else None,
        )
        sampled: dict[str, list[int]] = {}
        for request_id, count in planned.num_scheduled_tokens.items():
            one = self.scheduler.requests[request_id]
            # vLLM has counted the step's tokens by now.
            sampled[request_id] = [7] if count and one.num_computed_tokens >= one.num_tokens else []
        if not sampled:
            output = ModelRunnerOutput(**vars(EMPTY_MODEL_RUNNER_OUTPUT))
            output.kv_connector_output = connector_output
            return output
        ids = list(sampled)
        return ModelRunnerOutput(
            ids,
            {request_id: index for index, request_id in enumerate(ids)},
            list(sampled.values()),
            kv_connector_output=connector_output,
        )

    def _ended(self) -> tuple[list[str], list[Any]]:
        """Name the requests and jobs whose copies have ended by now."""
        self._held.append((self.jobs.loading, self.jobs.keys))
        if self.hold_loads:
            return [], []
        held, self._held = self._held, []
        return [one for loading, _ in held for one in loading], [key for _, keys in held for key in keys]


def request(request_id: str, hashes: Sequence[bytes], prompt_tokens: int, max_tokens: int = 1) -> Request:
    """Build vLLM's own request; its hashes are given, not computed."""

    def hash_new_blocks(one: Request) -> list[bytes]:
        return list(hashes[len(one.block_hashes) : one.num_tokens // TOKENS_PER_BLOCK])

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id, [1] * prompt_tokens, sampling, None, block_hasher=hash_new_blocks)


def vllm_config(arm: str, chunks: int, prompt_only: bool, folder: Path) -> VllmConfig:
    """Build the engine's configuration; the arms differ in their connector only."""
    plugin.register()
    LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=128,
        max_position_embeddings=LIMIT_TOKENS,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    settings = {OURS: _our_settings, NATIVE: _native_settings}[arm](chunks, prompt_only)
    names = {OURS: plugin.CONNECTOR_NAME, NATIVE: "OffloadingConnector"}
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, max_model_len=LIMIT_TOKENS, dtype="float32"
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=RUNNING_REQUESTS,
            max_num_batched_tokens=BUDGET_TOKENS,
            max_model_len=LIMIT_TOKENS,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        cache_config=CacheConfig(block_size=TOKENS_PER_BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=names[arm], kv_role="kv_both", kv_connector_extra_config=settings
        ),
    )


def _our_settings(chunks: int, prompt_only: bool) -> dict[str, Any]:
    return {
        "host_memory": chunks * CHUNK_BYTES,
        "eviction_policy": "lru",  # the yardstick's: both do the same work
        "store_queue": chunks * CHUNK_BYTES,
        "offload_prompt_only": prompt_only,
        "defer_limit_s": 600,
    }


def _native_settings(chunks: int, prompt_only: bool) -> dict[str, Any]:
    return {"cpu_bytes_to_use": chunks * CHUNK_BYTES, "offload_prompt_only": prompt_only}
