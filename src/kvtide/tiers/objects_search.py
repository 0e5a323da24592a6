"""Which pieces hold what a run wants of one window, chosen by names and by headers that others fetch.

Knows pieces and hashes; asks nobody.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvtide.errors import CorruptRecordError
from kvtide.keys import split_offload_key
from kvtide.tiers.objects_pieces import Piece, WindowPart
from kvtide.tiers.records import HEADER_BYTES, unpack

HEADERS_AT_ONCE = 8
"""Pieces of which only headers tell how far they go with a prompt, asked in one window and call."""


class Search:
    """A search that is under way.

    Args:
        part: What is wanted.
        payload_bytes: Of each chunk; None when that is not known.
        walks: What goes before the part that is wanted is of use too: from its end on there is more.

    Attributes:
        cover: Offset in the window: the piece that has that chunk, and at what place.
        reach: One past the last offset to which the pieces that were tried go with the prompt.
    """

    def __init__(self, part: WindowPart, payload_bytes: int | None, walks: bool) -> None:
        self._part, self._payload_bytes, self._walks = part, payload_bytes, walks
        self._headers_left = HEADERS_AT_ONCE
        self.cover: dict[int, tuple[Piece, int]] = {}
        self.reach = 0

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to be found."""
        return len(self.cover) == self._part.count

    def sure(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Choose those that are of this prompt to their end, the longest first.

        One of another length than its records would take is among them where nothing else is known: it is
        of ours by its name, and whoever reads it deletes it.
        """
        ours = [piece for piece in pieces if piece.known_match(self._part.hashes) == piece.count]
        return sorted(ours, key=lambda piece: (not self._suits(piece), -piece.count))

    def doubtful(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Choose those that are of this prompt at their beginning, as long as they may be of use."""
        open_ones = [piece for piece in pieces if piece.known_match(self._part.hashes) is None]
        for piece in sorted(open_ones, key=lambda piece: (piece.offset, -piece.count)):
            offsets = range(piece.offset, piece.offset + piece.count)
            useful = any(offset in self._part.offsets and offset not in self.cover for offset in offsets)
            useful |= self._walks and piece.offset >= self.reach
            if useful and self._headers_left and self._suits(piece):
                self._headers_left -= 1
                yield piece

    def take(self, piece: Piece, match: int) -> None:
        """Cover what the first ``match`` chunks of a piece have, and no other piece before it."""
        for index in range(match):
            offset = piece.offset + index
            if offset in self._part.offsets:
                self.cover.setdefault(offset, (piece, index))
        if match:
            self.reach = max(self.reach, piece.offset + match)

    def match(self, piece: Piece, headers: bytes) -> int:
        """Count the chunks that a piece has in common with the prompt, by its headers."""
        hashes = self._part.hashes[piece.offset : piece.offset + piece.count]
        for index, block_hash in enumerate(hashes):
            try:
                header = unpack(headers[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
            except CorruptRecordError:
                return index
            if split_offload_key(header.name.key)[0] != block_hash:
                return index
        return len(hashes)

    def _suits(self, piece: Piece) -> bool:
        if self._payload_bytes is None:
            return piece.object_bytes > HEADER_BYTES * piece.count and not piece.object_bytes % piece.count
        return piece.suits(self._payload_bytes)


def together(cover: dict[int, tuple[Piece, int]]) -> list[Sequence[int]]:
    """Divide the offsets that are covered into neighbours of one piece."""
    divided: list[list[int]] = []
    for offset in sorted(cover):
        last = divided[-1][-1] if divided else None
        if last == offset - 1 and cover[last][0] == cover[offset][0]:
            divided[-1].append(offset)
        else:
            divided.append([offset])
    return [tuple(one) for one in divided]
