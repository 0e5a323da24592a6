"""Pieces in a bucket: listed, fetched, written and deleted, and what of that is remembered.

Knows requests and which of them can be saved; does not know which piece is wanted, nor what makes a record
right.
"""

import logging
import time
from collections.abc import Sequence

from kvtide.errors import CorruptRecordError, TierError
from kvtide.tiers.objects_bucket import Bucket
from kvtide.tiers.objects_learnt import Headers, Learnt, Listing
from kvtide.tiers.objects_pieces import Piece, headers_end, listed_piece, payloads_at

logger = logging.getLogger(__name__)

THERE_S = 30.0
"""How long a listing is believed in what it says is there; a read finds out."""

MISSING_S = 1.0
"""And in what it does not say."""


class Pieces:
    """Pieces.

    Args:
        bucket: Where they are.

    Attributes:
        learnt: What was seen of them.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.learnt = Learnt()

    def listing(self, window: str, folder: str, end_s: float, age_s: float = THERE_S) -> Listing:
        """Say what there is of a window, in one of its folders or in all.

        Args:
            window: Folder of the window.
            folder: It, or one in it.
            end_s: By the monotonic clock.
            age_s: What was listed so long ago will do.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """
        known = self.learnt.listing(folder)
        now_s = time.monotonic()
        if known is not None and known.at_s >= now_s - age_s:
            return known
        written_before = self.learnt.written_count
        found, whole = self._bucket.listed(folder, end_s)
        pieces = (listed_piece(window, path, object_bytes) for path, object_bytes in found)
        listing = Listing(tuple(piece for piece in pieces if piece is not None), whole, now_s)
        return self.learnt.listed(folder, listing, written_before)

    def headers(self, piece: Piece, end_s: float) -> Headers | None:
        """Fetch the headers of a piece; None when it has gone.

        Raises:
            CorruptRecordError: It has another length than was listed.
            TierUnavailableError: Refused, unreachable or out of time.
        """
        known = self.learnt.headers(piece)
        if known is None:
            body = self._bucket.read(piece.path, piece.object_bytes, end_s, (0, headers_end(piece.count)))
            if body is None:
                return None
            known = Headers(bytes(body.view), body.e_tag)
            self.learnt.read(piece, known)
        return known

    def fetch(
        self, piece: Piece, payload_bytes: int, first: int, stop: int, end_s: float
    ) -> tuple[bytes, memoryview] | None:
        """Fetch all headers of a piece and the payloads of its chunks ``[first, stop)``, nothing beside.

        One request where the payloads follow on the headers or these are known, two otherwise.

        Returns:
            ``bytes[count * HEADER_BYTES]`` and ``uint8[(stop - first) * payload_bytes]``; None when it has
            gone, or is no longer the one whose headers are known.

        Raises:
            CorruptRecordError: It has another length.
            TierUnavailableError: Refused, unreachable or out of time.
        """
        if not piece.suits(payload_bytes):
            raise CorruptRecordError(f"a piece of {piece.object_bytes} bytes for {piece.count} chunks")
        begin, end = payloads_at(piece.count, payload_bytes, first, stop)
        if first == 0 and self.learnt.headers(piece) is None:
            span = None if stop == piece.count else (0, end)
            body = self._bucket.read(piece.path, piece.object_bytes, end_s, span)
            if body is None:
                return None
            headers = Headers(bytes(body.view[:begin]), body.e_tag)
            self.learnt.read(piece, headers)
            return headers.packed, body.view[begin:]
        known = self.headers(piece, end_s)
        if known is None:
            return None
        body = self._bucket.read(piece.path, piece.object_bytes, end_s, (begin, end), known.e_tag)
        return None if body is None else (known.packed, body.view)

    def put(self, piece: Piece, parts: Sequence[memoryview | bytes], end_s: float) -> bool:
        """Write a piece unless it is there; False when it is.

        Raises:
            TierFullError: No room.
            TierUnavailableError: Refused, unreachable or out of time.
        """
        listing = self.learnt.listing(piece.folders[0])
        if listing and any(one.path == piece.path and one != piece for one in listing.pieces):
            # Under the very name lies something of another length, which nobody could ever read.
            self._bucket.replace(piece.path, parts, end_s)
            self.learnt.lost(piece)
            new = True
        else:
            new = self._bucket.create(piece.path, parts, end_s)
        self.learnt.written(piece)
        return new

    def delete(self, piece: Piece, end_s: float) -> None:
        """Delete a piece; where that fails, who reads it next will try again."""
        self.learnt.lost(piece)
        try:
            self._bucket.delete([piece.path], end_s)
        except TierError as error:
            logger.debug("%s", error)
