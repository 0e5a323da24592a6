"""Pieces: neighbouring small chunks in one object, and the names under which they are found.

Chunks stand in *windows* of 64, counted from the beginning of the prompt. All pieces of a window lie in one
folder, named by the hash of the window's first chunk, so that one LIST tells what there is of it, whatever
prompt wrote it. A piece is named by where in the window it begins, how many chunks it holds, and the hashes
of the first and the last: hashes are chained, so whoever knows both ends knows what is between.

    <folder_of>/w/<hash of the window's first chunk>.<shard>/<offset>-<first hash>/<count>-<last hash>

In the object the headers come first, all of them, then the payloads in the same order. So a few KiB tell of
a piece how far it goes with another prompt, and what is wanted of the payloads is one range.

Knows names and ranges of bytes; does not know stores. A name that was listed is data, and is held against
what it may be.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.keys import LEAD_ALIGNMENT
from kvtide.tiers.records import HEADER_BYTES, RecordRun

WINDOW_CHUNKS = LEAD_ALIGNMENT
HASH_BYTES = 16
"""Of a hash, in the name of a piece: enough to choose by. Headers have all of it."""

_NAME = re.compile(r"([0-9]{2})-([0-9a-f]{2,32})/([0-9]{2})-([0-9a-f]{2,32})")


@dataclass(frozen=True, slots=True)
class Piece:
    """One object of a window.

    Attributes:
        path: Of the object.
        offset: Of its first chunk in the window.
        count: Chunks.
        first: Hash of the first chunk, its beginning.
        last: Hash of the last chunk, its beginning.
        object_bytes: As listed, or as written.
    """

    path: str
    offset: int
    count: int
    first: bytes
    last: bytes
    object_bytes: int

    @property
    def folders(self) -> tuple[str, str]:
        """Where it is listed: in its window, and among what begins with the same chunk."""
        start = self.path.rpartition("/")[0]
        return start.rpartition("/")[0], start

    def suits(self, payload_bytes: int) -> bool:
        """Whether it is as long as so many records are."""
        return self.object_bytes == piece_bytes(self.count, payload_bytes)

    def known_match(self, hashes: Sequence[bytes]) -> int | None:
        """Count the chunks that it has in common with a prompt, from its first one on, by its name.

        Args:
            hashes: Of the window's chunks, from the window's first one on, as far as they are known.

        Returns:
            0 where it is of another prompt, None where only its headers tell.
        """
        if self.offset >= len(hashes) or short(hashes[self.offset]) != self.first:
            return 0
        end = self.offset + self.count
        if end <= len(hashes) and short(hashes[end - 1]) == self.last:
            return self.count
        return 1 if self.count == 1 else None


@dataclass(frozen=True, slots=True)
class WindowPart:
    """What a run has in one window.

    Attributes:
        at: Position in the run of its first chunk there.
        count: Chunks.
        start: Offset in the window of the first.
        hashes: Of the window's chunks from its beginning to the run's last; empty where its beginning is not
            known.
    """

    at: int
    count: int
    start: int
    hashes: tuple[bytes, ...] = field(repr=False)

    @property
    def stop(self) -> int:
        """Offset in the window of one past the last."""
        return self.start + self.count

    @property
    def offsets(self) -> range:
        """In the window."""
        return range(self.start, self.stop)


def chunks_per_piece(payload_bytes: int, pack_bytes: int) -> int:
    """Say how many chunks fit in a piece: a power of two, at most a window."""
    count = 1
    while count < WINDOW_CHUNKS and 2 * count * payload_bytes <= pack_bytes:
        count *= 2
    return count


def parts_of(run: RecordRun) -> list[WindowPart]:
    """Divide a run by windows."""
    parts = []
    known_from = run.start - len(run.lead)
    known = run.lead + run.hashes
    stop = run.start + len(run)
    for window in range(run.start // WINDOW_CHUNKS, -(-stop // WINDOW_CHUNKS)):
        begin = window * WINDOW_CHUNKS
        first, last = max(begin, run.start), min(begin + WINDOW_CHUNKS, stop)
        hashes = known[begin - known_from : last - known_from] if begin >= known_from else ()
        parts.append(WindowPart(first - run.start, last - first, first - begin, hashes))
    return parts


def segments(offsets: Sequence[int], piece_chunks: int) -> list[range]:
    """Divide offsets in a window, in order, into what goes into one piece: neighbours, and not too many."""
    divided: list[range] = []
    for offset in offsets:
        if divided and divided[-1].stop == offset and len(divided[-1]) < piece_chunks:
            divided[-1] = range(divided[-1].start, offset + 1)
        else:
            divided.append(range(offset, offset + 1))
    return divided


def short(block_hash: bytes) -> bytes:
    """Cut a hash as it stands in names."""
    return block_hash[:HASH_BYTES]


def start_folder(window: str, hashes: Sequence[bytes], offset: int) -> str:
    """Name what all pieces that begin with one chunk have in common."""
    return f"{window}/{offset:02d}-{short(hashes[offset]).hex()}"


def new_piece(window: str, hashes: Sequence[bytes], offset: int, count: int, payload_bytes: int) -> Piece:
    """Describe a piece that is to be written."""
    first, last = short(hashes[offset]), short(hashes[offset + count - 1])
    path = f"{start_folder(window, hashes, offset)}/{count:02d}-{last.hex()}"
    return Piece(path, offset, count, first, last, piece_bytes(count, payload_bytes))


def listed_piece(window: str, path: str, object_bytes: int) -> Piece | None:
    """Read a name that was listed; None when it is none of ours."""
    if not path.startswith(f"{window}/"):
        return None
    found = _NAME.fullmatch(path[len(window) + 1 :])
    if found is None or len(found[2]) % 2 or len(found[4]) % 2:
        return None
    offset, count = int(found[1]), int(found[3])
    if not 1 <= count <= WINDOW_CHUNKS - offset:
        return None
    return Piece(path, offset, count, bytes.fromhex(found[2]), bytes.fromhex(found[4]), object_bytes)


# -- bytes in a piece ---------------------------------------------------------------------------------


def piece_bytes(count: int, payload_bytes: int) -> int:
    """What a piece takes."""
    return count * (HEADER_BYTES + payload_bytes)


def headers_end(count: int) -> int:
    """Where the headers end and the payloads begin."""
    return count * HEADER_BYTES


def payloads_at(count: int, payload_bytes: int, first: int, stop: int) -> tuple[int, int]:
    """Where the payloads of chunks ``[first, stop)`` of a piece are: first byte, and one past the last."""
    begin = headers_end(count)
    return begin + first * payload_bytes, begin + stop * payload_bytes
