"""Bytes that several ranks have alike lie on the disk once: one rank writes them, all of them read them.

Knows which rank writes which group, and how to find a record in another rank's folder. Does not know why
ranks have the same bytes.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtide.errors import CorruptRecordError, TierUnavailableError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import PrivateTier, Written
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk_folder import folder_of_rank, session_of
from kvtide.tiers.foreign_index import ForeignIndex, Found
from kvtide.tiers.records import ChunkName, RecordHeader, RecordIdentity, Shard, unpack
from kvtide.tiers.slabs import Slabs


def writers_of(shards: Sequence[Sequence[Shard]], rank: int) -> tuple[int, ...]:
    """Tell which rank writes a rank's shard of each group: the lowest that has the same one.

    Args:
        shards: For each rank, its shards as in ``RecordIdentity``.
        rank: Whose.
    """
    return tuple(
        next(other for other, of_other in enumerate(shards) if of_other[group_index] == shard)
        for group_index, shard in enumerate(shards[rank])
    )


def disk_tier(
    folder: Path,
    identities: Sequence[RecordIdentity],
    rank: int,
    limit_bytes: int,
    reserve_bytes: int = 0,
    direct: bool = True,
) -> PrivateTier:
    """Make a rank's disk tier, given what all ranks hold; it is not opened.

    Args:
        folder: Of the instance.
        identities: Of all ranks, in their order.
        rank: Of this worker.
        limit_bytes: Of this rank's files.
        reserve_bytes: Free space of the file system that is never used.
        direct: Go past the page cache where the file system lets us.

    Raises:
        ConfigError: Another instance uses the folder, or it cannot be made.
    """
    shards = [identity.shards for identity in identities]
    writers = writers_of(shards, rank)
    read_by_others = any(rank in writers_of(shards, other) for other in range(len(shards)) if other != rank)
    identity = identities[rank]
    own = DiskTier(folder, identity, limit_bytes, reserve_bytes, direct, rank, read_by_others)
    if set(writers) == {rank}:
        return own
    readers = {writer: DiskReader(folder, writer, identity, direct) for writer in set(writers) - {rank}}
    return Replicas(own, [readers.get(writer) for writer in writers])


class DiskReader:
    """Reads what another rank of the same instance has written.

    Args:
        folder: Of the instance.
        rank: Who writes.
        identity: Of the records.
        direct: Go past the page cache where the file system lets us.
    """

    def __init__(self, folder: Path, rank: int, identity: RecordIdentity, direct: bool = True) -> None:
        self._folder, self._rank = folder, rank
        self._place = folder_of_rank(folder, rank)
        self._identity = identity
        self._slabs = Slabs(self._place, 0, direct=direct, read_only=True)
        self._index: ForeignIndex | None = None
        self._session = b""
        self._lock = threading.Lock()
        self._resets = 0

    def read_into(self, key: OffloadKey, payload: memoryview) -> bool:
        """As ``Tier.read_into``; what is damaged stays where it is, for its writer to forget.

        Raises:
            CorruptRecordError: Not what was written.
            TierUnavailableError: The writer has not opened its folder yet, or the disk refuses.
        """
        trouble: CorruptRecordError | None = None
        for found in self._found(key):
            try:
                if found.place.payload_bytes != payload.nbytes:
                    raise CorruptRecordError(
                        f"{found.place.payload_bytes} bytes, where {payload.nbytes} are due"
                    )
                header = unpack(self._slabs.read(found.place, payload))
                self._identity.check(header, key, payload, found.generation)
            except CorruptRecordError as error:
                trouble = CorruptRecordError(f"{self._place}: {error}")
            else:
                return True
        if trouble is not None:
            raise trouble
        return False

    def has(self, key: OffloadKey) -> bool:
        """Whether there should be a record.

        Raises:
            TierUnavailableError: The writer has not opened its folder yet, or the disk refuses.
        """
        return bool(self._found(key))

    def begin_generation(self) -> None:
        """Serve nothing until the writer has begun as many, and nothing of before."""
        self._resets += 1

    def close(self) -> None:
        """Close every file."""
        if self._index is not None:
            self._index.close()
        self._slabs.close()

    def _found(self, key: OffloadKey) -> list[Found]:
        """Where the record may be, of the generation that this rank too has reached."""
        resets, index = self._resets, self._opened_index()
        found = index.find(key, self._identity.fingerprint)
        if any(one.session != self._session for one in found):
            raise TierUnavailableError(f"{self._place}: opened by another instance")
        return [one for one in found if one.resets == resets]

    def _opened_index(self) -> ForeignIndex:
        """The writer's index, once this run's writer has opened it: an earlier run's says nothing."""
        with self._lock:
            if self._index is None:
                session = session_of(self._folder, self._rank)
                index = ForeignIndex(self._place)
                if index.session() != session:
                    index.close()
                    raise TierUnavailableError(f"{self._place}: not opened yet")
                self._index, self._session = index, session
            return self._index


class Replicas(PrivateTier):
    """A disk tier of a rank some of whose bytes others write.

    Args:
        own: For what this rank writes itself.
        readers: For each group, as in ``RecordIdentity.shards``, who reads what another rank writes; None
            where this one writes.
    """

    def __init__(self, own: DiskTier, readers: Sequence[DiskReader | None]) -> None:
        self._own = own
        self._readers = tuple(readers)
        self._distinct = {reader for reader in readers if reader is not None}

    def open(self) -> None:
        self._own.open()

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        reader = self._reader_of(key)
        if reader is None:
            return self._own.read_into(key, payload, deadline_s)
        return reader.read_into(key, payload)

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        """Write, if that is for this rank to do; the writer's answer covers the others."""
        if self._reader_of(name.key) is not None:
            return Written.THERE_ALREADY
        return self._own.write(name, payload, deadline_s)

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        readers = [self._reader_of(key) for key in keys]
        own = self._own.contains(keys, deadline_s)
        return [
            here if reader is None else reader.has(key)
            for key, reader, here in zip(keys, readers, own, strict=True)
        ]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._own.discard(keys)

    def begin_generation(self, trusted: bool = False) -> None:
        self._own.begin_generation(trusted)
        for reader in self._distinct:
            reader.begin_generation()

    def inventory(self) -> Iterator[RecordHeader]:
        """List what this rank has written; the others list the rest."""
        return self._own.inventory()

    def close(self) -> None:
        for reader in self._distinct:
            reader.close()
        self._own.close()

    @property
    def capacity_bytes(self) -> int:
        return self._own.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._own.used_bytes

    def record_bytes(self, payload_bytes: int) -> int:
        """What a record takes here: nothing when others write every group."""
        return 0 if all(self._readers) else self._own.record_bytes(payload_bytes)

    def _reader_of(self, key: OffloadKey) -> DiskReader | None:
        if len(self._readers) == 1:
            return self._readers[0]
        group_index = split_offload_key(key)[1]
        return self._readers[group_index] if group_index < len(self._readers) else None
