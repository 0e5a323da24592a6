"""Records: one shard of one chunk as it lies below host memory, and how it proves itself.

A record is a header and a payload. The header says of what the payload is a part (fingerprint, generation,
key, shard) and carries what is needed to rebuild the prefix tree from records alone (parent, chunk index);
checksums cover both. Knows bytes; does not know media, slots or what is evicted.

The layout of version 1, little-endian, ``HEADER_BYTES`` in all, is pinned by a test:

    offset  bytes
         0      8  magic
         8      2  format version
        10      2  bytes of a block hash
        12      4  group index
        16     32  fingerprint
        48      8  generation; its highest bit says that it is in doubt
        56     32  block hash, zero-filled
        88     32  parent's block hash, zero-filled; all zero for the first chunk of a prompt
       120      4  chunk index
       124      2  shard index
       126      2  shard count
       128      8  bytes of the payload
       136     16  xxh3-128 of the payload
       152      8  seconds since the epoch when it was written
       160     88  zero
       248      8  xxh3-64 of the 248 bytes before
"""

import functools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from kvtide.errors import CorruptRecordError
from kvtide.keys import LEAD_ALIGNMENT, OffloadKey, make_offload_key, split_offload_key

MAGIC = b"KVTIDE\r\n"
FORMAT_VERSION = 1
HEADER_BYTES = 256
HASH_BYTES = 32
"""The longest block hash there is a place for (sha256)."""

DOUBTFUL = 1 << 63
"""Beside the number of a generation: its records may be of other weights than the fingerprint says, and are
served only by the process that wrote them."""

_FIELDS = struct.Struct("<8sHHI32sQ32s32sIHHQ16sQ88x")
_CHECK = struct.Struct("<Q")
_NO_HASH = bytes(HASH_BYTES)
assert _FIELDS.size + _CHECK.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class ChunkName:
    """Which chunk, and where it stands in its prefix.

    Attributes:
        key: Block hash and group.
        parent_hash: Block hash of the chunk before it, None for the first of a prompt.
        chunk_index: Counted from the beginning of the prompt.
    """

    key: OffloadKey
    parent_hash: bytes | None
    chunk_index: int


@dataclass(frozen=True, slots=True)
class RecordRun:
    """Neighbouring chunks of one prefix and group, by name: what a tier may handle in one call.

    Attributes:
        group_index: Of the group.
        start: Index of the first chunk, counted from the beginning of the prompt.
        hashes: Block hashes, one a chunk.
        parent_hash: Of the chunk before the first, None at the beginning of a prompt.
        lead: Hashes of the chunks before the first, back to the last multiple of ``LEAD_ALIGNMENT``; shorter,
            and possibly empty, where whoever asks does not know them.
    """

    group_index: int
    start: int
    hashes: tuple[bytes, ...] = field(repr=False)
    parent_hash: bytes | None = None
    lead: tuple[bytes, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.hashes)

    def keys(self) -> list[OffloadKey]:
        """Name each chunk."""
        return [make_offload_key(block_hash, self.group_index) for block_hash in self.hashes]

    def names(self) -> list[ChunkName]:
        """Name each chunk, and say where it stands."""
        parents = (self.parent_hash, *self.hashes)[: len(self.hashes)]
        return [
            ChunkName(key, parent, index)
            for index, (key, parent) in enumerate(zip(self.keys(), parents, strict=True), self.start)
        ]

    def between(self, start: int, stop: int) -> "RecordRun":
        """Some of its chunks; ``start`` and ``stop`` count from the beginning of the prompt."""
        first, last = start - self.start, stop - self.start
        before = self.lead + self.hashes[:first]
        lead = before[max(0, len(before) - start % LEAD_ALIGNMENT) :]
        parent = before[-1] if before else self.parent_hash
        return RecordRun(self.group_index, start, self.hashes[first:last], parent, lead)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of each chunk this is.

    Attributes:
        index: From 0.
        count: Shards that make a chunk; ranks with identical bytes hold the same one.
    """

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a header says.

    Attributes:
        fingerprint: ``bytes[32]``, of all that shapes the bytes beside the tokens.
        generation: A reset begins a new one (``next_generation``).
        name: Which chunk.
        shard: Which part of it.
        payload_bytes: Length of the payload.
        payload_digest: ``bytes[16]``, xxh3-128 of it.
        written_at_s: Seconds since the epoch.
    """

    fingerprint: bytes
    generation: int
    name: ChunkName
    shard: Shard
    payload_bytes: int
    payload_digest: bytes
    written_at_s: int = 0


def next_generation(generation: int, trusted: bool) -> int:
    """Tell which generation a reset begins: what is in doubt stays so until the process ends."""
    doubtful = not trusted or generation & DOUBTFUL
    return (generation & ~DOUBTFUL) + 1 | (DOUBTFUL if doubtful else 0)


def served_generation(generation: int) -> int:
    """Tell which generation is served after a restart: not the last one, if that is in doubt."""
    return (generation & ~DOUBTFUL) + 1 if generation & DOUBTFUL else generation


def latest(generations: Iterable[int]) -> int:
    """Tell the one that was begun last; 0 of none."""
    return max(generations, key=lambda generation: generation & ~DOUBTFUL, default=0)


@functools.lru_cache(256)
def _shard(index: int, count: int) -> Shard:
    """One and the same object for all the headers that say so: an inventory has many."""
    return Shard(index, count)


