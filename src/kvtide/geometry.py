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


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group.

    Attributes:
        group_index: Position among the engine's groups.
        kind: What its layers keep.
        tokens_per_block: Tokens one logical block spans (context parallelism included).
        blocks_per_chunk: Blocks that are offloaded as one.
        tokens_per_hash: Tokens one entry of ``request.block_hashes`` spans.
        tokens_per_chunk: Tokens one chunk spans.
        hashes_per_chunk: Entries of ``request.block_hashes`` one chunk spans.
    """

    group_index: int
    kind: GroupKind
    tokens_per_block: int
    blocks_per_chunk: int
    tokens_per_hash: int
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

    def run(self, block_hashes: list[bytes], start: int, stop: int) -> ChunkRun:
        """View chunks ``[start, stop)`` of a request."""
        return ChunkRun(block_hashes, self.group_index, self.hashes_per_chunk, start, stop)

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
    """

    groups: tuple[GroupGeometry, ...]
    shard_count: int = 1
    restore_interval: int = field(init=False)

    def __post_init__(self) -> None:
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
    if restored_tokens <= computed_tokens:
        return range(0)
    first = computed_tokens // group.tokens_per_chunk
    return range(first, -(-restored_tokens // group.tokens_per_chunk))
