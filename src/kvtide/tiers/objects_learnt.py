"""What a rank has learnt of a bucket, for a while and bounded.

Listings of windows, headers of pieces, and in which piece a key was seen: all of it hints, of which the
oldest go when there are too many. Knows no store and no clock.
"""

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtide.keys import OffloadKey
from kvtide.tiers.objects_pieces import Piece

LISTED_PIECES = 65_536
"""Of all listings together; a piece takes some 300 bytes here."""

LISTED_AT_MOST = 1000
"""Of one folder: what a store tells in one answer."""

PIECES_WITH_HEADERS = 512
"""16 KiB each at most."""

KEYS = 65_536
"""Some 200 bytes each."""

WRITTEN_MEANWHILE = 1024
"""Pieces of our own that are remembered for listings under way."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A bounded mapping that forgets what was not asked for longest; not for several threads.

    Args:
        limit: Of the weights of all values.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._weight = limit, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Look a value up."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        """Keep a value; one that is heavier than the limit is kept alone."""
        self.drop(key)
        self._values[key] = value, weight
        self._weight += weight
        while self._weight > self._limit and len(self._values) > 1:
            self.drop(next(iter(self._values)))

    def drop(self, key: K) -> None:
        """Forget a value, if it is there."""
        if (held := self._values.pop(key, None)) is not None:
            self._weight -= held[1]


@dataclass(frozen=True, slots=True)
class Listing:
    """What a LIST of a window, or of one place in it, has told.

    Attributes:
        pieces: Found.
        whole: There were no more.
        at_s: When, by the caller's clock.
    """

    pieces: tuple[Piece, ...]
    whole: bool
    at_s: float

    def with_piece(self, piece: Piece) -> "Listing":
        """Say what it is with one more piece, unless it has that one."""
        if piece in self.pieces:
            return self
        kept = self.pieces[-LISTED_AT_MOST:]
        return Listing((*kept, piece), self.whole and len(kept) == len(self.pieces), self.at_s)


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a piece, and of which version of the object they are.

    Attributes:
        packed: ``bytes[count * HEADER_BYTES]``.
        e_tag: As the store told it.
    """

    packed: bytes
    e_tag: str | None


class Learnt:
    """Listings, headers and keys; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written_count = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._written: deque[Piece] = deque(maxlen=WRITTEN_MEANWHILE)
            self._listings: Recent[str, Listing] = Recent(LISTED_PIECES)
            self._headers: Recent[str, Headers] = Recent(PIECES_WITH_HEADERS)
            self._pieces: Recent[str, Piece] = Recent(KEYS)
            self._keys: Recent[OffloadKey, tuple[str, int]] = Recent(KEYS)

    def listing(self, folder: str) -> Listing | None:
        """Say what was listed."""
        with self._lock:
            return self._listings.get(folder)

    @property
    def written_count(self) -> int:
        """Pieces of our own so far; asked before a listing begins, for ``listed``."""
        return self._written_count

    def listed(self, folder: str, listing: Listing, written_before: int) -> Listing:
        """Note what was listed, and what we have written meanwhile, which it may not tell of.

        Args:
            folder: Of a window, or of one place in it.
            listing: What the store has told.
            written_before: ``written_count`` when it was asked.

        Returns:
            All of it.
        """
        with self._lock:
            meanwhile = self._written_count - written_before
            if meanwhile > WRITTEN_MEANWHILE:
                return listing  # not to be relied on later
            for piece in itertools.islice(reversed(self._written), meanwhile):
                if folder in piece.folders:
                    listing = listing.with_piece(piece)
            self._listings.put(folder, listing, 1 + len(listing.pieces))
            return listing

    def written(self, piece: Piece) -> None:
        """Note a piece of our own beside what was listed."""
        with self._lock:
            self._written_count += 1
            self._written.append(piece)
            for folder in piece.folders:
                if (known := self._listings.get(folder)) is not None:
                    grown = known.with_piece(piece)
                    self._listings.put(folder, grown, 1 + len(grown.pieces))

    def headers(self, piece: Piece) -> Headers | None:
        """Say which headers a piece has."""
        with self._lock:
            return self._headers.get(piece.path)

    def read(self, piece: Piece, headers: Headers) -> None:
        """Note the headers of a piece."""
        with self._lock:
            self._headers.put(piece.path, headers)

    def seen(self, key: OffloadKey, piece: Piece, index: int) -> None:
        """Note in which piece a key is, and at what place."""
        with self._lock:
            self._pieces.put(piece.path, piece)
            self._keys.put(key, (piece.path, index))

    def piece_of(self, key: OffloadKey) -> tuple[Piece, int] | None:
        """Say in which piece a key was seen, and at what place."""
        with self._lock:
            path, index = self._keys.get(key) or ("", 0)
            piece = self._pieces.get(path)
            return None if piece is None else (piece, index)

    def gone(self, key: OffloadKey) -> None:
        """Forget where a key was."""
        with self._lock:
            self._keys.drop(key)

    def lost(self, piece: Piece) -> None:
        """Forget a piece that is no longer there, and the listings that told of it."""
        with self._lock:
            self._headers.drop(piece.path)
            self._pieces.drop(piece.path)
            for folder in piece.folders:
                self._listings.drop(folder)
