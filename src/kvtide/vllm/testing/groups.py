"""One KV cache group of an engine under test, and vLLM's own description of it.

Knows what a block of each kind of group holds. Does not know where its bytes are, nor what they ought to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

WORD_BYTES = 8
"""What a layer keeps of a token is counted in words."""


class Kind(Enum):
    """What the layers of a group keep."""

    FULL = "full attention"
    MLA = "latent attention"
    WINDOW = "sliding window"
    WINDOW_MLA = "sliding window, latent"
    CHUNKED = "chunked-local attention"
    MAMBA = "recurrent"
    REPLAY = "sliding window, replayed"
    """Never cached: after a hit the last window is computed again, for these layers alone."""
    RING = "ring"
    """One block a request, for the tokens since the last multiple of ``window_tokens``: never cached."""


LATENT = (Kind.MLA, Kind.WINDOW_MLA, Kind.REPLAY)
"""The same bytes on every rank."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group.

    Attributes:
        layer_names: Its layers, on the first stage of a pipeline.
        tokens_per_block: Tokens a block holds on one rank; of recurrent layers, between two states that
            are kept; of a ring, how many it holds.
        kind: What its layers keep.
        window_tokens: With a window, tokens a query sees, itself included; with chunked-local attention,
            tokens of a chunk; of a ring, tokens of what it collects.
        words: Words a token takes in each layer; of recurrent layers, a state.
        draft: Of a drafter: what it keeps at a token depends on the next token too.
        context_ranks: Ranks over which the tokens of a block are spread.
        guesses: Of recurrent layers, tokens of a drafter for which a state is kept beside the last one.
        checkpoints: Of recurrent layers, whether they can leave the state in the middle of a step too, where
            a prompt is looked for later.
        padded_words: Words of a block of one layer, padding included; 0 for as many as it takes.
        split: Whether kernels see a block as two, where a block of a layer is one dense piece.
        words_by_layer: Instead of ``words``, where layers differ in what they keep.
        heads: Of attention that is not latent, heads that share the words of a token; equal parts.
    """

    layer_names: tuple[str, ...]
    tokens_per_block: int
    kind: Kind = Kind.FULL
    window_tokens: int | None = None
    words: int = 1
    draft: bool = False
    context_ranks: int = 1
    guesses: int = 0
    checkpoints: bool = False
    padded_words: int = 0
    split: bool = False
    words_by_layer: tuple[int, ...] = ()
    heads: int = 1

    @property
    def block_tokens(self) -> int:
        """Tokens that one block spans, all ranks together."""
        return self.tokens_per_block * self.context_ranks

    @property
    def slots_per_block(self) -> int:
        """What a block of one layer on one rank holds: tokens, or a state."""
        return 1 if self.kind is Kind.MAMBA else self.tokens_per_block

    @property
    def page_words(self) -> int:
        """Words of a block of the largest layer, without padding."""
        return self.slots_per_block * max(self.words_of_layers)

    @property
    def words_of_layers(self) -> tuple[int, ...]:
        """Words a token, or a state, takes in each layer."""
        return self.words_by_layer or (self.words,) * len(self.layer_names)

    @property
    def offloaded(self) -> bool:
        """Whether it can be cached by prefix."""
        return self.kind not in (Kind.RING, Kind.REPLAY)

    def first_read(self, position: int) -> int:
        """First token whose KV is read by a query at ``position``."""
        if self.window_tokens is None:
            return 0
        if self.kind in (Kind.CHUNKED, Kind.RING):
            return position - position % self.window_tokens
        return max(0, position - self.window_tokens + 1)

    def shards(self) -> list[slice]:
        """Ranks that hold the same tokens, for each of the ranks over which a block is spread."""
        return [slice(index, None, self.context_ranks) for index in range(self.context_ranks)]

    def shard_of(self, rank: int) -> int:
        """Which of ``shards`` a rank belongs to."""
        return rank % self.context_ranks

    def tokens_of(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Tokens between ``begin`` and ``end`` that ranks of this shard hold."""
        first = begin + (shard - begin) % self.context_ranks
        return np.arange(first, end, self.context_ranks)

    def places(self, table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Where tokens are, in slots counted over all blocks."""
        blocks = table[tokens // self.block_tokens]
        places: np.ndarray = blocks * self.slots_per_block + tokens % self.block_tokens // self.context_ranks
        return places

    def column(self, token_count: int) -> int:
        """Which block of a table the last of ``token_count`` tokens is in."""
        return (token_count - 1) // self.block_tokens

    def spec(self, layer_names: Sequence[str], page_words: int = 0) -> KVCacheSpec:
        """Describe it as vLLM does.

        Args:
            layer_names: Its layers, on the rank that is described.
            page_words: Words of a block of one layer, padding included; 0 for as many as it takes.
        """
        specs = [self._layer_spec(words, page_words) for words in self.words_of_layers]
        if not self.words_by_layer:
            return specs[0]
        by_name = dict(zip(layer_names, specs, strict=True))
        return UniformTypeKVCacheSpecs(block_size=self.tokens_per_block, kv_cache_specs=by_name)

    def _layer_spec(self, words: int, page_words: int) -> KVCacheSpec:
        padded = max(page_words, self.padded_words)
        padded_bytes = padded * WORD_BYTES if padded > self.slots_per_block * words else None
        if self.kind is Kind.MAMBA:
            return MambaSpec(
                block_size=self.tokens_per_block,
                shapes=((2 * words,),),
                dtypes=(torch.float32,),
                page_size_padded=padded_bytes,
                mamba_cache_mode="align",
                num_speculative_blocks=self.guesses,
                num_prefill_checkpoint_blocks=int(self.checkpoints),
                prefill_checkpoint_alignment=1 if self.checkpoints else None,
            )
        common = {
            "block_size": self.tokens_per_block,
            "num_kv_heads": self.heads,
            "head_size": 2 * words if self.kind in LATENT else words // self.heads,
            "dtype": torch.float32,
            "page_size_padded": padded_bytes,
        }
        match self.kind:
            case Kind.FULL:
                return FullAttentionSpec(**common)
            case Kind.MLA:
                return MLAAttentionSpec(**common)
            case Kind.WINDOW:
                return SlidingWindowSpec(**common, dcp_sharded=False, sliding_window=self.window_tokens)
            case Kind.WINDOW_MLA:
                return SlidingWindowMLASpec(**common, dcp_sharded=False, sliding_window=self.window_tokens)
            case Kind.REPLAY:
                window = {"sliding_window": self.window_tokens, "bounded_replay": True}
                return SlidingWindowMLASpec(**common, **window, dcp_sharded=False)
            case Kind.CHUNKED:
                return ChunkedLocalAttentionSpec(
                    **common, dcp_sharded=False, attention_chunk_size=self.window_tokens
                )
            case Kind.RING:
                return CircularBufferSpec(**common, dcp_sharded=False)
