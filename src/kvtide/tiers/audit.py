"""Whether what is stored is what was written: one record at a time, from the medium where that is possible.

Reads; changes nothing. While an instance uses the folder, a slot may be another record's by the time it is
read: who asks for a verdict asks again once the index has been heard (``confirmed``).
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import xxhash

from kvtide.errors import CorruptRecordError
from kvtide.tiers.rank_folder import RankFolder, Stored
from kvtide.tiers.records import HEADER_BYTES, MAGIC, RecordHeader, unpack
from kvtide.tiers.slabs import ALIGNMENT, slot_bytes_of

BUFFER_BYTES = 4 << 20


class Damage(Enum):
    """What is wrong with a record, as it is told to people."""

    ROW = "the index names it by a header that is none"
    MISSING = "its slab ends before it, or is not there"
    UNREADABLE = "the medium does not give it back"
    BLANK = "there is no record in its slot"
    HEADER = "its header is damaged, or of another version"
    OTHER = "there is another record in its slot"
    PAYLOAD = "its payload is damaged"


@dataclass(frozen=True, slots=True)
class Finding:
    """A record that is not what was written.

    Attributes:
        rank: In whose folder.
        stored: The record as the index names it.
        damage: What is wrong.
    """

    rank: RankFolder
    stored: Stored
    damage: Damage


class Auditor:
    """Reads records and holds them against their names; keeps a buffer, and the last slab open."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BUFFER_BYTES)
        self._buffer = memoryview(self._memory)
        self._slab: tuple[int, int, int] | None = None  # rank, bytes of payload, descriptor

    def check(self, rank: RankFolder, stored: Stored) -> Damage | None:
        """Read a record; None when it is what was written."""
        header = stored.header
        if header is None:
            return Damage.ROW
        if header.payload_bytes != stored.place.payload_bytes:
            return Damage.OTHER
        try:
            slab = self._opened(rank, header.payload_bytes)
        except OSError:
            return Damage.MISSING
        try:
            return self._read(slab, stored, header)
        except OSError:
            return Damage.UNREADABLE

    def close(self) -> None:
        """Let go of the slab."""
        if self._slab is not None:
            os.close(self._slab[2])
        self._slab = None

    # -- inside ---------------------------------------------------------------------------------

    def _opened(self, rank: RankFolder, payload_bytes: int) -> int:
        """Open a slab, or have it open: records come slab by slab."""
        if self._slab is not None and self._slab[:2] == (rank.rank, payload_bytes):
            return self._slab[2]
        self.close()
        name = f"slab-{payload_bytes}"
        try:
            # What is in the page cache says nothing about the medium, and others need the page cache.
            descriptor = rank.open(name, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = rank.open(name, os.O_RDONLY)
        self._slab = rank.rank, payload_bytes, descriptor
        return descriptor

    def _read(self, slab: int, stored: Stored, header: RecordHeader) -> Damage | None:
        whole_bytes = slot_bytes_of(header.payload_bytes)
        first = stored.place.slot * whole_bytes
        if not 0 <= first < os.fstat(slab).st_size:
            return Damage.MISSING
        digest, left_bytes = xxhash.xxh3_128(), header.payload_bytes
        for offset in range(0, whole_bytes, BUFFER_BYTES):
            piece = self._buffer[: min(BUFFER_BYTES, whole_bytes - offset)]
            if os.preadv(slab, [piece], first + offset) < piece.nbytes:
                return Damage.MISSING
            if not offset:
                damage = _damage_of(bytes(piece[:HEADER_BYTES]), stored.packed)
                if damage is not None:
                    return damage
                piece = piece[ALIGNMENT:]
            digest.update(piece[:left_bytes])
            left_bytes -= min(left_bytes, piece.nbytes)
        return None if digest.digest() == header.payload_digest else Damage.PAYLOAD


def confirmed(findings: Iterable[Finding], auditor: Auditor) -> Iterator[Finding]:
    """Look again at what seemed damaged while an instance was at work, and list what is.

    A record that the index no longer names, or names anew, has only left.
    """
    for finding in findings:
        rank, stored = finding.rank, finding.stored
        if rank.index_trouble is None and rank.named_now(stored.place) != stored.packed:
            continue
        damage = auditor.check(rank, stored)
        if damage is not None:
            yield Finding(rank, stored, damage)


@contextlib.contextmanager
def auditing() -> Iterator[Auditor]:
    """Have an auditor, and let go of its file afterwards."""
    auditor = Auditor()
    try:
        yield auditor
    finally:
        auditor.close()


def _damage_of(found: bytes, named: bytes) -> Damage | None:
    if found == named:
        return None
    if not found.startswith(MAGIC):
        return Damage.BLANK
    try:
        unpack(found)
    except CorruptRecordError:
        return Damage.HEADER
    return Damage.OTHER
