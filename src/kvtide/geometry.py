"""Tokens, blocks and chunks of each KV cache group, and what a reader needs of them.

One function, ``chunks_needed``, says which chunks a request must get to continue at a token count;
lookup and store both call it, so nothing is written that cannot be read.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from kvtide.errors import ConfigError
from kvtide.keys import ChunkRun


class GroupKind(Enum):
    """What the layers of a group keep; values are vLLM's own names (``get_kv_cache_spec_kind``)."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    CHUNKED_LOCAL = "chunked_local_attention"
    MAMBA = "mamba"


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group that is offloaded.

    Attributes:
        group_index: Position among the groups that are offloaded.
        kind: What its layers keep.
        tokens_per_block: Tokens one logical block spans (context parallelism included).
        blocks_per_chunk: Blocks that are offloaded as one.
        tokens_per_hash: Tokens one entry of ``request.block_hashes`` spans.
        window_tokens: With a sliding window, tokens a query sees, itself included; None for all before it.
            Recurrent layers keep one state where the last token ends: what a window of 2 would need.
        local_tokens: Chunked-local attention: a query sees from the last multiple of so many tokens on.
        lookahead_hashes: How many hashes beyond a chunk's own name it: with a drafter, what a chunk holds
            depends on the tokens after it too, and only a later hash stands for those.
        engine_index: Position among the engine's groups, where some are not offloaded.
        tokens_per_chunk: Tokens one chunk spans.
        hashes_per_chunk: Entries of ``request.block_hashes`` one chunk spans.
    """

    group_index: int
    kind: GroupKind
    tokens_per_block: int
    blocks_per_chunk: int
    tokens_per_hash: int
    window_tokens: int | None = None
    local_tokens: int | None = None
    lookahead_hashes: int = 0
    engine_index: int = -1
    tokens_per_chunk: int = field(init=False)
    hashes_per_chunk: int = field(init=False)

    def __post_init__(self) -> None:
        if self.blocks_per_chunk < 1:
            raise ConfigError("blocks_per_chunk", self.blocks_per_chunk, "give 1 or more")
        if self.tokens_per_block % self.tokens_per_hash:
            raise ConfigError(
                "tokens_per_hash",
                self.tokens_per_hash,
                f"must divide the block size of group {self.group_index} ({self.tokens_per_block} tokens)",
            )

        # Asked several times a lookup: not worked out each time.
        object.__setattr__(self, "tokens_per_chunk", self.tokens_per_block * self.blocks_per_chunk)
        object.__setattr__(self, "hashes_per_chunk", self.tokens_per_chunk // self.tokens_per_hash)
        if self.engine_index < 0:
            object.__setattr__(self, "engine_index", self.group_index)
        if self.local_tokens is not None and self.local_tokens % self.tokens_per_chunk:
            raise ConfigError(
                "attention_chunk_size",
                self.local_tokens,
                f"must be a multiple of the {self.tokens_per_chunk} tokens of a chunk",
            )

    @property
    def keeps_states(self) -> bool:
        """Whether a block holds the state after its last token, not its tokens: only boundaries count."""
        return self.kind is GroupKind.MAMBA

    def run(self, block_hashes: list[bytes], start: int, stop: int) -> ChunkRun:
        """View chunks ``[start, stop)`` of a request."""
        return ChunkRun(
            block_hashes, self.group_index, self.hashes_per_chunk, start, stop, self.lookahead_hashes
        )

    @property
    def looks_back(self) -> bool:
        """Whether a reader needs all chunks before a point, and not only the last ones."""
        return self.window_tokens is None and self.local_tokens is None

    @property
    def window_chunks(self) -> int | None:
        """Chunks before a whole number of chunks that a reader needs at most; None for all."""
        if self.local_tokens is not None:
            return self.local_tokens // self.tokens_per_chunk
        if self.window_tokens is None:
            return None
        return -(-(self.window_tokens - 1) // self.tokens_per_chunk)

    def first_needed_token(self, restored_tokens: int) -> int:
        """First token whose KV a reader needs who continues after ``restored_tokens``."""
        if self.local_tokens is not None:
            return restored_tokens - restored_tokens % self.local_tokens
        if self.window_tokens is None:
            return 0
        return max(0, restored_tokens - (self.window_tokens - 1))

    def full_chunks(self, token_count: int) -> int:
        """How many whole chunks ``token_count`` tokens fill."""
        return token_count // self.tokens_per_chunk

    def hashed_chunks(self, hash_count: int) -> int:
        """How many chunks ``hash_count`` entries of ``request.block_hashes`` can name."""
        return max(0, hash_count - self.lookahead_hashes) // self.hashes_per_chunk


@dataclass(frozen=True, slots=True)
class OtherGroup:
    """A group that is not offloaded: it holds what no other request can use, out of the same blocks.

    Attributes:
        engine_index: Position among the engine's groups.
        tokens_per_block: Tokens one block spans; None for one block a request, however long.
        window_tokens: Tokens a query sees, itself included; None for all before it.
    """

    engine_index: int
    tokens_per_block: int | None = None
    window_tokens: int | None = None

    def held_blocks(self, token_count: int) -> int:
        """Count the blocks that a request of so many computed tokens holds."""
        return self.all_blocks(token_count) - self._passed_blocks(token_count)

    def all_blocks(self, token_count: int) -> int:
        """Count the blocks that so many tokens take, those a window has passed included."""
        return 1 if self.tokens_per_block is None else -(-token_count // self.tokens_per_block)

    def _passed_blocks(self, token_count: int) -> int:
        if self.tokens_per_block is None or self.window_tokens is None:
            return 0
        return max(0, token_count - (self.window_tokens - 1)) // self.tokens_per_block


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """All groups of a model that are offloaded, and how many ranks hold a shard of each chunk.

    Attributes:
        groups: The groups.
        shard_count: Ranks.
        others: The groups that are not.
        engine_interval: The engine's own hits are multiples of so many tokens.
        takes_hits_back: The engine may drop a hit of its own that it has told us of: where a group computes
            its last tokens again after a hit, one that is no longer than these is none.
        restore_interval: Tokens between the points at which every group can be restored.
        is_one_prefix: One group that needs all chunks before a point: what can be read is a prefix.
        finest: The group with the smallest chunks.
    """

    groups: tuple[GroupGeometry, ...]
    shard_count: int = 1
    others: tuple[OtherGroup, ...] = ()
    engine_interval: int = 1
    takes_hits_back: bool = False
    restore_interval: int = field(init=False)
    is_one_prefix: bool = field(init=False)
    finest: GroupGeometry = field(init=False)

    def __post_init__(self) -> None:
        # Where groups differ, or look back a window, each must have what a reader needs.
        several = len(self.groups) > 1 or not all(group.looks_back for group in self.groups)
        object.__setattr__(self, "is_one_prefix", not several)
        finest = min(self.groups, key=lambda group: group.tokens_per_chunk)
        object.__setattr__(self, "finest", finest)
        interval = math.lcm(self.engine_interval, *(group.tokens_per_chunk for group in self.groups))
        object.__setattr__(self, "restore_interval", interval)

    def positions_per_chunk(self, group: GroupGeometry) -> int:
        """Count the positions of the catalog, the coarsest that fit every group, that a chunk spans."""
        return group.hashes_per_chunk // math.gcd(*(one.hashes_per_chunk for one in self.groups))

    def restore_point(self, token_count: int) -> int:
        """The deepest restore point at or below ``token_count`` tokens."""
        return token_count - token_count % self.restore_interval


def chunks_needed(group: GroupGeometry, computed_tokens: int, restored_tokens: int) -> range:
    """Chunks of ``group`` that a reader needs who has ``computed_tokens`` and wants ``restored_tokens``.

    A first chunk that the reader has in part and a last one that it wants in part are included whole:
    the copy leaves the rest of them alone.

    Returns:
        Chunk indices from the request's beginning; empty when nothing is needed.
    """
    # What a reader has computed it has kept, as far back as it looks.
    begin = max(computed_tokens, group.first_needed_token(restored_tokens))
    if restored_tokens <= begin:
        return range(0)
    return range(begin // group.tokens_per_chunk, -(-restored_tokens // group.tokens_per_chunk))
