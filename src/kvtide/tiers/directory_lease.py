"""Who of many hosts removes records from a folder, and what that one has counted.

A small file says it. Whoever has it writes to it again and again; one that has not changed for long, by the
watch of whoever looks, is nobody's any more: no two clocks are compared. It is taken over by replacing it,
and whoever replaced it last has it. The others find that out before long; until then two may remove: more
goes than had to, and nothing else.

Knows the file; does not know records or limits.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.tiers.directory_files import GONE_WHILE_OPEN, publish
from kvtide.tiers.directory_names import LEASE, own_token, temporary_in

LEASE_BYTES = 256
STALE_S = 180.0
"""So long a lease may stay as it is; whoever has it writes to it much more often."""

_FIRST_LINE = b"kvtide cleaner 1"


@dataclass(frozen=True, slots=True)
class Count:
    """What the one that removes has counted.

    Attributes:
        round: Which round it was, counted on by whoever has the lease; 0 before the first has ended.
        used_bytes: Of everything in the folder.
    """

    round: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseText:
    """What stands in the file.

    Attributes:
        token: Of whoever has it.
        beat: Another number each time.
        count: The last one.
    """

    token: str
    beat: int
    count: Count

    def pack(self) -> bytes:
        """``bytes[LEASE_BYTES]``."""
        lines = (self.token, str(self.beat), str(self.count.round), str(self.count.used_bytes))
        return b"\n".join((_FIRST_LINE, *(line.encode() for line in lines), b"")).ljust(LEASE_BYTES)


def unpack_lease(packed: bytes) -> LeaseText | None:
    """Read what stands in the file; None of what none of ours has written."""
    lines = packed.split(b"\n")
    if len(packed) != LEASE_BYTES or len(lines) != 6 or lines[0] != _FIRST_LINE:
        return None
    if not all(line.isdigit() and len(line) <= 20 for line in lines[2:5]):
        return None
    beat, round_number, used_bytes = (int(line) for line in lines[2:5])
    return LeaseText(lines[1].decode("ascii", "replace"), beat, Count(round_number, used_bytes))


def last_count(folder: str) -> Count | None:
    """Ask what was counted last; None when nobody has.

    Raises:
        OSError: It cannot be found out.
    """
    packed = _read(f"{folder}/{LEASE}")
    text = None if packed is None else unpack_lease(packed)
    return None if text is None or text.count.round == 0 else text.count


class Lease:
    """One of those who may have it.

    Args:
        folder: Absolute.
        clock: In seconds.

    Attributes:
        count: The last one that is known here.
    """

    def __init__(self, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._path = folder, f"{folder}/{LEASE}"
        self._clock = clock
        self._token, self._beat = own_token(), 0
        self._seen: bytes | None = None
        self._seen_s = 0.0
        self.count = Count()

    def hold(self) -> bool:
        """Take it, or keep it; False when another has it.

        Raises:
            OSError: It cannot be found out.
        """
        packed = _read(self._path)
        text = None if packed is None else unpack_lease(packed)
        if text is not None and text.token == self._token:
            return self._write_on()
        if text is not None:
            self.count = text.count
        if packed is not None and not self._is_stale(packed):
            return False
        return self._take(replace=packed is not None)

    def tell(self, used_bytes: int) -> bool:
        """Let everybody know what was counted; False when another has it by now.

        Raises:
            OSError: It cannot be written.
        """
        self.count = Count(self.count.round + 1, used_bytes)
        return self._write_on()

    def release(self) -> None:
        """Let the next one take it at once; trouble is ignored, and they wait."""
        with contextlib.suppress(OSError):
            packed = _read(self._path)
            text = None if packed is None else unpack_lease(packed)
            if text is not None and text.token == self._token:
                os.unlink(self._path)

    # -- inside -----------------------------------------------------------------------------------

    def _is_stale(self, packed: bytes) -> bool:
        now_s = self._clock()
        if packed != self._seen:
            self._seen, self._seen_s = packed, now_s
        return now_s - self._seen_s >= STALE_S

    def _take(self, replace: bool) -> bool:
        temporary = temporary_in(self._folder)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.write(descriptor, self._text().pack())
            finally:
                os.close(descriptor)
            if replace:
                os.rename(temporary, self._path)
            elif not publish(temporary, self._path):
                os.unlink(temporary)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        packed = _read(self._path)  # another may have come after us
        text = None if packed is None else unpack_lease(packed)
        return text is not None and text.token == self._token

    def _write_on(self) -> bool:
        """Write to our own file: if another has replaced it by then, to one that nobody sees any more."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            try:
                text = unpack_lease(os.pread(descriptor, LEASE_BYTES, 0))
                if text is None or text.token != self._token:
                    return False
                os.pwrite(descriptor, self._text().pack(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in GONE_WHILE_OPEN:
                return False
            raise
        return True

    def _text(self) -> LeaseText:
        self._beat += 1
        return LeaseText(self._token, self._beat, self.count)


def _read(path: str) -> bytes | None:
    """Read what may be a lease; None when there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        try:
            return os.pread(descriptor, LEASE_BYTES, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in GONE_WHILE_OPEN:
            return None
        raise