def digest_of(payload: memoryview) -> bytes:
    """``bytes[16]``: xxh3-128 of ``uint8[n]``."""
    return xxhash.xxh3_128_digest(payload)


def pack(header: RecordHeader) -> bytes:
    """Write a header down: ``bytes[HEADER_BYTES]``.

    Raises:
        ValueError: A hash or a number for which the format has no place.
    """
    block_hash, group_index = split_offload_key(header.name.key)
    parent_hash = header.name.parent_hash or b""
    if not 0 < len(block_hash) <= HASH_BYTES or len(parent_hash) not in (0, len(block_hash)):
        raise ValueError(f"block hashes of {len(block_hash)} and {len(parent_hash)} bytes do not fit")
    if len(header.fingerprint) != HASH_BYTES:
        raise ValueError(f"a fingerprint has {HASH_BYTES} bytes, not {len(header.fingerprint)}")
    try:
        packed = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            len(block_hash),
            group_index,
            header.fingerprint,
            header.generation,
            block_hash,
            parent_hash,
            header.name.chunk_index,
            header.shard.index,
            header.shard.count,
            header.payload_bytes,
            header.payload_digest,
            header.written_at_s,
        )
    except struct.error as error:
        raise ValueError(f"{header}: {error}") from None
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def unpack(packed: bytes | bytearray | memoryview) -> RecordHeader:
    """Read a header.

    Raises:
        CorruptRecordError: Not a header of this format, or not the one that was written.
    """
    if len(packed) < HEADER_BYTES:
        raise CorruptRecordError(f"a header of {len(packed)} bytes, where {HEADER_BYTES} are due")
    body = bytes(packed[: _FIELDS.size])
    (
        magic,
        version,
        hash_bytes,
        group_index,
        fingerprint,
        generation,
        block_hash,
        parent_hash,
        chunk_index,
        shard_index,
        shard_count,
        payload_bytes,
        payload_digest,
        written_at_s,
    ) = _FIELDS.unpack(body)
    if magic != MAGIC:
        raise CorruptRecordError("no record begins here")
    if version != FORMAT_VERSION:
        raise CorruptRecordError(f"format version {version}; this kvtide reads {FORMAT_VERSION}")
    (check,) = _CHECK.unpack_from(packed, _FIELDS.size)
    if check != xxhash.xxh3_64_intdigest(body):
        raise CorruptRecordError("the header is damaged")
    if not 0 < hash_bytes <= HASH_BYTES:
        raise CorruptRecordError(f"a block hash of {hash_bytes} bytes")
    parent = None if parent_hash == _NO_HASH else parent_hash[:hash_bytes]
    return RecordHeader(
        fingerprint,
        generation,
        ChunkName(make_offload_key(block_hash[:hash_bytes], group_index), parent, chunk_index),
        _shard(shard_index, shard_count),
        payload_bytes,
        payload_digest,
        written_at_s,
    )


@dataclass(frozen=True, slots=True)
class RecordIdentity:
    """What the records of one rank have in common, and what each is held against when it is read.

    Attributes:
        fingerprint: ``bytes[32]``.
        shards: This rank's part of a chunk, for each group; a single one is for all groups.
    """

    fingerprint: bytes
    shards: tuple[Shard, ...] = (Shard(),)

    def shard_of(self, key: OffloadKey) -> Shard | None:
        """Tell this rank's part of a chunk; None for a group that the model does not have."""
        if len(self.shards) == 1:
            return self.shards[0]
        group_index = split_offload_key(key)[1]
        return self.shards[group_index] if group_index < len(self.shards) else None

    def header_of(
        self, name: ChunkName, payload: memoryview, generation: int, written_at_s: int = 0
    ) -> RecordHeader:
        """Describe a payload, ``uint8[n]``, that is about to be written.

        Raises:
            ValueError: Of a group that there is not.
        """
        shard = self.shard_of(name.key)
        if shard is None:
            raise ValueError(f"{name}: there are {len(self.shards)} groups")
        return RecordHeader(
            self.fingerprint,
            generation,
            name,
            shard,
            payload.nbytes,
            digest_of(payload),
            written_at_s,
        )

    def owns(self, header: RecordHeader) -> bool:
        """Whether a record is of this model and rank, of whatever generation."""
        return (header.fingerprint, header.shard) == (self.fingerprint, self.shard_of(header.name.key))

    def check(self, header: RecordHeader, key: OffloadKey, payload: memoryview, generation: int) -> None:
        """Hold a record that was read against what was asked for.

        Args:
            header: As read.
            key: Asked for.
            payload: ``uint8[n]``, as read.
            generation: Of now; a record of another one is of before a reset.

        Raises:
            CorruptRecordError: It is another record, or not what was written; says in what.
        """
        found = (header.fingerprint, header.generation, header.name.key, header.shard)
        wanted = (self.fingerprint, generation, key, self.shard_of(key))
        names = ("fingerprint", "generation", "key", "shard")
        for what, one, other in zip(names, found, wanted, strict=True):
            if one != other:
                raise CorruptRecordError(f"a record of another {what}")
        if header.payload_bytes != payload.nbytes:
            raise CorruptRecordError(f"{header.payload_bytes} bytes, where {payload.nbytes} are due")
        if header.payload_digest != digest_of(payload):
            raise CorruptRecordError("the payload is damaged")
