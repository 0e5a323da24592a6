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
    SLIDING_WINDOW = "sliding_window"
    MAMBA = "mamba"


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group.

    Attributes:
        group_index: Position among the engine's groups.
        kind: What its layers keep.
        tokens_per_block: Tokens one logical block spans (context parallelism included).
        blocks_per_chunk: Blocks that are offloaded as one.
        tokens_per_hash: Tokens one entry of ``request.block_hashes`` spans.
        window_tokens: With a sliding window, tokens a query sees, itself included; None for all before it.
            Recurrent layers keep one state where the last token ends: what a window of 2 would need.
        tokens_per_chunk: Tokens one chunk spans.
        hashes_per_chunk: Entries of ``request.block_hashes`` one chunk spans.
    """

    group_index: int
    kind: GroupKind
    tokens_per_block: int
    blocks_per_chunk: int
    tokens_per_hash: int
    window_tokens: int | None = None
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

    @property
    def keeps_states(self) -> bool:
        """Whether a block holds the state after its last token, not its tokens: only boundaries count."""
        return self.kind is GroupKind.MAMBA

    def run(self, block_hashes: list[bytes], start: int, stop: int) -> ChunkRun:
        """View chunks ``[start, stop)`` of a request."""
        return ChunkRun(block_hashes, self.group_index, self.hashes_per_chunk, start, stop)

    @property
    def window_chunks(self) -> int | None:
        """Chunks before a whole number of chunks that a reader needs to continue there; None for all."""
        if self.window_tokens is None:
            return None
        return -(-(self.window_tokens - 1) // self.tokens_per_chunk)

    def first_needed_token(self, restored_tokens: int) -> int:
        """First token whose KV a reader needs who continues after ``restored_tokens``."""
        if self.window_tokens is None:
            return 0
        return max(0, restored_tokens - (self.window_tokens - 1))

    def full_chunks(self, token_count: int) -> int:
        """How many whole chunks ``token_count`` tokens fill."""
        return token_count // self.tokens_per_chunk


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """All groups of a model, and how many ranks hold a shard of each chunk.

    Attributes:
        groups: The groups.
        shard_count: Ranks.
        restore_interval: Tokens between the points at which every group can be restored.
        is_one_prefix: One group that needs all chunks before a point: what can be read is a prefix.
        finest: The group with the smallest chunks.
    """

    groups: tuple[GroupGeometry, ...]
    shard_count: int = 1
    restore_interval: int = field(init=False)
    is_one_prefix: bool = field(init=False)
    finest: GroupGeometry = field(init=False)

    def __post_init__(self) -> None:
        # Where groups differ, or look back a window, each must have what a reader needs.
        several = len(self.groups) > 1 or any(group.window_tokens is not None for group in self.groups)
        object.__setattr__(self, "is_one_prefix", not several)
        finest = min(self.groups, key=lambda group: group.tokens_per_chunk)
        object.__setattr__(self, "finest", finest)
        interval = math.lcm(*(group.tokens_per_chunk for group in self.groups))
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
