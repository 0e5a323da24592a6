"""Prompts: those of which no two begin alike, and those that begin as an earlier one did.

Seeded: the next run asks the same. Knows token ids; does not know what becomes of them.
"""

import numpy as np

from benchmarks.frame.engine_child import Batch
from benchmarks.serve.vocabulary import BLOCK_TOKENS, Load

SPECIAL_TOKENS = 32  # ids below may mean something to a model


class Prompts:
    """Batches for one set of engines.

    Args:
        load: What a batch looks like.
        vocabulary: Token ids are below this.
        seed: Another one shares no block with this one.
    """

    def __init__(self, load: Load, vocabulary: int, seed: int) -> None:
        self._load = load
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._beginnings: set[tuple[int, ...]] = set()
        self._kept: list[tuple[int, ...]] = []

    def fresh(self, forget: bool = True) -> Batch:
        """Return a batch in which nothing can be a hit."""
        prompts = tuple(self._new(self._load.prompt_tokens) for _ in range(self._load.requests))
        return Batch(prompts, self._load.output_tokens, forget)

    def keep(self, share: int) -> Batch:
        """Return a batch whose prompts later ones begin with, up to this share of theirs."""
        tokens = self._load.prefix_tokens(share)
        self._kept = [self._new(tokens) for _ in range(self._load.requests)]
        # One block more: the last one of a prompt need not be stored before the request has ended.
        return Batch(tuple(prefix + self._new(BLOCK_TOKENS) for prefix in self._kept), 1, forget=True)

    def hits(self, share: int) -> Batch:
        """Return a batch of which this share, in percent, was kept; the rest is new every time."""
        tokens = self._load.prefix_tokens(share)
        prompts = tuple(
            prefix[:tokens] + self._new(self._load.prompt_tokens - tokens) for prefix in self._kept
        )
        return Batch(prompts, self._load.output_tokens, forget=True)

    def _new(self, tokens: int) -> tuple[int, ...]:
        while True:
            drawn = tuple(self._random.integers(SPECIAL_TOKENS, self._vocabulary, tokens).tolist())
            if drawn[:BLOCK_TOKENS] not in self._beginnings:
                self._beginnings.add(drawn[:BLOCK_TOKENS])
                return drawn
