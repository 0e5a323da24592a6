"""What an engine under test looks like, and the configuration that vLLM wants for it."""

import copy
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from kvtide.vllm import plugin
from kvtide.vllm.testing import sibling
from kvtide.vllm.testing.memory import GroupShape

MAX_MODEL_LEN = 1024


class Runner(Enum):
    """In whose order the worker hooks are called (vLLM 0.32)."""

    V1 = "v1"
    V1_DRAFTING = "v1-drafting"
    """Results are taken before ``wait_for_save``, as with speculative decoding."""
    V2 = "v2"
    """Blocks are zeroed and copied before ``handle_preemptions``; resumed requests count as new."""


class Siblings(Enum):
    """Whether another connector loads too, in vLLM's own ``MultiConnector``."""

    NONE = "none"
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class EngineShape:
    """An engine under test.

    Attributes:
        num_blocks: Of the device, the null block included.
        groups: KV cache groups.
        asynchronous: Plan a step before the results of the last one are in.
        runner: In whose order the workers are called.
        rank_count: Ranks, each with a shard of its own.
        block_first: All layers of a block lie together.
        budget_tokens: Tokens a step may compute.
        priority: Schedule by priority instead of by arrival.
        siblings: Whether another connector loads too.
        with_events: Somebody listens to KV events.
        host_pages: Pages of host memory of each rank; kvtide maps whole ones.
        settings: Of kvtide, beside the host memory.
    """

    num_blocks: int = 33
    groups: tuple[GroupShape, ...] = (GroupShape(("layers.0", "layers.1", "layers.2"), 4),)
    asynchronous: bool = False
    runner: Runner = Runner.V1
    rank_count: int = 1
    block_first: bool = False
    budget_tokens: int = 256
    priority: bool = False
    siblings: Siblings = Siblings.NONE
    with_events: bool = False
    host_pages: int = 8
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_block(self) -> int:
        """Of the first group; the engine's hashes are of this grain."""
        return self.groups[0].tokens_per_block

    def kv_cache_config(self) -> KVCacheConfig:
        """Describe the KV cache of one rank."""
        tensors, groups = [], []
        for group in self.groups:
            names = list(group.layer_names)
            common = {
                "block_size": group.tokens_per_block,
                "num_kv_heads": 1,
                "head_size": 1,
                "head_size_v": 1,
                "dtype": torch.float32,
            }
            spec = (
                FullAttentionSpec(**common)
                if group.window_tokens is None
                else SlidingWindowSpec(**common, sliding_window=group.window_tokens)
            )
            size = group.page_bytes * self.num_blocks * len(names)
            tensors.append(KVCacheTensor(size, names, 0, group.page_bytes))
            groups.append(KVCacheGroupSpec(names, spec))
        return KVCacheConfig(self.num_blocks, tensors, groups, hash_block_size=self.tokens_per_block)

    def vllm_config(self, folder: Path) -> VllmConfig:
        """Configure an engine of ``rank_count`` ranks.

        Args:
            folder: For a model's configuration.
        """
        plugin.register()
        sibling.register()
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=sum(len(group.layer_names) for group in self.groups),
            vocab_size=128,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype="float32"
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=min(16, self.budget_tokens),
                max_num_batched_tokens=self.budget_tokens,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                policy="priority" if self.priority else "fcfs",
            ),
            cache_config=CacheConfig(block_size=self.tokens_per_block, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=self._transfer_config(),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            if self.with_events
            else None,
        )
        config.scheduler_config.async_scheduling = self.asynchronous
        config.cache_config.num_gpu_blocks = self.num_blocks
        # Not the sizes of tensor or pipeline parallelism, which this release refuses: the ranks alone.
        config.parallel_config.world_size = self.rank_count
        return config

    def _transfer_config(self) -> KVTransferConfig:
        host_memory = self.host_pages * mmap.PAGESIZE * self.rank_count
        own = {
            "kv_connector": plugin.CONNECTOR_NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_memory": host_memory, "prefault": False, **self.settings},
        }
        if self.siblings is Siblings.NONE:
            return KVTransferConfig(**own)
        both = [own, {"kv_connector": sibling.CONNECTOR_NAME, "kv_role": "kv_both"}]
        if self.siblings is Siblings.BEFORE:
            both.reverse()
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            # Within MultiConnector a child cannot set the policy that the scheduler reads.
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": both},
        )


def of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """The configuration as one rank's process sees it."""
    mine = copy.copy(config)
    mine.parallel_config = copy.copy(config.parallel_config)
    mine.parallel_config.rank = rank
    return mine
