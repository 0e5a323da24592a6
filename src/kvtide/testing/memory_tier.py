"""A tier in a dict, for tests: records as they would lie on a medium, and nothing else."""

import threading
from collections.abc import Iterator, Sequence
from typing import Self

from kvtide.errors import CorruptRecordError, TierFullError
from kvtide.keys import OffloadKey
from kvtide.tiers.base import PrivateTier, TierPlace, Written
from kvtide.tiers.options import TierOptions
from kvtide.tiers.records import (
    HEADER_BYTES,
    ChunkName,
    RecordHeader,
    RecordIdentity,
    next_generation,
    pack,
    served_generation,
    unpack,
)


class Records(dict[OffloadKey, bytearray]):
    """What lies on the medium: by key, header and payload; and which generation is served.

    Attributes:
        generation: Of now.
    """

    generation = 0


class MemoryTier(PrivateTier):
    """Records by key.

    Args:
        identity: Of this rank's records.
        limit_bytes: Of all records.
        records: What a tier before it has left behind; shared with it.

    Attributes:
        records: To be damaged by whoever likes.
    """

    def __init__(
        self,
        identity: RecordIdentity,
        limit_bytes: int = 1 << 62,
        records: Records | None = None,
    ) -> None:
        self._identity = identity
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self.records = Records() if records is None else records

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        TierOptions.read_from(place.options)  # it has none
        return cls(place.identity, place.limit_bytes)

    def open(self) -> None:
        self.records.generation = served_generation(self.records.generation)

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        with self._lock:
            record = self.records.get(key)
            if record is None or not self._is_ours(record):
                return False
            try:
                header = unpack(record)
                payload[:] = memoryview(record)[HEADER_BYTES:]
                self._identity.check(header, key, payload, self.records.generation)
            except (CorruptRecordError, ValueError) as error:
                del self.records[key]
                raise CorruptRecordError(str(error)) from None
            return True

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        with self._lock:
            header = self._identity.header_of(name, payload, self.records.generation)
            there = self.records.get(name.key)
            if there is not None and self._is_ours(there):
                return Written.THERE_ALREADY
            used = self._used_bytes() - len(there or b"")
            if used + HEADER_BYTES + payload.nbytes > self._limit_bytes:
                raise TierFullError(f"{used} of {self._limit_bytes} bytes are used")
            self.records[name.key] = bytearray(pack(header)) + payload
            return Written.NEW

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        with self._lock:
            return [key in self.records and self._is_ours(self.records[key]) for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        with self._lock:
            for key in keys:
                self.records.pop(key, None)

    def begin_generation(self, trusted: bool = False) -> None:
        with self._lock:
            self.records.generation = next_generation(self.records.generation, trusted)

    @property
    def capacity_bytes(self) -> int:
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    def inventory(self) -> Iterator[RecordHeader]:
        with self._lock:
            records = [
                bytes(record[:HEADER_BYTES]) for record in self.records.values() if self._is_ours(record)
            ]
        for record in records:
            try:
                yield unpack(record)
            except CorruptRecordError:
                continue

    def close(self) -> None:
        """Do nothing: the records stay with whoever has them."""

    def _used_bytes(self) -> int:
        return sum(map(len, self.records.values()))

    def _is_ours(self, record: bytearray) -> bool:
        """Whether it is of this model, rank and generation; a damaged one is for the read to refuse."""
        try:
            header = unpack(record)
        except CorruptRecordError:
            return True
        return self._identity.owns(header) and header.generation == self.records.generation
