"""Words and sizes of the benchmark ``serving``: arms, parts, and what one sample asks for.

Knows numbers alone; imports neither an engine nor a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WITH, STOCK, WITHOUT = "kvtide", "stock", "none"
ARMS = (WITH, STOCK, WITHOUT)
CONNECTED = (WITH, STOCK)
COLD_ARMS = (WITH, WITHOUT)

COLD, WARM, LONG = "cold", "warm", "long"
"""Parts: no hit to be had; hits; hits at contexts of 32k tokens."""

NO_HITS, HALF, MOST = 0, 50, 90
SHARES = (NO_HITS, HALF, MOST)
"""Percent of prompt tokens that are hits."""

BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU backend takes; a chunk is one block."""

MIN_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Load:
    """What a batch of one part looks like.

    Attributes:
        requests: Handed over at once.
        prompt_tokens: Of each.
        output_tokens: Of each.
        concurrent: As many contexts fit the engine's pool; the others wait.
        host_memory_mib: Of either connector.
        rounds: That are to be undisturbed.
        other_rounds: Of them, those that also measure fewer hits and the engine without a connector, as
            one of all benchmarks and alone.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrent: int
    host_memory_mib: int
    rounds: int
    other_rounds: tuple[int, int]

    def prefix_tokens(self, share: int) -> int:
        """Tokens of a prompt that are hits: whole blocks."""
        return self.prompt_tokens * share // 100

    @property
    def context_blocks(self) -> int:
        """Blocks of a request that has generated all."""
        return -(-(self.prompt_tokens + self.output_tokens) // BLOCK_TOKENS)


LOADS: Mapping[str, Load] = {
    # From the third batch on each evicts as much as it stores.
    COLD: Load(6, 512, 64, 6, 128, 0, (0, 0)),
    WARM: Load(6, 960, 32, 6, 512, 10, (0, 5)),
    LONG: Load(8, 32_000, 192, 2, 256, 10, (0, 3)),
}


def engine_arguments(part: str) -> dict[str, Any]:
    """Return what vLLM is told in every arm of a part."""
    load = LOADS[part]
    long = part == LONG
    blocks = load.concurrent * load.context_blocks
    return {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 192 << 20,
        "num_gpu_blocks_override": blocks + max(16, load.context_blocks // 2),
        "max_model_len": 33_000 if long else 1024,
        # At long contexts memory is the limit, as it is in a server; elsewhere nothing waits.
        "max_num_seqs": 64 if long else load.concurrent,
        "max_num_batched_tokens": 4096 if long else 2048,
        "skip_tokenizer_init": True,
    }


def connector(part: str, arm: str) -> dict[str, Any] | None:
    """Return vLLM's ``kv_transfer_config`` of an arm; None without one."""
    load = LOADS[part]
    if arm == WITHOUT:
        return None
    if arm == WITH:
        # LRU stores everything, as vLLM's connector does. The adaptive policy would not: it soon learns that
        # nothing of prompts without hits is asked for again.
        settings: dict[str, Any] = {"host_memory": f"{load.host_memory_mib}MiB", "eviction_policy": "lru"}
        if part != COLD:
            settings["offload_prompt_only"] = True
        return {
            "kv_connector": "KVTideConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "SameCopies",
            "spec_module_path": "benchmarks.serve.stock",
            "cpu_bytes_to_use": load.host_memory_mib << 20,
            "eviction_policy": "lru",
            "offload_prompt_only": True,
        },
    }
