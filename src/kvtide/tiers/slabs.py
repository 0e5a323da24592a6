"""Files of fixed slots: where a record lies on a private disk, and how many there may be.

A class of slots for each size of payload, a file for each class. A file grows by whole pieces, which the
file system allocates before they are used, and never beyond the limit or into the space that is to stay free.
Knows offsets and bytes; does not know which record is in a slot, or whether it may leave.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.tiers.records import HEADER_BYTES

ALIGNMENT = 4096
"""Of offsets, lengths and addresses for direct I/O; what every file system in use is content with."""

PIECE_BYTES = 64 << 20
"""By which a file grows at most; at least by one slot."""

PIECES = 64
"""Into so many pieces at least the limit is shared out among classes."""

FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def aligned(byte_count: int) -> int:
    """Round up to what direct I/O can transfer."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT


def slot_bytes_of(payload_bytes: int) -> int:
    """What a record takes: a header's block, and the payload's."""
    return ALIGNMENT + aligned(payload_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """A slot.

    Attributes:
        payload_bytes: Class: the payload it is for.
        slot: Number in the file of its class.
    """

    payload_bytes: int
    slot: int


@dataclass(slots=True)
class _Class:
    descriptor: int
    direct: bool
    slot_bytes: int
    slot_count: int = 0
    unused: int = 0  # slots from here on were never handed out
    free: list[int] = field(default_factory=list)


class Slabs:
    """All files of one folder.

    Args:
        folder: Where they are; exists, and is ours alone.
        limit_bytes: Of all files together; never exceeded.
        reserve_bytes: Free space of the file system that is never used.
        direct: Go past the page cache where the file system lets us.

    Raises:
        TierUnavailableError: The folder cannot be used.
    """

    def __init__(self, folder: Path, limit_bytes: int, reserve_bytes: int, direct: bool = True) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._direct = direct
        self._lock = threading.Lock()
        self._local = threading.local()
        self._classes: dict[int, _Class] = {}
        for path in sorted(folder.glob("slab-*")):
            self._open(int(path.name.removeprefix("slab-")))

    @property
    def used_bytes(self) -> int:
        """Of all files."""
        return sum(one.slot_count * one.slot_bytes for one in self._classes.values())

    def places(self) -> Iterator[Place]:
        """List every slot that there is, free or not."""
        for payload_bytes, one in sorted(self._classes.items()):
            for slot in range(one.slot_count):
                yield Place(payload_bytes, slot)

    def occupy(self, taken: set[Place]) -> None:
        """Begin with these slots in use and all others free."""
        with self._lock:
            for payload_bytes, one in self._classes.items():
                used = {place.slot for place in taken if place.payload_bytes == payload_bytes}
                one.unused = max(used, default=-1) + 1
                one.free = [slot for slot in range(one.unused) if slot not in used]

    def take(self, payload_bytes: int) -> Place:
        """Take a free slot.

        Raises:
            TierFullError: There is none, and no room for more.
            TierUnavailableError: The file system refuses for another reason.
        """
        with self._lock:
            one = self._classes.get(payload_bytes) or self._open(payload_bytes)
            if one.free:
                return Place(payload_bytes, one.free.pop())
            if one.unused == one.slot_count:
                self._grow(one)
            one.unused += 1
            return Place(payload_bytes, one.unused - 1)

    def give_back(self, place: Place) -> None:
        """Let a slot be taken again; nobody reads or writes it any more."""
        with self._lock:
            self._classes[place.payload_bytes].free.append(place.slot)

    def write(self, place: Place, header: bytes, payload: memoryview) -> None:
        """Write a record.

        Raises:
            TierFullError: The file system has no room after all.
            TierUnavailableError: It refuses for another reason.
        """
        one = self._classes[place.payload_bytes]
        head, body = self._buffers(one, payload)
        head[:HEADER_BYTES] = header
        if body is not payload:
            body[: payload.nbytes] = payload
        self._transfer(os.pwritev, one, place, head, body)

    def read(self, place: Place, payload: memoryview) -> bytes:
        """Read a record: its payload into ``payload``, of the class's size, its header as the answer.

        Raises:
            TierUnavailableError: The file system refuses.
        """
        one = self._classes[place.payload_bytes]
        head, body = self._buffers(one, payload)
        self._transfer(os.preadv, one, place, head, body)
        if body is not payload:
            payload[:] = body[: payload.nbytes]
        return bytes(head[:HEADER_BYTES])

    def read_header(self, place: Place) -> bytes:
        """Read a header alone.

        Raises:
            TierUnavailableError: The file system refuses.
        """
        one = self._classes[place.payload_bytes]
        head = self._buffer("head", ALIGNMENT)
        try:
            os.preadv(one.descriptor, [head], place.slot * one.slot_bytes)
        except OSError as error:
            raise TierUnavailableError(f"{self._folder}: {error.strerror}") from None
        return bytes(head[:HEADER_BYTES])

    def close(self) -> None:
        """Close every file."""
        for one in self._classes.values():
            os.close(one.descriptor)
        self._classes.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _open(self, payload_bytes: int) -> _Class:
        path = self._folder / f"slab-{payload_bytes}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        direct = self._direct
        try:
            try:
                descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                direct = False  # such as tmpfs of older kernels
                descriptor = os.open(path, flags, 0o600)
            slot_bytes = slot_bytes_of(payload_bytes)
            slot_count = os.fstat(descriptor).st_size // slot_bytes
        except OSError as error:
            raise TierUnavailableError(f"{path}: {error.strerror}") from None
        one = _Class(descriptor, direct, slot_bytes, slot_count)
        self._classes[payload_bytes] = one
        return one

    def _grow(self, one: _Class) -> None:
        room = self._limit_bytes - self.used_bytes
        try:
            status = os.fstatvfs(one.descriptor)
            room = min(room, status.f_bavail * status.f_frsize - self._reserve_bytes)
            piece_bytes = min(PIECE_BYTES, self._limit_bytes // PIECES)
            slots = min(max(1, piece_bytes // one.slot_bytes), room // one.slot_bytes)
            if slots < 1:
                raise TierFullError(
                    f"{self._folder}: {self.used_bytes} of {self._limit_bytes} bytes are used, and"
                    f" {self._reserve_bytes} stay free on the file system"
                )
            os.posix_fallocate(one.descriptor, one.slot_count * one.slot_bytes, slots * one.slot_bytes)
        except OSError as error:
            raise self._told(error) from None
        one.slot_count += slots

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        one: _Class,
        place: Place,
        head: memoryview,
        body: memoryview,
    ) -> None:
        offset, wanted = place.slot * one.slot_bytes, head.nbytes + body.nbytes
        try:
            moved = call(one.descriptor, [head, body], offset)
        except OSError as error:
            raise self._told(error) from None
        if moved != wanted:
            raise TierUnavailableError(f"{self._folder}: {moved} of {wanted} bytes were transferred")

    def _told(self, error: OSError) -> Exception:
        if error.errno in FULL_ERRORS:
            return TierFullError(f"{self._folder}: {error.strerror}")
        return TierUnavailableError(f"{self._folder}: {error.strerror}")

    def _buffers(self, one: _Class, payload: memoryview) -> tuple[memoryview, memoryview]:
        """A header's buffer, and the payload's own memory or, where direct I/O cannot use it, a copy's."""
        head = self._buffer("head", ALIGNMENT)
        fits = payload.nbytes % ALIGNMENT == 0 and _address(payload) % ALIGNMENT == 0
        if fits or not one.direct:
            return head, payload
        return head, self._buffer("body", aligned(payload.nbytes))

    def _buffer(self, kind: str, byte_count: int) -> memoryview:
        """Aligned memory of this thread's own."""
        held: memoryview | None = getattr(self._local, kind, None)
        if held is None or held.nbytes < byte_count:
            held = memoryview(mmap.mmap(-1, byte_count))
            setattr(self._local, kind, held)
        return held[:byte_count]


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
