"""What the engines of a trial are, and what they are asked.

Knows sizes and shares; does not know vLLM's classes, or what is below host memory.
"""

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

BLOCK_TOKENS = 32
PREFIX_TOKENS = 256
NEW_TOKENS = 32
OUTPUT_TOKENS = 8
CONCURRENCY = 4
PREFIXES = 48  # 283 MB of KV cache, in a host pool of 64 MiB
HOST_MEMORY = "64MiB"
ROUND_REQUESTS = 20
ROUND_LIMIT_S = 300.0
FIRST_TOKEN_ID, VOCABULARY = 1_000, 49_000
SEED = 7

ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 64 << 20,
    "num_gpu_blocks_override": 96,  # a little more than what runs together: prefixes do not stay
    "max_model_len": 512,
    "max_num_seqs": CONCURRENCY,
    "skip_tokenizer_init": True,
}


class Requests:
    """Draws requests; the same for both engines.

    Half begin like a prefix of the preparation, a quarter like a request of a moment ago, a quarter is new.
    """

    def __init__(self) -> None:
        self._draw = random.Random(SEED)
        self.prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]
        self._recent: deque[tuple[int, ...]] = deque(maxlen=3)

    def round(self) -> tuple[tuple[int, ...], ...]:
        """Draw the requests of one round."""
        return tuple(self._one() for _ in range(ROUND_REQUESTS))

    def _one(self) -> tuple[int, ...]:
        kind = self._draw.random()
        if kind < 0.5:
            prefix = self._draw.choice(self.prefixes)
        elif kind < 0.75 and self._recent:
            prefix = self._draw.choice(self._recent)
        else:
            prefix = self._tokens(PREFIX_TOKENS)
        self._recent.append(prefix)
        return prefix + self._tokens(NEW_TOKENS)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(count))
