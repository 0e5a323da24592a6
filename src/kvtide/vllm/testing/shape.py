"""What an engine under test looks like, and the configuration that vLLM wants for it."""

import copy
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtide.vllm import plugin
from kvtide.vllm.testing import sibling
from kvtide.vllm.testing.groups import WORD_BYTES, GroupShape, Kind

MAX_MODEL_LEN = 1024


class Runner(Enum):
    """In whose order the worker hooks are called (vLLM 0.32)."""

    V1 = "v1"
    V1_DRAFTING = "v1-drafting"
    """Results are taken before ``wait_for_save``, as with speculative decoding."""
    V2 = "v2"
    """Blocks are zeroed and copied before ``handle_preemptions``; resumed requests count as new."""


class _NewerRunnerConfig(VllmConfig):  # type: ignore[misc]
    """A configuration whose model runner is the newer one, whatever platform and environment say."""

    @property
    def use_v2_model_runner(self) -> bool:
        return True


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
        token_first: Within a block of a layer all heads of a token lie together.
        budget_tokens: Tokens a step may compute.
        priority: Schedule by priority instead of by arrival.
        siblings: Whether another connector loads too.
        with_events: Somebody listens to KV events.
        host_pages: Pages of host memory of each rank; kvtide maps whole ones.
        family: What kind of model it is, for counting.
        stages: Of a pipeline; the ranks are shared out among them.
        guesses: Tokens that a drafter guesses ahead; 0 without one.
        match_tokens: Tokens of a block hash, where they are fewer than those of any block.
        retention_tokens: Behind windows and of states, the engine's own cache keeps what is needed at each
            multiple of so many tokens; 0: at the ends of prompts only; None: everything.
        names_limit: Chunks that are remembered to be in a shared tier; None for as many as in production.
        settings: Of kvtide, beside the host memory.
    """

    num_blocks: int = 33
    groups: tuple[GroupShape, ...] = (GroupShape(("layers.0", "layers.1", "layers.2"), 4),)
    asynchronous: bool = False
    runner: Runner = Runner.V1
    rank_count: int = 1
    block_first: bool = False
    token_first: bool = False
    budget_tokens: int = 256
    priority: bool = False
    siblings: Siblings = Siblings.NONE
    with_events: bool = False
    host_pages: int = 8
    family: str = "by hand"
    stages: int = 1
    guesses: int = 0
    match_tokens: int | None = None
    retention_tokens: int | None = None
    names_limit: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> KVCacheLayout:
        """How vLLM calls the order of the bytes."""
        return KVCacheLayout[("BL" if self.block_first else "LB") + ("NHC" if self.token_first else "HNC")]

    @property
    def tokens_per_block(self) -> int:
        """The least common multiple of all groups' blocks: what a hit is counted in."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def blocks_per_tokens(self) -> int:
        """Blocks that ``tokens_per_block`` tokens take at most, in all groups that grow with a request."""
        grow = [group for group in self.groups if group.kind is not Kind.RING]
        return sum(self.tokens_per_block // group.block_tokens for group in grow)

    @property
    def longest_tokens(self) -> int:
        """Tokens of one request that fit the device, whatever its groups let go of."""
        kept = [group for group in self.groups if group.kind is not Kind.RING]
        blocks = self.num_blocks - 3 - (len(self.groups) - len(kept))
        # Guesses want room beyond the last token.
        blocks -= len(kept) * -(-2 * self.guesses // min(group.block_tokens for group in kept))
        blocks -= sum(group.guesses for group in kept)
        return blocks // self.blocks_per_tokens * self.tokens_per_block

    @property
    def queue_depth(self) -> int:
        """Steps that may be under way at once."""
        if self.asynchronous:
            return self.stages + (1 if self.runner is Runner.V2 or self.stages == 1 else 0)
        return self.stages

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter has layers of its own, and not just a look at the prompt."""
        return any(group.draft for group in self.groups)

    @property
    def spare_tokens(self) -> int:
        """Tokens after the last one of a request that a step may run to."""
        return 2 + 3 * (1 + self.guesses)

    def kv_cache_configs(self, config: VllmConfig) -> list[KVCacheConfig]:
        """Describe the KV cache of each rank, laid out by vLLM; the ranks differ in the names of layers."""
        # Where layers are outermost, vLLM wants all pages alike and pads them.
        page_words = 0
        if not self.block_first:
            page_words = max(max(group.page_words, group.padded_words) for group in self.groups)
        configs = []
        for rank in range(self.rank_count):
            stage = rank * self.stages // self.rank_count
            groups = [
                KVCacheGroupSpec(
                    names := [f"{name}.stage{stage}" if stage else name for name in group.layer_names],
                    group.spec(names, page_words),
                    is_eagle_group=group.draft,
                )
                for group in self.groups
            ]
            one = get_kv_cache_config_from_groups(config, groups, self.num_blocks * WORD_BYTES << 20)
            one.kv_cache_layout = config.cache_config.kv_cache_layout
            sizes = resolve_kv_cache_block_sizes(one, config)
            one.hash_block_size = sizes[1]
            one.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(one, config, *sizes)
            configs.append(one)
        return configs

    def checkpoint(self, config: KVCacheConfig, first_token: int, end_token: int) -> tuple[int, int] | None:
        """Say where recurrent layers leave a state in the middle of a step, as vLLM's backends work it out.

        Returns:
            Tokens after which, and in which block of a table; None for nowhere.
        """
        group = next((one for one in self.groups if one.checkpoints), None)
        if group is None:
            return None
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [end_token],
            [end_token - first_token],
            config.hash_block_size,
            group.tokens_per_block,
            1,
            self.has_drafter,
            config.cache_hit_alignment_tokens,
        )
        return (first_token + offset, column) if offset else None

    def vllm_config(self, folder: Path) -> VllmConfig:
        """Configure an engine of ``rank_count`` ranks.

        Args:
            folder: For a model's configuration.
        """
        plugin.register()
        sibling.register()
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=4,  # no rank has the same as another but of latents
            num_hidden_layers=sum(len(group.layer_names) for group in self.groups),
            vocab_size=128,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        write_weights(folder, 0)
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
            cache_config=self._cache_config(),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=self._transfer_config(),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            if self.with_events
            else None,
            speculative_config=self._speculative_config(),
        )
        if self.runner is Runner.V2:
            config.__class__ = _NewerRunnerConfig
        config.scheduler_config.async_scheduling = self.asynchronous
        config.cache_config.num_gpu_blocks = self.num_blocks
        parallel = config.parallel_config
        parallel.world_size = self.rank_count
        parallel.pipeline_parallel_size = self.stages
        parallel.tensor_parallel_size = self.rank_count // self.stages
        parallel.decode_context_parallel_size = max(group.context_ranks for group in self.groups)
        return config

    def _cache_config(self) -> CacheConfig:
        sparse = any(group.kind in (Kind.WINDOW, Kind.WINDOW_MLA, Kind.MAMBA) for group in self.groups)
        config = CacheConfig(
            block_size=min(group.tokens_per_block for group in self.groups if group.offloaded),
            enable_prefix_caching=True,
            prefix_match_unit=self.match_tokens,
            prefix_cache_retention_interval=self.retention_tokens if sparse else 0,
        )
        config.num_gpu_blocks_override = self.num_blocks
        config.kv_cache_layout = self.layout.name
        if recurrent := [group for group in self.groups if group.kind is Kind.MAMBA]:
            config.mamba_cache_mode, config.mamba_block_size = "align", recurrent[0].tokens_per_block
        return config

    def _speculative_config(self) -> SpeculativeConfig | None:
        if not self.guesses:
            return None
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=self.guesses, prompt_lookup_max=2)
        if self.has_drafter:
            # Only the name is looked at from here on; a drafter's own configuration would want its weights.
            config.method = "eagle"
        return config

    def _transfer_config(self) -> KVTransferConfig:
        host_memory = self.host_pages * mmap.PAGESIZE * self.rank_count
        own = {
            "kv_connector": plugin.CONNECTOR_NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host_memory": host_memory,
                "prefault": False,
                "adviser": False,
                **self.settings,
            },
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


def write_weights(folder: Path, version: int) -> None:
    """Put weights beside a model's configuration: by its bytes a fingerprint tells versions apart."""
    header = b"{}"
    body = version.to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)


def of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """The configuration as one rank's process sees it."""
    mine = copy.copy(config)
    mine.parallel_config = copy.copy(config.parallel_config)
    mine.parallel_config.rank = rank
    return mine
