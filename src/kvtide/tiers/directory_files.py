"""One file of a folder that many hosts share: read whole, written whole, never seen half written.

A file is written under a name that nobody else has and gets its own by a rename that does not replace. A
hard link would do as well, but some shared file systems have none and others pay for them for ever; a rename
is one operation on all of them. Where a rename cannot say "unless it is there", it replaces: the same name is
the same content. Whoever has the former file open reads on, or is told that it is gone.

Knows files and what their errors mean; does not know keys, names or limits.
"""

import contextlib
import ctypes
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from kvtide.errors import (
    CorruptRecordError,
    NodeUnavailableError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvtide.tiers.directory_names import temporary_in
from kvtide.tiers.records import HEADER_BYTES

PIECE_BYTES = 16 << 20
"""After which the deadline is looked at: what is under way cannot be interrupted."""

TOUCH_REST_S = 300
"""So long a record counts as just used: one that is read all the time is written to no more often."""

GONE = {errno.ENOENT, errno.ENOTDIR}
GONE_WHILE_OPEN = {errno.ESTALE, errno.ENOENT, errno.EBADF}
"""What is said of an open file that another host has removed, by NFS and by JuiceFS."""

FULL = {errno.ENOSPC, errno.EDQUOT}
NO_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV}
"""What opening a link, a socket or a device says, as we open."""

_NOT_KNOWN = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_rename_with_flags: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


@contextlib.contextmanager
def told_as_tier_errors(path: str) -> Iterator[None]:
    """Turn what the system says of ``path`` into what a tier may say."""
    try:
        yield
    except OSError as error:
        raise tier_error(path, error) from None


def tier_error(path: str, error: OSError) -> TierError:
    """Say what an error means for a tier."""
    said = f"{path}: {error.strerror or error}"
    if error.errno in FULL:
        return TierFullError(said)
    if error.errno in (errno.EACCES, errno.EPERM):
        said += "; every server has to run as the user whose folder this is, and may write there"
    elif error.errno in (errno.ENOTCONN, errno.ESTALE, errno.ENODEV):
        said += "; is the file system mounted?"
    return TierUnavailableError(said)


class RecordFile:
    """A record that is open for reading.

    Args:
        path: Of the file; no link is followed, and nothing that is not a file is waited for.

    Raises:
        CorruptRecordError: It is no file; it was removed unless it is a folder.
        OSError: It is not there (``GONE``), or cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, _READ_FLAGS)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            _remove_what_is_no_file(path)
            raise CorruptRecordError(f"{path}: not a file; removed") from None
        self._status: os.stat_result | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, payload: memoryview, until_s: float) -> bytearray | None:
        """Read header and payload.

        Args:
            payload: ``uint8[n]``, filled.
            until_s: When to give up, by ``time.monotonic``.

        Returns:
            ``bytes[HEADER_BYTES]``; None when another host has removed the file meanwhile.

        Raises:
            CorruptRecordError: No file, or of another length.
            TierUnavailableError: Out of time.
            OSError: It cannot be read.
        """
        header = bytearray(HEADER_BYTES)
        try:
            self._status = os.fstat(self._descriptor)
            if not stat.S_ISREG(self._status.st_mode):
                raise CorruptRecordError("not a file")
            if self._status.st_size != HEADER_BYTES + payload.nbytes:
                raise CorruptRecordError(
                    f"{self._status.st_size} bytes, where {HEADER_BYTES + payload.nbytes} are due"
                )
            _move(os.preadv, self._descriptor, memoryview(header), payload, until_s, self._path)
        except OSError as error:
            if error.errno in GONE_WHILE_OPEN:
                return None
            raise
        return header

    def note_use(self) -> None:
        """Let whoever removes what was used longest ago know of a read; trouble is ignored."""
        status, now_s = self._status, time.time()
        if status is None or now_s - max(status.st_atime, status.st_mtime) < TOUCH_REST_S:
            return
        # Only when it was read: a new time of writing would empty the caches of other hosts.
        with contextlib.suppress(OSError):
            os.utime(self._descriptor, ns=(int(now_s * 1e9), status.st_mtime_ns))

    def remove(self) -> None:
        """Remove the file, unless its name is another one's by now; trouble is ignored."""
        with contextlib.suppress(OSError):
            mine, now = os.fstat(self._descriptor), os.lstat(self._path)
            if (mine.st_dev, mine.st_ino, mine.st_mtime_ns) == (now.st_dev, now.st_ino, now.st_mtime_ns):
                os.unlink(self._path)


def stands(path: str, byte_count: int) -> bool:
    """Whether a file of the right length lies there; what lies there otherwise is removed.

    Raises:
        NodeUnavailableError: A folder has this name, nobody knows why.
        OSError: It cannot be found out.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    if stat.S_ISREG(status.st_mode) and status.st_size == byte_count:
        return True
    if stat.S_ISDIR(status.st_mode):
        raise NodeUnavailableError(f"{path}: a folder, where a file is due; remove it")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return False


def is_file(path: str) -> bool:
    """Whether a file lies there.

    Raises:
        OSError: It cannot be found out.
    """
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError as error:
        if error.errno in GONE:
            return False
        raise


def _remove_what_is_no_file(path: str) -> None:
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)


def write_file(path: str, header: bytes, payload: memoryview, until_s: float, durable: bool = False) -> bool:
    """Write a file and give it its name once it is whole; mode 0600.

    Args:
        path: Of the file.
        header: What it begins with.
        payload: ``uint8[n]``, what follows.
        until_s: When to give up, by ``time.monotonic``.
        durable: Wait for the medium before it gets its name.

    Returns:
        False when there was one by then, and nothing of this one was kept.

    Raises:
        TierUnavailableError: Out of time; nothing was kept.
        FileNotFoundError: There is no such folder, or the unfinished file was taken away.
        OSError: It cannot be written; nothing was kept.
    """
    temporary = temporary_in(os.path.dirname(path))
    descriptor = os.open(temporary, _WRITE_FLAGS, 0o600)
    try:
        try:
            _move(os.pwritev, descriptor, memoryview(header), payload, until_s, path)
            if durable:
                os.fsync(descriptor)
        finally:
            # On NFS and others the bytes are at the server after this, or the error is told here.
            os.close(descriptor)
        new = publish(temporary, path)
    except BaseException:  # also an interrupt: nothing unfinished is left behind
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if not new:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return new


def publish(temporary: str, path: str) -> bool:
    """Give a file that is whole its name; False when another has it.

    Raises:
        OSError: It cannot be renamed.
    """
    number = errno.ENOSYS
    if _rename_with_flags is not None:
        failed = _rename_with_flags(
            _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE
        )
        number = ctypes.get_errno() if failed else 0
    if number in _NOT_KNOWN:
        os.rename(temporary, path)
    elif number == errno.EEXIST:
        return False
    elif number:
        raise OSError(number, os.strerror(number), temporary, None, path)
    return True


def _move(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    header: memoryview,
    payload: memoryview,
    until_s: float,
    path: str,
) -> None:
    """Read or write header and payload, a piece at a time.

    Raises:
        TierUnavailableError: Out of time.
        CorruptRecordError: The file ends before that.
        OSError: As the system says.
    """
    at, end = 0, header.nbytes + payload.nbytes
    while at < end:
        if time.monotonic() > until_s:
            raise TierUnavailableError(f"{path}: out of time after {at} of {end} bytes")
        first = max(0, at - header.nbytes)
        moved = call(descriptor, [header[at:], payload[first : first + PIECE_BYTES]], at)
        if not moved:
            raise CorruptRecordError(f"ends after {at} bytes, where {end} are due")
        at += moved
