"""Names: of chunks, and of the media they are on.

Knows how a block hash and a group index become an ``OffloadKey``, and how a prefix is walked chunk by
chunk without building any key. Does not know what a chunk holds or where it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, overload


class Medium(Enum):
    """Where bytes are; values are vLLM's names of media."""

    DEVICE = "GPU"
    HOST = "CPU"
    STORAGE = "STORAGE"


OffloadKey = NewType("OffloadKey", bytes)
"""A block hash followed by 4 bytes of group index, big-endian: the name of a chunk outside kvtide."""

GROUP_INDEX_BYTES = 4

LEAD_ALIGNMENT = 64
"""Where chunks are named together with the hashes before them, these begin at a multiple of so many."""


def make_offload_key(block_hash: bytes, group_index: int) -> OffloadKey:
    """Pack the hash of a chunk's last block and its group index into one name."""
    return OffloadKey(block_hash + group_index.to_bytes(GROUP_INDEX_BYTES, "big"))


def split_offload_key(key: OffloadKey) -> tuple[bytes, int]:
    """Undo ``make_offload_key``: ``(block_hash, group_index)``."""
    return bytes(key[:-GROUP_INDEX_BYTES]), int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")


@dataclass(slots=True)
class ChunkRun(Sequence[OffloadKey]):
    """Neighbouring chunks of one prefix, as a view over the engine's own block hashes.

    Behaves as a sequence of keys and builds none until one is asked for: making 8,192 keys costs more
    than all else in a lookup. ``block_hashes`` grows while a request runs; the view covers
    ``[start, stop)`` chunks and never changes (not frozen: that costs as much as the rest of making one).

    Attributes:
        block_hashes: The engine's chained hashes; entry i covers tokens [0, (i + 1) * tokens_per_hash).
        group_index: KV cache group.
        hashes_per_chunk: How many entries of ``block_hashes`` one chunk spans.
        start: First chunk, counted from the beginning of the request.
        stop: One past the last chunk.
        lookahead: How many hashes further on a chunk's name is, where its bytes depend on tokens after it.
    """

    block_hashes: Sequence[bytes] = field(repr=False)
    group_index: int
    hashes_per_chunk: int
    start: int
    stop: int
    lookahead: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: int) -> OffloadKey: ...
    @overload
    def __getitem__(self, index: slice) -> "ChunkRun": ...
    def __getitem__(self, index: int | slice) -> "OffloadKey | ChunkRun":
        if isinstance(index, slice):
            low, high, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a run is neighbouring chunks: step {step} is not 1")
            return self.between(self.start + low, self.start + max(low, high))
        if not -len(self) <= index < len(self):
            raise IndexError(f"chunk {index} of a run of {len(self)}")
        return make_offload_key(self.hash_of(self.start + index % len(self)), self.group_index)

    def between(self, start: int, stop: int) -> "ChunkRun":
        """The same prefix, other chunks; ``start`` and ``stop`` count from the request's beginning."""
        return ChunkRun(
            self.block_hashes, self.group_index, self.hashes_per_chunk, start, stop, self.lookahead
        )

    def hash_of(self, chunk_index: int) -> bytes:
        """The hash that names chunk ``chunk_index``, counted from the request's beginning."""
        return self.block_hashes[(chunk_index + 1) * self.hashes_per_chunk - 1 + self.lookahead]

    def parent_hash(self) -> bytes | None:
        """Hash of the chunk before the run's first one; None at the beginning of a prompt."""
        return self.hash_of(self.start - 1) if self.start else None

    def hashes(self) -> list[bytes]:
        """One hash per chunk, in prefix order."""
        step, first = self.hashes_per_chunk, self.lookahead
        return list(self.block_hashes[(self.start + 1) * step - 1 + first : self.stop * step + first : step])

    def positions(self, stride: int) -> tuple[Sequence[bytes], int, int]:
        """See the prompt at a finer grain, ``stride`` positions a chunk, one hash a position.

        Returns:
            Hashes from the beginning of the prompt (at least as many as are meant; no copy where each
            hash is one position), the run's first position and one past its last.
        """
        step = self.hashes_per_chunk // stride
        first = step - 1 + self.lookahead
        hashes = self.block_hashes[first::step] if first else self.block_hashes
        return hashes, self.start * stride, self.stop * stride

    def frozen(self) -> "ChunkRun":
        """A run that no longer depends on the request: what an open job keeps."""
        return ChunkRun(
            tuple(self.block_hashes[: self.stop * self.hashes_per_chunk + self.lookahead]),
            self.group_index,
            self.hashes_per_chunk,
            self.start,
            self.stop,
            self.lookahead,
        )


@dataclass(frozen=True, slots=True)
class PackedKeys(Sequence[OffloadKey]):
    """Keys that are seldom looked at, as the bytes they are made of.

    Attributes:
        runs: Group index and hashes, one after another in prefix order. The keys of a run come deepest
            first: that is the order in which chunks leave.
        hash_bytes: Bytes of one hash.
    """

    runs: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    hash_bytes: int = 1

    def __len__(self) -> int:
        return sum(len(hashes) for _, hashes in self.runs) // self.hash_bytes

    @overload
    def __getitem__(self, index: int) -> OffloadKey: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[OffloadKey, ...]: ...
    def __getitem__(self, index: int | slice) -> OffloadKey | tuple[OffloadKey, ...]:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[OffloadKey]:
        for group_index, hashes in self.runs:
            for end in range(len(hashes), 0, -self.hash_bytes):
                yield make_offload_key(hashes[end - self.hash_bytes : end], group_index)
