"""Object stores that many servers share: S3 and what speaks like it, Google's and Azure's, through obstore.

A chunk that is large is an object of its own, under its key. Small ones are packed: neighbours of one prompt
in one object, a *piece*, found by listing the folder of their window (``objects_pieces``). A chunk of which
only the key is known is read and written by itself, unless it was seen in a piece.
Objects are made once and not changed; what is evicted is up to the bucket's own rules.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from kvtide.errors import CorruptRecordError, TierError, TierUnavailableError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.objects_bucket import Body, Bucket
from kvtide.tiers.objects_options import ObjectsOptions, need_obstore, options_of, store_of
from kvtide.tiers.objects_pieces import chunks_per_piece
from kvtide.tiers.objects_windows import Windows
from kvtide.tiers.records import FORMAT_VERSION, HEADER_BYTES, ChunkName, RecordRun
from kvtide.tiers.shared import SharedTier, end_of, fill

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)

LOOK_FIRST_BYTES = 2 << 20
"""From here on a write asks first whether the record is there. To send 4 MiB and hear that they are takes
twenty times as long as to ask, 1 MiB five times; to ask in vain costs a twentieth and a sixth."""

GALLOP = (4, 16, 64, 256)
"""How many objects are looked for at once, as long as the ones before were there."""


class ObjectsTier(SharedTier):
    """Records in a bucket.

    Args:
        place: From the settings.
        options: From there as well, read.
        store: Of obstore, instead of the one that the options name.
    """

    def __init__(self, place: TierPlace, options: ObjectsOptions, store: "ObjectStore | None" = None) -> None:
        super().__init__(place)
        self._options = options
        store = store_of(options) if store is None else store
        self._bucket = Bucket(store, options.url, options.timeout_s)
        self._windows = Windows(self, self._bucket)
        self._changed = threading.Condition()
        self._calls = 0
        self._closed = False
        self._packed: dict[int, bool] = {}  # by group, as far as it is known
        self.discards_failed = 0

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """From ``{"url": "s3://bucket/prefix"}`` and what else ``ObjectsOptions`` has."""
        return cls(place, options_of(place.options))

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        options_of(options)
        need_obstore()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options.url})"

    def open(self) -> None:
        with self._call(self._options.timeout_s) as end_s:
            self._bucket.listed(f"kv{FORMAT_VERSION}", end_s)

    # -- by key ---------------------------------------------------------------------------------------

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        with self._call(deadline_s) as end_s:
            if self._knows(key) and self._windows.read_seen(key, payload, end_s):
                return True
            return self._knows(key) and self._read_single(key, payload, end_s)

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        if not self.writes(name.key):
            return Written.THERE_ALREADY
        with self._call(deadline_s) as end_s:
            seen = self._windows.seen_in(name.key)
            if seen is not None and self._bucket.length(seen, end_s) is not None:
                return Written.THERE_ALREADY
            return self._write_single(name, payload, end_s)

    def _write_single(self, name: ChunkName, payload: memoryview, end_s: float) -> Written:
        path, parts = self._path_of(name.key), (self.header_of(name, payload), payload)
        if path != self._path_of(name.key):  # a header of one generation under a name of the other
            raise TierUnavailableError(f"{self._options.url}: a reset has come in between")
        if payload.nbytes >= LOOK_FIRST_BYTES:
            there_bytes = self._bucket.length(path, end_s)
            if there_bytes == self.record_bytes(payload.nbytes):
                return Written.THERE_ALREADY
            if there_bytes is not None:  # nobody could ever read it
                self._bucket.replace(path, parts, end_s)
                return Written.NEW
        return Written.NEW if self._bucket.create(path, parts, end_s) else Written.THERE_ALREADY

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        with self._call(deadline_s) as end_s:
            known = [key for key in dict.fromkeys(keys) if self._knows(key)]
            paths = [self._windows.seen_in(key) or self._path_of(key) for key in known]
            asked = list(dict.fromkeys(paths))
            there = dict(zip(asked, self._bucket.lengths(asked, end_s), strict=True))
            found = {key for key, path in zip(known, paths, strict=True) if there[path] is not None}
            return [key in found for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        known = [key for key in keys if self._knows(key)]
        try:
            with self._call(2 * self._options.timeout_s) as end_s:
                paths = [*map(self._path_of, known), *self._windows.forget(known)]
                self._delete(list(dict.fromkeys(paths)), end_s)
        except TierUnavailableError as error:  # it is closed
            logger.debug("%s", error)

    # -- by run ---------------------------------------------------------------------------------------

    def run_chunks(self, payload_bytes: int) -> int:
        return chunks_per_piece(payload_bytes, self._options.pack_bytes)

    def read_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[bool | TierError]:
        if not payloads or self.run_chunks(payloads[0].nbytes) == 1:
            return super().read_run(run, payloads, deadline_s)
        with self._call(deadline_s) as end_s:
            outcomes = self._windows.read(run, payloads, end_s)
            return self._read_singles(run, payloads, outcomes, end_s)

    def write_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[Written | TierError]:
        if not payloads or not self.writes(run.keys()[0]):
            return [Written.THERE_ALREADY] * len(payloads)
        piece_chunks = self.run_chunks(payloads[0].nbytes)
        if piece_chunks == 1:
            return super().write_run(run, payloads, deadline_s)
        with self._call(deadline_s) as end_s:
            outcomes = self._windows.write(run, payloads, piece_chunks, end_s)
            return self._write_singles(run, payloads, outcomes, end_s)

    def find(self, run: RecordRun, deadline_s: float) -> Sequence[bool]:
        if not len(run) or not self._knows(run.keys()[0]):
            return [False] * len(run)
        with self._call(deadline_s) as end_s:
            found = [False] * len(run)
            if self._packed.get(run.group_index, True):
                found = self._windows.find(run, end_s)
                if any(found):
                    self._packed[run.group_index] = True
            self._find_singles(run, found, end_s)
            return found

    def _read_singles(
        self,
        run: RecordRun,
        payloads: Sequence[memoryview],
        outcomes: Sequence[bool | TierError | None],
        end_s: float,
    ) -> list[bool | TierError]:
        """Look by key for what is in no piece, in steps that grow; what follows a miss is of no use."""
        read: list[bool | TierError] = [outcome or False for outcome in outcomes]
        missing = [at for at, outcome in enumerate(outcomes) if outcome is None]
        keys, object_bytes = run.keys(), self.record_bytes(payloads[0].nbytes)
        for step in (1, *GALLOP):
            asked, missing = missing[:step], missing[step:]
            try:
                paths = [self._path_of(keys[at]) for at in asked]
                bodies = self._bucket.read_whole(paths, object_bytes, end_s)
            except TierUnavailableError as error:
                if True not in read:
                    raise
                for at in (*asked, *missing):
                    read[at] = error
                return read
            for at, path, body in zip(asked, paths, bodies, strict=True):
                try:
                    read[at] = self._taken(keys[at], path, body, payloads[at], end_s)
                except CorruptRecordError as error:
                    read[at] = error
            if not missing or None in bodies:
                break
        return read

    def _write_singles(
        self,
        run: RecordRun,
        payloads: Sequence[memoryview],
        outcomes: Sequence[Written | TierError | None],
        end_s: float,
    ) -> list[Written | TierError]:
        """Write by key what no piece can be named for."""
        written: list[Written | TierError] = []
        trouble: TierError | None = None
        for name, payload, outcome in zip(run.names(), payloads, outcomes, strict=True):
            known = outcome or trouble
            if known is not None:
                written.append(known)
                continue
            try:
                written.append(self._write_single(name, payload, end_s))
            except TierError as error:
                if Written.NEW not in written:
                    raise
                trouble = error
                written.append(error)
        return written

    def _find_singles(self, run: RecordRun, found: list[bool], end_s: float) -> None:
        """Look by key for what is in no piece, in steps that grow; what follows a miss is of no use.

        Whoever only looks is not told how large chunks are. Their objects tell: where they are too large to
        be packed, windows need not be listed from then on.
        """
        missing = [at for at, there in enumerate(found) if not there]
        keys = run.keys()
        for step in GALLOP if self._packed.get(run.group_index) is False else (1, *GALLOP):
            asked, missing = missing[:step], missing[step:]
            lengths = self._bucket.lengths([self._path_of(keys[at]) for at in asked], end_s)
            for at, length in zip(asked, lengths, strict=True):
                found[at] = length is not None
            if len(lengths) > 1 and len(set(lengths)) == 1 and lengths[0] is not None:
                chunks = self.run_chunks(max(0, lengths[0] - HEADER_BYTES))
                self._packed.setdefault(run.group_index, chunks > 1)
            if not missing or None in lengths:
                return

    # -- the rest -------------------------------------------------------------------------------------

    def begin_generation(self, trusted: bool = False) -> None:
        super().begin_generation(trusted)
        self._windows.clear()

    def ping(self, deadline_s: float) -> str:
        with self._call(deadline_s) as end_s:
            began_s = time.monotonic()
            path, said = f"ping/{secrets.token_hex(8)}", secrets.token_bytes(64)
            self._bucket.create(path, [said], end_s)
            try:
                again = self._bucket.create(path, [said], end_s)
                back = self._bucket.read(path, len(said), end_s)
            finally:
                self._bucket.delete([path], end_s)
            if back is None or bytes(back.view) != said:
                raise TierUnavailableError(f"{self._options.url}: what was written did not come back")
            once = "overwrites what is there" if again else "writes once"
            took_ms = 1e3 * (time.monotonic() - began_s)
            return f"{self._options.url}: written, read and deleted in {took_ms:.0f} ms; {once}"

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._calls, 4 * self._options.timeout_s)

    # -- inside ---------------------------------------------------------------------------------------

    def _path_of(self, key: OffloadKey) -> str:
        """Name the object of a chunk by itself."""
        block_hash = split_offload_key(key)[0]
        return f"{self.folder_of(key)}/{block_hash.hex()[:2]}/{self.file_of(block_hash, key)}"

    def _read_single(self, key: OffloadKey, payload: memoryview, end_s: float) -> bool:
        """Read a chunk from an object of its own; as ``read_into``."""
        path = self._path_of(key)
        try:
            body = self._bucket.read(path, self.record_bytes(payload.nbytes), end_s)
        except CorruptRecordError as error:
            return self._taken(key, path, error, payload, end_s)
        return self._taken(key, path, body, payload, end_s)

    def _taken(
        self,
        key: OffloadKey,
        path: str,
        body: Body | CorruptRecordError | None,
        payload: memoryview,
        end_s: float,
    ) -> bool:
        """Hold what was fetched against what was asked for, and hand it over."""
        try:
            if body is None:
                return False
            if isinstance(body, CorruptRecordError):
                raise body
            fill(payload, body.view[HEADER_BYTES:])
            self.check(body.view[:HEADER_BYTES], key, payload)
        except CorruptRecordError as error:
            if path != self._path_of(key):
                return False  # of before a reset, and right for those who had none
            self._delete([path], end_s)
            raise CorruptRecordError(f"{self._options.url}: {error}; the record is forgotten") from None
        return True

    def _delete(self, paths: Sequence[str], end_s: float) -> None:
        try:
            self._bucket.delete(paths, end_s)
        except TierError as error:
            self.discards_failed += 1
            logger.debug("%s", error)

    def _knows(self, key: OffloadKey) -> bool:
        return self.identity.shard_of(key) is not None

    @contextmanager
    def _call(self, deadline_s: float) -> Iterator[float]:
        """One call: says when it has to end, and keeps ``close`` waiting."""
        with self._changed:
            if self._closed:
                raise TierUnavailableError(f"{self._options.url}: closed")
            self._calls += 1
        try:
            yield end_of(deadline_s)
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()
