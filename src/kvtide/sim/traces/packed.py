"""A file of a trace as lines, whatever it is packed in.

Knows gzip and zstd by their first bytes, and how long a line may be. Does not know what a line means. Of a
file that is larger than memory no more than a line is ever held.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvtide.errors import TraceError
from kvtide.sim.traces.faults import Faults, line_of

LONGEST_LINE_BYTES = 64 << 20
"""A session of a coding agent is one line, of a few MiB in public traces."""

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

_FEED_BYTES = 2048
"""Of zstd, that are unpacked at once: four of them can become 128 KiB."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class UnpackingError(Exception):
    """A zstd stream is damaged or ends too early."""


UNPACKING_ERRORS = (OSError, EOFError, zlib.error, UnpackingError)


def open_trace(path: Path) -> IO[bytes]:
    """Open a file for reading, and unpack what is packed.

    Raises:
        TraceError: It cannot be opened, or what would unpack it is not installed.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(str(path), "", (error.strerror or str(error)).lower()) from None
    head = raw.peek(4)[:4]
    if head.startswith(GZIP):
        raw.close()
        unpacked: IO[bytes] = gzip.open(path, "rb")  # type: ignore[assignment]  # noqa: SIM115
        return unpacked
    return io.BufferedReader(_ZstdStream(raw, path), 1 << 16) if head == ZSTD else raw


class Line(NamedTuple):
    """A line that is not empty.

    Attributes:
        number: From 1.
        text: Without its end.
        has_end: Only the last line of a file may have none.
    """

    number: int
    text: bytes
    has_end: bool


def read_lines(path: Path, faults: Faults, longest_bytes: int = LONGEST_LINE_BYTES) -> Iterator[Line]:
    """Go through a file line by line, without the empty ones.

    Args:
        path: Of the file.
        faults: What is told of lines that are too long, and of a file that breaks off.
        longest_bytes: Of a line.

    Raises:
        TraceError: The file cannot be opened; or as ``faults`` says.
    """
    with open_trace(path) as stream:
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(longest_bytes + 1)
                too_long = len(line) > longest_bytes
                while too_long and line and not line.endswith(b"\n"):
                    line = stream.readline(1 << 16)
            except UNPACKING_ERRORS as error:
                faults.note(line_of(number), f"the file breaks off here: {error}")
                return
            if too_long:
                faults.note(line_of(number), f"longer than {longest_bytes >> 20} MiB")
            elif not line:
                return
            else:
                line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if not line.isspace():
                    yield Line(number, line.removesuffix(b"\n"), line.endswith(b"\n"))


def read_whole(path: Path, faults: Faults, longest_bytes: int = LONGEST_LINE_BYTES) -> bytes | None:
    """Read a file that is one document.

    Returns:
        Its bytes; None when that was noted as a fault.

    Raises:
        TraceError: As ``read_lines``.
    """
    with open_trace(path) as stream:
        try:
            text = stream.read(longest_bytes + 1)
        except UNPACKING_ERRORS as error:
            faults.note("", f"the file breaks off: {error}")
            return None
    if len(text) > longest_bytes:
        faults.note("", f"longer than {longest_bytes >> 20} MiB")
        return None
    return text.removeprefix(_BYTE_ORDER_MARK)


class _ZstdStream(io.RawIOBase):
    """A zstd file, any number of frames, unpacked as it is read.

    ``zstandard``'s own reader takes a file that was cut short for a whole one.
    """

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        self._raw = raw
        self._unpacker = self._new_unpacker(path)
        self._path = path
        self._packed = self._ready = b""
        self._in_frame = False

    def _new_unpacker(self, path: Path) -> Any:
        try:
            import zstandard
        except ImportError:
            self._raw.close()
            fault = "is packed with zstd, and the package zstandard is missing: pip install 'kvtide[traces]'"
            raise TraceError(str(path), "", fault) from None
        self._error: type[Exception] = zstandard.ZstdError
        return zstandard.ZstdDecompressor().decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._packed:
                self._packed = self._raw.read(_FEED_BYTES)
            if not self._packed:
                if self._in_frame:
                    raise UnpackingError("zstd stream ended before its end")
                return 0
            self._unpack()
        part = self._ready[: len(buffer)]
        self._ready = self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def _unpack(self) -> None:
        self._in_frame = True
        try:
            self._ready = self._unpacker.decompress(self._packed)
        except self._error as error:
            raise UnpackingError(str(error)) from None
        self._packed = b""
        if self._unpacker.eof:
            self._packed = self._unpacker.unused_data
            self._unpacker = self._new_unpacker(self._path)
            self._in_frame = False

    def close(self) -> None:
        self._raw.close()
        super().close()
