"""A private disk: records in slots of slab files, an index beside them, a limit that holds.

One folder belongs to one instance, and in it a folder to each rank. Knows which key is in which slot; what is
evicted is decided elsewhere and comes as ``discard``. A slot that is being read or written is not handed out
again before that has ended.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ByteSize, Field

from kvtide.errors import CorruptRecordError, TierError, TierFullError, TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.tiers.base import PrivateTier, TierPlace, Written
from kvtide.tiers.disk_entries import DiskEntries
from kvtide.tiers.disk_folder import FolderLock, folder_of_rank
from kvtide.tiers.disk_index import DiskIndex
from kvtide.tiers.disk_opening import opened
from kvtide.tiers.options import TierOptions
from kvtide.tiers.records import ChunkName, RecordHeader, RecordIdentity, next_generation, pack, unpack
from kvtide.tiers.slabs import ROW_BYTES, Place, Slabs, slot_bytes_of

logger = logging.getLogger(__name__)

INDEX_BYTES = 4 << 20
"""Of the limit, for what the index takes beside its rows."""

RECLAIMED_PER_WRITE = 64
"""Slots of an earlier generation that a write gives back beside its own work."""


class DiskOptions(TierOptions):
    """``options`` of a disk that is named by the path of its class.

    Attributes:
        folder: Of the instance.
        reserve_bytes: Free space of the file system that is never used.
        direct: Go past the page cache where the file system lets us.
    """

    HINTS: ClassVar[Mapping[str, str]] = {
        "folder": "give the path of a folder",
        "reserve_bytes": "give a size such as 1GiB",
        "direct": "give true or false",
    }
    SHOWN = frozenset({"folder", "reserve_bytes", "direct"})

    folder: Path
    reserve_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    direct: bool = True


class DiskTier(PrivateTier):
    """Records in slots.

    Args:
        folder: Of the instance; made with mode 0700 when it is not there.
        identity: Of this rank's records.
        limit_bytes: Of this rank's files, the index among them; never exceeded (below 64 MiB the index may
            take a few MiB more).
        reserve_bytes: Free space of the file system that is never used.
        direct: Go past the page cache where the file system lets us.
        rank: Of this worker; its records are in a folder of their own.
        read_by_others: Other ranks look for records here (``Replicas``).

    Attributes:
        generation: Of now.

    Raises:
        ConfigError: Another instance uses the folder, or it cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        identity: RecordIdentity,
        limit_bytes: int,
        reserve_bytes: int = 0,
        direct: bool = True,
        rank: int = 0,
        read_by_others: bool = False,
    ) -> None:
        self._identity = identity
        self._limit_bytes = limit_bytes - min(INDEX_BYTES, limit_bytes // 16)
        self._reserve_bytes, self._direct = reserve_bytes, direct
        self._read_by_others = read_by_others
        self._folder = folder_of_rank(folder, rank)
        self._lock = FolderLock(folder, rank)
        self._changed = threading.Condition()
        self._entries = DiskEntries()
        self._former: list[DiskEntries] = []  # of before resets of this run
        self._used_bytes = 0
        self._stale: list[Place] = []  # of earlier generations
        self._spare: deque[Place] = deque()  # of other fingerprints, the oldest first
        self._busy: Counter[Place] = Counter()
        self._doomed: set[Place] = set()  # discarded while somebody read them
        self._writing: set[OffloadKey] = set()
        self._resets = 0
        self.generation = 0
        # Made in ``open``, which may be slow.
        self._slabs: Slabs
        self._index: DiskIndex
        self._owners: frozenset[int] = frozenset()
        self._opened = False

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """From ``{"folder": path}``, and what else ``DiskOptions`` has."""
        options = DiskOptions.read_from(place.options)
        return cls(
            options.folder,
            place.identity,
            place.limit_bytes,
            options.reserve_bytes,
            options.direct,
            rank=place.rank,
        )

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        DiskOptions.read_from(options)

    def open(self) -> None:
        slabs = Slabs(self._folder, self._limit_bytes, self._reserve_bytes, self._direct)
        try:
            index, found = opened(self._folder, slabs, self._identity)
            if self._read_by_others:
                index.make_findable()
                index.set_facts({"session": self._lock.session, "resets": bytes(8)})
        except TierError:
            slabs.close()
            raise
        self._slabs, self._index = slabs, index
        self._owners, self.generation = found.owners, found.generation
        self._entries, self._stale, self._spare = found.entries, found.stale, deque(found.spare)
        self._used_bytes = sum(self.record_bytes(place.payload_bytes) for place in found.entries.values())
        self._opened = True
        while slabs.allocated_bytes > self._limit_bytes:  # which was higher in an earlier run
            if not (given := self._taken_stale(RECLAIMED_PER_WRITE) or self._oldest_spare()):
                break  # what is left is evicted by whoever decides on that
            self._free(given)

    # -- the contract -----------------------------------------------------------------------------

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        with self._changed:
            place, generation = self._entries.get(key), self.generation
            if place is None:
                return False
            self._busy[place] += 1
        try:
            if place.payload_bytes != payload.nbytes:
                raise CorruptRecordError(f"{place.payload_bytes} bytes, where {payload.nbytes} are due")
            header = unpack(self._slabs.read(place, payload))
            self._identity.check(header, key, payload, generation)
        except CorruptRecordError as error:
            self._forget(key, place)
            raise CorruptRecordError(f"{self._folder}: {error}; the record is forgotten") from None
        finally:
            self._release(place)
        return True

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        with self._changed:
            generation = self.generation
            if not self._changed.wait_for(lambda: name.key not in self._writing, deadline_s):
                raise TierUnavailableError(f"{self._folder}: the same key is being written")
            if name.key in self._entries:
                return Written.THERE_ALREADY
            self._writing.add(name.key)
        try:
            self._free(self._taken_stale(RECLAIMED_PER_WRITE))
            self._keep(name, payload, generation)
        finally:
            with self._changed:
                self._writing.discard(name.key)
                self._changed.notify_all()
        return Written.NEW

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        with self._changed:
            return [key in self._entries for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        with self._changed:
            gone = [self._taken_out(key) for key in keys if key in self._entries]
        self._free(gone)

    def begin_generation(self, trusted: bool = False) -> None:
        with self._changed:
            self._former.append(self._entries)
            self._entries, self._used_bytes = DiskEntries(), 0
            self.generation = next_generation(self.generation, trusted)
            generation = self.generation
        self._index.set_generation(self._owners, generation)
        if self._read_by_others:
            # Only now: who has begun as many generations may be served what is of this one, and no other.
            self._index.set_facts({"resets": (self._resets + 1).to_bytes(8, "big")})
        self._resets += 1

    def inventory(self) -> Iterator[RecordHeader]:
        for place, packed in self._index.headers(self._owners, self.generation):
            try:
                header = unpack(packed)
            except CorruptRecordError:
                continue  # the row is damaged; whoever reads the record will know
            if self._entries.get(header.name.key) == place:
                yield header

    def close(self) -> None:
        if self._opened:
            with self._changed:
                self._changed.wait_for(lambda: not self._writing and not self._busy)
            self._index.close()
            self._slabs.close()
        self._lock.release()

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity_bytes if self._opened else self._limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def record_bytes(self, payload_bytes: int) -> int:
        return slot_bytes_of(payload_bytes) + ROW_BYTES

    # -- inside -----------------------------------------------------------------------------------

    def _keep(self, name: ChunkName, payload: memoryview, generation: int) -> None:
        place = self._free_place(payload.nbytes)
        try:
            header = self._identity.header_of(name, payload, generation, int(time.time()))
            self._slabs.write(place, pack(header), payload)
            self._index.put(place, header)
        except BaseException:  # also an interrupt: the slot would be nobody's for ever
            self._slabs.give_back(place)
            raise
        with self._changed:
            if generation == self.generation:
                self._entries[name.key] = place
                self._used_bytes += self.record_bytes(place.payload_bytes)
            else:
                self._stale.append(place)

    def _free_place(self, payload_bytes: int) -> Place:
        """Take a slot; where there is none, an earlier generation or another fingerprint makes room."""
        while True:
            try:
                return self._slabs.take(payload_bytes)
            except TierFullError:
                given = self._taken_stale(RECLAIMED_PER_WRITE) or self._taken_spare(payload_bytes)
                if not given:
                    raise
                self._free(given)

    def _taken_stale(self, count: int) -> list[Place]:
        with self._changed:
            taken = [self._stale.pop() for _ in range(min(count, len(self._stale)))]
            while self._former and len(taken) < count:
                taken += self._former[-1].take(count - len(taken))
                if not self._former[-1]:
                    self._former.pop()
        return taken

    def _oldest_spare(self) -> list[Place]:
        with self._changed:
            return [self._spare.popleft()] if self._spare else []

    def _taken_spare(self, payload_bytes: int) -> list[Place]:
        """Choose records of other fingerprints that make room, the oldest first; none when they cannot."""
        missing_bytes = self._slabs.missing_bytes(payload_bytes)
        with self._changed:
            spare_bytes = sum(self.record_bytes(place.payload_bytes) for place in self._spare)
            if missing_bytes is None or missing_bytes > spare_bytes:
                # Others have taken the room: only a slot of the very size is of use.
                chosen = next((one for one in self._spare if one.payload_bytes == payload_bytes), None)
                taken = [] if chosen is None else [chosen]
                self._spare = deque(one for one in self._spare if one != chosen)
                return taken
            taken = []
            while self._spare and missing_bytes > 0:
                taken.append(self._spare.popleft())
                missing_bytes -= self.record_bytes(taken[-1].payload_bytes)
                if taken[-1].payload_bytes == payload_bytes:
                    break
        return taken

    def _taken_out(self, key: OffloadKey) -> Place:
        place = self._entries.pop(key)
        self._used_bytes -= self.record_bytes(place.payload_bytes)
        return place

    def _forget(self, key: OffloadKey, place: Place) -> None:
        """Discard a record that was read, unless another one has come under its key meanwhile."""
        with self._changed:
            if self._entries.get(key) != place:
                return
            self._taken_out(key)
        self._free([place])

    def _release(self, place: Place) -> None:
        with self._changed:
            self._busy[place] -= 1
            if self._busy[place]:
                return
            del self._busy[place]
            doomed = place in self._doomed
            self._doomed.discard(place)
            self._changed.notify_all()
        if doomed:
            self._slabs.give_back(place)

    def _free(self, places: Sequence[Place]) -> None:
        """Let slots be taken again, those that are being read when that has ended."""
        if not places:
            return
        try:
            self._index.remove(places)
        except TierError as error:
            logger.warning("%s", error)  # a row too many is found out by who reads it
        for place in places:
            with self._changed:
                if self._busy[place]:
                    self._doomed.add(place)
                    continue
                del self._busy[place]
            self._slabs.give_back(place)
