"""Small chunks, packed: runs of them, read from the pieces that have them and written where none has.

What a window holds is listed once and remembered for a while; a piece of another prompt is asked once, by its
headers, how far it goes with ours. A window that so many prompts continue that one listing does not tell all
is walked instead, from the end of one piece to the beginning of the next.
"""

import time
from collections.abc import Iterable, Sequence

from kvtide.errors import CorruptRecordError, TierError, TierUnavailableError
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.tiers.base import Written
from kvtide.tiers.objects_bucket import Bucket
from kvtide.tiers.objects_fetch import MISSING_S, THERE_S, Pieces
from kvtide.tiers.objects_learnt import Listing
from kvtide.tiers.objects_pieces import Piece, WindowPart, new_piece, parts_of, segments, start_folder
from kvtide.tiers.objects_search import Search, together
from kvtide.tiers.records import HEADER_BYTES, RecordRun
from kvtide.tiers.shared import SharedTier, fill


class Windows:
    """Packed chunks in a bucket.

    Args:
        tier: Names folders, makes and checks headers.
        bucket: Where they are.
    """

    def __init__(self, tier: SharedTier, bucket: Bucket) -> None:
        self._tier = tier
        self._pieces = Pieces(bucket)
        self._learnt = self._pieces.learnt

    def clear(self) -> None:
        """Forget what was learnt."""
        self._learnt.clear()

    # -- runs ---------------------------------------------------------------------------------------------

    def find(self, run: RecordRun, end_s: float) -> list[bool]:
        """Say which chunks are in pieces; a window that has nothing of a run is the last one asked for.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """
        found = [False] * len(run)
        for part in parts_of(run):
            if not part.hashes:
                continue
            cover = self._cover(run, part, None, end_s, MISSING_S)
            for offset, (piece, index) in cover.items():
                found[part.at + offset - part.start] = True
                self._learnt.seen(make_offload_key(part.hashes[offset], run.group_index), piece, index)
            if not cover:
                break
        return found

    def read(
        self, run: RecordRun, payloads: Sequence[memoryview], end_s: float
    ) -> list[bool | TierError | None]:
        """Fill what pieces have; None stands for a chunk that is in none.

        Raises:
            TierUnavailableError: Nothing was read.
        """
        outcomes: list[bool | TierError | None] = [None] * len(run)
        try:
            for part in parts_of(run):
                if part.hashes:
                    self._read_part(run, part, payloads, outcomes, end_s)
        except TierUnavailableError as error:
            if True not in outcomes:
                raise
            return [error if one is None else one for one in outcomes]
        return outcomes

    def write(
        self, run: RecordRun, payloads: Sequence[memoryview], piece_chunks: int, end_s: float
    ) -> list[Written | TierError | None]:
        """Write what no piece has; None stands for a chunk whose window's beginning is not known.

        Args:
            run: The chunks.
            payloads: For each ``uint8[n]``.
            piece_chunks: In a piece at most.
            end_s: By the monotonic clock.

        Raises:
            TierFullError: No room: nothing was written.
            TierUnavailableError: Nothing is known to have been written.
        """
        outcomes: list[Written | TierError | None] = [None] * len(run)
        try:
            for part in parts_of(run):
                if part.hashes:
                    self._write_part(run, part, payloads, piece_chunks, outcomes, end_s)
        except TierError as error:
            if Written.NEW not in outcomes:
                raise
            return [error if one is None else one for one in outcomes]
        return outcomes

    # -- single keys --------------------------------------------------------------------------------------

    def seen_in(self, key: OffloadKey) -> str | None:
        """Name the piece in which a key was seen, by its path; it may have gone."""
        seen = self._seen(key)
        return None if seen is None else seen[0].path

    def read_seen(self, key: OffloadKey, payload: memoryview, end_s: float) -> bool:
        """Read a chunk from the piece in which it was seen; False where it was not, or that has gone.

        Raises:
            CorruptRecordError: Not what was written; the piece has been deleted.
            TierUnavailableError: Refused, unreachable or out of time.
        """
        seen = self._seen(key)
        if seen is None:
            return False
        outcome = self._fill(*seen, [key], [payload], end_s)[0]
        if isinstance(outcome, TierError):
            raise outcome
        return outcome

    def forget(self, keys: Iterable[OffloadKey]) -> list[str]:
        """Forget the pieces in which keys were seen, whole: one chunk cannot be taken out.

        Returns:
            Their paths, to be deleted.
        """
        paths = []
        for key in keys:
            if (seen := self._seen(key)) is not None:
                paths.append(seen[0].path)
                self._learnt.lost(seen[0])
            self._learnt.gone(key)
        return paths

    def _seen(self, key: OffloadKey) -> tuple[Piece, int] | None:
        """Of now only: what a call that was late has learnt may be of before a reset."""
        seen = self._learnt.piece_of(key)
        return seen if seen and self._is_of_now(seen[0], key) else None

    def _is_of_now(self, piece: Piece, key: OffloadKey) -> bool:
        return piece.path.startswith(f"{self._tier.folder_of(key)}/")

    # -- parts of runs ------------------------------------------------------------------------------------

    def _read_part(
        self,
        run: RecordRun,
        part: WindowPart,
        payloads: Sequence[memoryview],
        outcomes: list[bool | TierError | None],
        end_s: float,
    ) -> None:
        cover = self._cover(run, part, payloads[0].nbytes, end_s, MISSING_S)
        for offsets in together(cover):
            piece, index = cover[offsets[0]]
            at = part.at + offsets[0] - part.start
            stop = at + len(offsets)
            keys = [make_offload_key(part.hashes[offset], run.group_index) for offset in offsets]
            outcomes[at:stop] = self._fill(piece, index, keys, payloads[at:stop], end_s)

    def _fill(
        self,
        piece: Piece,
        index: int,
        keys: Sequence[OffloadKey],
        payloads: Sequence[memoryview],
        end_s: float,
    ) -> list[bool | TierError]:
        """Fill payloads from neighbouring chunks of a piece, the first of which is at ``index``.

        A piece that is not what was written is deleted; one that has gone is forgotten.
        """
        payload_bytes = payloads[0].nbytes
        try:
            fetched = self._pieces.fetch(piece, payload_bytes, index, index + len(keys), end_s)
        except CorruptRecordError as error:
            return self._refused(piece, keys, [_forgotten(error)] * len(keys), end_s)
        if fetched is None:
            self._learnt.lost(piece)
            return [False] * len(keys)
        headers, body = fetched
        outcomes: list[bool | TierError] = []
        for at, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
            fill(payload, body[at * payload_bytes : (at + 1) * payload_bytes])
            header_at = (index + at) * HEADER_BYTES
            try:
                self._tier.check(headers[header_at : header_at + HEADER_BYTES], key, payload)
                outcomes.append(True)
            except CorruptRecordError as error:
                outcomes.append(_forgotten(error))
        if not all(one is True for one in outcomes):
            return self._refused(piece, keys, outcomes, end_s)
        for at, key in enumerate(keys):
            self._learnt.seen(key, piece, index + at)
        return outcomes

    def _refused(
        self,
        piece: Piece,
        keys: Sequence[OffloadKey],
        outcomes: list[bool | TierError],
        end_s: float,
    ) -> list[bool | TierError]:
        """Delete a piece that is not what was written."""
        if not self._is_of_now(piece, keys[0]):
            return [False] * len(keys)  # of before a reset, and right for those who had none
        self._pieces.delete(piece, end_s)
        return outcomes

    def _write_part(
        self,
        run: RecordRun,
        part: WindowPart,
        payloads: Sequence[memoryview],
        piece_chunks: int,
        outcomes: list[Written | TierError | None],
        end_s: float,
    ) -> None:
        window, payload_bytes, names = self._window(run, part), payloads[0].nbytes, run.names()
        # What another server has written since it was listed is written twice; that costs room and no more.
        cover = self._cover(run, part, payload_bytes, end_s, THERE_S)
        there = {offset for offset, (piece, _) in cover.items() if piece.suits(payload_bytes)}
        for offset in there:
            outcomes[part.at + offset - part.start] = Written.THERE_ALREADY
        for offsets in segments([offset for offset in part.offsets if offset not in there], piece_chunks):
            at = part.at + offsets.start - part.start
            stop = at + len(offsets)
            headers = b"".join(map(self._tier.header_of, names[at:stop], payloads[at:stop]))
            if window != self._window(run, part):  # headers of one generation under a name of the other
                raise TierUnavailableError("a reset has come in between")
            piece = new_piece(window, part.hashes, offsets.start, len(offsets), payload_bytes)
            new = self._pieces.put(piece, [headers, *payloads[at:stop]], end_s)
            outcomes[at:stop] = [Written.NEW if new else Written.THERE_ALREADY] * len(offsets)
            for index, name in enumerate(names[at:stop]):
                self._learnt.seen(name.key, piece, index)

    # -- which piece has what -----------------------------------------------------------------------------

    def _cover(
        self, run: RecordRun, part: WindowPart, payload_bytes: int | None, end_s: float, missing_s: float
    ) -> dict[int, tuple[Piece, int]]:
        """Find the pieces that hold what a run wants of a window.

        Args:
            run: The chunks.
            part: Of the run.
            payload_bytes: Of each; None when that is not known.
            end_s: By the monotonic clock.
            missing_s: How old a listing may be that does not tell of all of it.
        """
        window = self._window(run, part)
        for age_s in (THERE_S, missing_s):
            listing = self._pieces.listing(window, window, end_s, age_s)
            search = Search(part, payload_bytes, walks=not listing.whole)
            self._look(search, window, listing, part, end_s)
            if search.complete or listing.at_s >= time.monotonic() - missing_s:
                break
        return search.cover

    def _look(self, search: Search, window: str, listing: Listing, part: WindowPart, end_s: float) -> None:
        if listing.whole:
            self._try(search, listing.pieces, end_s)
            return
        offset = 0
        while offset < part.stop:
            folder = start_folder(window, part.hashes, offset)
            self._try(search, self._pieces.listing(window, folder, end_s, MISSING_S).pieces, end_s)
            if search.reach <= offset >= part.start:
                break  # the prefix ends here
            offset = max(search.reach, part.start) if search.reach <= offset else search.reach

    def _try(self, search: Search, pieces: Sequence[Piece], end_s: float) -> None:
        for piece in search.sure(pieces):
            search.take(piece, piece.count)
        for piece in search.doubtful(pieces):
            try:
                headers = self._pieces.headers(piece, end_s)
            except CorruptRecordError:
                headers = None
            if headers is None:
                self._learnt.lost(piece)
            else:
                search.take(piece, search.match(piece, headers.packed))

    def _window(self, run: RecordRun, part: WindowPart) -> str:
        key = make_offload_key(part.hashes[0], run.group_index)
        return f"{self._tier.folder_of(key)}/w/{self._tier.file_of(part.hashes[0], key)}"


def _forgotten(error: CorruptRecordError) -> CorruptRecordError:
    return CorruptRecordError(f"{error}; the piece is forgotten")
