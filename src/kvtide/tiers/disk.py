"""A private disk: records in slots of slab files, an index beside them, a limit that holds.

One folder belongs to one instance, and in it a folder to each rank. Knows which key is in which slot; what is
evicted is decided elsewhere and comes as ``discard``. A slot that is being read or written is not handed out
again before that has ended.
"""

import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtide.errors import ConfigError, CorruptRecordError, TierError, TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.tiers.base import PrivateTier, Written
from kvtide.tiers.disk_index import FILE_NAME, DiskIndex
from kvtide.tiers.records import (
    DOUBTFUL,
    ChunkName,
    RecordHeader,
    RecordIdentity,
    next_generation,
    pack,
    served_generation,
    unpack,
)
from kvtide.tiers.slabs import Place, Slabs, slot_bytes_of

logger = logging.getLogger(__name__)

RECLAIMED_PER_WRITE = 64
"""Slots of an earlier generation that a write gives back beside its own work."""


class DiskTier(PrivateTier):
    """Records in slots.

    Args:
        folder: Of the instance; made with mode 0700 when it is not there.
        identity: Of this rank's records.
        limit_bytes: Of this rank's slab files; never exceeded.
        reserve_bytes: Free space of the file system that is never used.
        direct: Go past the page cache where the file system lets us.

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
    ) -> None:
        self._identity = identity
        self._limit_bytes = limit_bytes
        self._folder = folder / f"rank-{rank}"
        self._lock_descriptor = _locked(folder, self._folder)
        self._entries: dict[OffloadKey, Place] = {}
        self._headers: dict[OffloadKey, RecordHeader] = {}
        self._stale: list[Place] = []  # of earlier generations
        self._busy: Counter[Place] = Counter()
        self._doomed: set[Place] = set()  # discarded while somebody read them
        self._writing: set[OffloadKey] = set()
        self._changed = threading.Condition()
        self._slabs = Slabs(self._folder, limit_bytes, reserve_bytes, direct)
        self._index = self._opened_index()
        self.generation = served_generation(self._index.generation)
        self._index.set_generation(self.generation)
        self._fill()

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
            self.discard([key])
            raise CorruptRecordError(f"{self._folder}: {error}; the record is forgotten") from None
        finally:
            self._release(place)
        return True

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        with self._changed:
            if not self._changed.wait_for(lambda: name.key not in self._writing, deadline_s):
                raise TierUnavailableError(f"{self._folder}: the same key is being written")
            if name.key in self._entries:
                return Written.THERE_ALREADY
            self._writing.add(name.key)
            generation = self.generation
        try:
            self._reclaim(RECLAIMED_PER_WRITE)
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
            gone = [self._entries.pop(key) for key in keys if key in self._entries]
            for key in keys:
                self._headers.pop(key, None)
        self._free(gone)

    def begin_generation(self, trusted: bool = False) -> None:
        with self._changed:
            self._stale += self._entries.values()
            self._entries, self._headers = {}, {}
            self.generation = next_generation(self.generation, trusted)
            generation = self.generation
        self._index.set_generation(generation)

    def inventory(self) -> Iterator[RecordHeader]:
        with self._changed:
            headers = list(self._headers.values())
        return iter(headers)

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._writing and not self._busy)
        self._index.close()
        self._slabs.close()
        os.close(self._lock_descriptor)

    @property
    def capacity_bytes(self) -> int:
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return sum(map(self.record_bytes, (place.payload_bytes for place in self._entries.values())))

    def record_bytes(self, payload_bytes: int) -> int:
        return slot_bytes_of(payload_bytes)

    # -- inside -----------------------------------------------------------------------------------

    def _keep(self, name: ChunkName, payload: memoryview, generation: int) -> None:
        place = self._slabs.take(payload.nbytes)
        header = self._identity.header_of(name, payload, generation, int(time.time()))
        try:
            self._slabs.write(place, pack(header), payload)
            self._index.put(place, header)
        except BaseException:  # also an interrupt: the slot would be nobody's for ever
            self._slabs.give_back(place)
            raise
        with self._changed:
            if generation == self.generation:
                self._entries[name.key], self._headers[name.key] = place, header
            else:
                self._stale.append(place)

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

    def _reclaim(self, count: int) -> None:
        with self._changed:
            reclaimed, self._stale = self._stale[-count:], self._stale[:-count]
        self._free(reclaimed)

    def _opened_index(self) -> DiskIndex:
        try:
            if any(self._slabs.places()) and not (self._folder / FILE_NAME).exists():
                raise TierUnavailableError(f"{self._folder}: the index is gone")
            index = DiskIndex(self._folder)
            index.rows()
        except TierUnavailableError as error:
            logger.warning("%s; it is made anew from the records", error)
            for path in self._folder.glob(f"{FILE_NAME}*"):
                path.unlink()
            index = DiskIndex(self._folder)
            found = list(self._scanned())
            index.put_all(found)
            index.set_generation(
                max((header.generation for _, header in found), key=lambda one: one & ~DOUBTFUL, default=0)
            )
        return index

    def _scanned(self) -> Iterator[tuple[Place, RecordHeader]]:
        """Read the header of every slot."""
        for place in self._slabs.places():
            try:
                yield place, unpack(self._slabs.read_header(place))
            except TierError:
                continue

    def _fill(self) -> None:
        """Take over what the index names, of this model, rank and generation; all else is free."""
        there, foreign = set(self._slabs.places()), []
        for place, packed in self._index.rows():
            try:
                header = unpack(packed)
            except CorruptRecordError:
                header = None
            ours = header is not None and self._identity.owns(header)
            if header is None or not ours or header.generation != self.generation or place not in there:
                foreign.append(place)
                continue
            if header.name.key in self._entries:
                foreign.append(place)
                continue
            self._entries[header.name.key], self._headers[header.name.key] = place, header
        self._slabs.occupy(set(self._entries.values()))
        if foreign:
            self._index.remove(foreign)


def _locked(folder: Path, own: Path) -> int:
    """Have a rank's folder, and nobody else in it."""
    try:
        for path in (folder, own):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError("disk", str(folder), f"cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            "disk", str(folder), "another instance uses this folder; give each a folder of its own"
        ) from None
    return descriptor
