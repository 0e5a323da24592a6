"""Files of fixed slots: where a record lies on a private disk, and how many there may be.

A class of slots for each size of payload, a file for each class. A file grows by whole pieces, which the
file system allocates before they are used, and never beyond the limit or into the space that is to stay free.
Classes lend each other room: free slots of one become holes in its file when another needs a slot. Knows
offsets and bytes; does not know which record is in a slot, or whether it may leave.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.tiers.holes import punched
from kvtide.tiers.records import HEADER_BYTES

ALIGNMENT = 4096
"""Of offsets, lengths and addresses for direct I/O; what every file system in use is content with."""

PIECE_BYTES = 64 << 20
"""By which a file grows at most; at least by one slot."""

PIECES = 64
"""Into so many pieces at least the limit is shared out among classes."""

ROW_BYTES = 512
"""What the index takes for a slot, at most: the limit is of both."""

SHORT_REST_S = 30.0
"""After growth has failed; others may have made room by then."""

FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def aligned(byte_count: int) -> int:
    """Round up to what direct I/O can transfer."""
    return -(-byte_count // ALIGNMENT) * ALIGNMENT


def slot_bytes_of(payload_bytes: int) -> int:
    """What a record takes: a header's block, and the payload's."""
    return ALIGNMENT + aligned(payload_bytes)


class Place(NamedTuple):
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
    free: list[int] = field(default_factory=list)  # allocated, and nobody's
    holes: list[int] = field(default_factory=list)  # within the file, and not allocated

    @property
    def allocated_bytes(self) -> int:
        return (self.slot_count - len(self.holes)) * self.cost_bytes

    @property
    def cost_bytes(self) -> int:
        return self.slot_bytes + ROW_BYTES


class Slabs:
    """All files of one folder.

    Args:
        folder: Where they are; exists.
        limit_bytes: Of all files and their rows in the index together; never exceeded.
        reserve_bytes: Free space of the file system that is never used.
        direct: Go past the page cache where the file system lets us.
        read_only: Of somebody else, who writes them meanwhile.

    Raises:
        TierUnavailableError: The folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        reserve_bytes: int = 0,
        direct: bool = True,
        read_only: bool = False,
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._direct = direct
        self._read_only = read_only
        self._lock = threading.Lock()
        self._local = threading.local()
        self._classes: dict[int, _Class] = {}
        self._punches = True  # until the file system says that it cannot
        self._attainable_bytes = limit_bytes
        self._short_until_s = 0.0  # until when growth is not expected to go further than that
        for path in sorted(folder.glob("slab-*")):
            if (size := path.name.removeprefix("slab-")).isdecimal():
                self._class_of(int(size))

    @property
    def allocated_bytes(self) -> int:
        """Of all files, without their holes, and with their rows in the index."""
        return sum(one.allocated_bytes for one in list(self._classes.values()))

    @property
    def capacity_bytes(self) -> int:
        """The limit, or what there was room for when growth last failed, for a while."""
        short = time.monotonic() < self._short_until_s
        return self._attainable_bytes if short else self._limit_bytes

    def slot_counts(self) -> dict[int, int]:
        """How many slots the file of each class has, free or not."""
        return {payload_bytes: one.slot_count for payload_bytes, one in sorted(self._classes.items())}

    def occupy(self, taken: Mapping[int, Sequence[int]]) -> None:
        """Begin with these slots in use, by class; all others are given back to the file system."""
        with self._lock:
            for payload_bytes, one in self._classes.items():
                is_free = np.ones(one.slot_count, dtype=bool)
                is_free[np.asarray(taken.get(payload_bytes, ()), dtype=np.int64)] = False
                one.free, one.holes = np.flatnonzero(is_free)[::-1].tolist(), []
                self._punch(one, one.free)

    def take(self, payload_bytes: int) -> Place:
        """Take a free slot.

        Raises:
            TierFullError: There is none, and no room for more.
            TierUnavailableError: The file system refuses for another reason.
        """
        with self._lock:
            one = self._class_of(payload_bytes)
            if not one.free:
                self._make_room(one)
                self._grow(one)
            return Place(payload_bytes, one.free.pop())

    def missing_bytes(self, payload_bytes: int) -> int | None:
        """Tell how much would have to come free in other classes before there is a slot in this one.

        Returns:
            At most 0 when there is room; None when nothing that comes free there would help.
        """
        with self._lock:
            one = self._class_of(payload_bytes)
            if one.free:
                return 0
            lent = sum(len(other.free) * other.cost_bytes for other in self._classes.values())
            missing = one.cost_bytes - self._room(one) - (lent if self._punches else 0)
        return missing if self._punches or missing <= 0 else None

    def give_back(self, place: Place) -> None:
        """Let a slot be taken again; nobody reads or writes it any more."""
        with self._lock:
            one = self._classes[place.payload_bytes]
            one.free.append(place.slot)
            if self.allocated_bytes > self._limit_bytes:  # which was higher in an earlier run
                self._punch(one, [place.slot])

    def write(self, place: Place, header: bytes, payload: memoryview) -> None:
        """Write a record.

        Raises:
            TierFullError: The file system has no room after all.
            TierUnavailableError: It refuses for another reason.
        """
        one = self._known(place)
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
        one = self._known(place)
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
        one = self._known(place)
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

    def _known(self, place: Place) -> _Class:
        one = self._classes.get(place.payload_bytes)
        if one is None:
            with self._lock:
                one = self._class_of(place.payload_bytes)
        return one

    def _class_of(self, payload_bytes: int) -> _Class:
        if (known := self._classes.get(payload_bytes)) is not None:
            return known
        path = self._folder / f"slab-{payload_bytes}"
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT)
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

    def _make_room(self, wanting: _Class) -> None:
        """Give free slots of other classes back to the file system, as far as one more slot needs it."""
        for one in self._classes.values():
            missing_bytes = wanting.cost_bytes - self._room(wanting)
            if missing_bytes <= 0:
                return
            if one is not wanting and one.free:
                self._punch(one, one.free[: -(-missing_bytes // one.cost_bytes)])

    def _room(self, one: _Class) -> int:
        """Bytes by which all files together may still grow."""
        try:
            status = os.fstatvfs(one.descriptor)
        except OSError as error:
            raise self._told(error) from None
        left = status.f_bavail * status.f_frsize - self._reserve_bytes
        return min(self._limit_bytes - self.allocated_bytes, left)

    def _grow(self, one: _Class) -> None:
        """Allocate holes, or else more of the file: a piece, or what there is room for."""
        room = self._room(one)
        piece_bytes = min(PIECE_BYTES, self._limit_bytes // PIECES)
        wanted = min(max(1, piece_bytes // one.cost_bytes), room // one.cost_bytes)
        try:
            if wanted < 1:
                raise TierFullError(
                    f"{self._folder}: {self.allocated_bytes} of {self._limit_bytes} bytes are used, and"
                    f" {self._reserve_bytes} stay free on the file system"
                )
            if one.holes:
                self._fill_holes(one, wanted)
            else:
                self._lengthen(one, wanted)
        except TierFullError:
            if self.allocated_bytes + one.cost_bytes <= self._limit_bytes:
                self._attainable_bytes = self.allocated_bytes
                self._short_until_s = time.monotonic() + SHORT_REST_S
            raise
        self._short_until_s = 0.0

    def _fill_holes(self, one: _Class, count: int) -> None:
        for _ in range(min(count, len(one.holes))):
            try:
                self._allocate(one, one.holes[-1], 1)
            except TierFullError:
                if one.free:
                    return
                raise
            one.free.append(one.holes.pop())

    def _lengthen(self, one: _Class, count: int) -> None:
        try:
            self._allocate(one, one.slot_count, count)
        except TierFullError:
            # What was allocated before it failed is not left behind uncounted.
            os.ftruncate(one.descriptor, one.slot_count * one.slot_bytes)
            raise
        one.free.extend(range(one.slot_count + count - 1, one.slot_count - 1, -1))
        one.slot_count += count

    def _allocate(self, one: _Class, slot: int, count: int) -> None:
        try:
            os.posix_fallocate(one.descriptor, slot * one.slot_bytes, count * one.slot_bytes)
        except OSError as error:
            raise self._told(error) from None

    def _punch(self, one: _Class, slots: Sequence[int]) -> None:
        """Turn free slots into holes, where the file system can do that."""
        gone: set[int] = set()
        for first, count in _runs(sorted(slots)):
            self._punches = punched(one.descriptor, first * one.slot_bytes, count * one.slot_bytes)
            if not self._punches:
                break
            gone.update(range(first, first + count))
        one.free = [slot for slot in one.free if slot not in gone]
        one.holes.extend(sorted(gone, reverse=True))

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


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Join neighbours among ascending numbers: first and count of each run."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield slots[first], at - first
            first = at


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
