"""Which record is in which slot of a private disk, in a SQLite file beside the slabs.

A row is there once its record can be read, so a process that is killed loses what was being written and no
more. After a loss of power rows may be missing or name slots that hold something else: every record that is
read proves itself, and a file that cannot be read at all is made anew from the headers in the slabs. Knows
rows of several fingerprints; does not know which of them are served.
"""

import contextlib
import functools
import itertools
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.errors import TierError, TierFullError, TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.tiers.records import RecordHeader, Shard, latest, pack
from kvtide.tiers.slabs import Place

FILE_NAME = "index.sqlite"
VERSION = 2
"""Of the tables; a file of another one is made anew."""

SQL_ERRORS = (sqlite3.Error, ValueError, OverflowError)
"""What comes out of a file that may be damaged; its messages quote it and need not be text."""

PAGE_BYTES = 4096
LOG_PAGES = 256
"""After which what was logged goes into the file: the log counts against the limit of the disk."""

ROWS_AT_ONCE = 4096
"""Read under one hold of the lock, so that writes go on between."""

_TABLES = """
CREATE TABLE IF NOT EXISTS records (
    payload_bytes INTEGER, slot INTEGER, owner INTEGER NOT NULL, generation BLOB NOT NULL,
    written_at_s INTEGER NOT NULL, key BLOB NOT NULL, header BLOB NOT NULL,
    PRIMARY KEY (payload_bytes, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (
    number INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, shard INTEGER NOT NULL, generation BLOB NOT NULL,
    UNIQUE (fingerprint, shard)
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
_BY_KEY = "CREATE INDEX IF NOT EXISTS by_key ON records (key)"
_PUT = "REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)"


class Row(NamedTuple):
    """A record that should be in a slot.

    Attributes:
        place: The slot.
        owner: Whose it is, as a number.
        generation: Of the record.
        key: Of the record.
        written_at_s: Seconds since the epoch.
    """

    place: Place
    owner: int
    generation: int
    key: OffloadKey
    written_at_s: int


class DiskIndex:
    """Rows by slot, and whose they are: of which fingerprint and shard, each with its generation.

    Args:
        folder: Where the file is, or is made.

    Raises:
        TierUnavailableError: The file cannot be opened or is none of ours: it can be made anew.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._path = folder / FILE_NAME
        self._owners: dict[tuple[bytes, Shard], int] = {}
        try:
            self._path.touch(mode=0o600)
            self._rows = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._rows.text_factory = bytes
            self._prepare()
        except (OSError, *SQL_ERRORS) as error:
            raise TierUnavailableError(f"{self._path}: {error}") from None

    def owner_of(self, fingerprint: bytes, shard: Shard) -> int:
        """Number a fingerprint, ``bytes[32]``, and a shard of it; the same number each time.

        Raises:
            TierError: The file cannot be written.
        """
        known = self._owners.get((fingerprint, shard))
        if known is None:
            named = (fingerprint, shard.index << 16 | shard.count)
            self._run(
                "INSERT OR IGNORE INTO owners (fingerprint, shard, generation) VALUES (?, ?, ?)",
                [(*named, _packed(0))],
            )
            found = self._all("SELECT number FROM owners WHERE fingerprint = ? AND shard = ?", named)
            if len(found) != 1 or type(found[0][0]) is not int:
                raise TierUnavailableError(f"{self._path}: is damaged")
            known = self._owners[fingerprint, shard] = found[0][0]
        return known

    def generation_of(self, owners: Collection[int]) -> int:
        """As it was last set, the latest of several; 0 at first.

        Raises:
            TierUnavailableError: The file is damaged.
        """
        known = dict(self._all("SELECT number, generation FROM owners", ()))
        if not all(type(known.get(owner)) is bytes for owner in owners):
            raise TierUnavailableError(f"{self._path}: is damaged")
        return latest(int.from_bytes(known[owner], "big") for owner in owners)

    def set_generation(self, owners: Collection[int], generation: int) -> None:
        """Remember a generation, whatever happens.

        Raises:
            TierError: The file cannot be written.
        """
        # A row that is lost with the power costs a record; a reset that is lost would serve many.
        self._run("PRAGMA synchronous = FULL", [()])
        try:
            self._run(
                "UPDATE owners SET generation = ? WHERE number = ?",
                [(_packed(generation), owner) for owner in owners],
            )
        finally:
            self._run("PRAGMA synchronous = NORMAL", [()])

    def set_facts(self, facts: dict[str, bytes]) -> None:
        """Remember what readers in other processes want to know."""
        self._run("REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    def make_findable(self) -> None:
        """Let others find rows by key."""
        self._run(_BY_KEY, [()])

    def put(self, place: Place, header: RecordHeader) -> None:
        """Note that a slot holds a record that can be read.

        Raises:
            TierError: The file cannot be written.
        """
        self._run(_PUT, [self._row(place, header)])

    def put_all(self, rows: Iterable[tuple[Place, RecordHeader]]) -> None:
        """Note many, piece by piece: what is noted at once is logged at once."""
        waiting = iter(rows)
        while piece := [
            self._row(place, header) for place, header in itertools.islice(waiting, ROWS_AT_ONCE)
        ]:
            self._run(_PUT, piece)

    def remove(self, places: Iterable[Place]) -> None:
        """Note that slots hold nothing.

        Raises:
            TierError: The file cannot be written.
        """
        self._run("DELETE FROM records WHERE payload_bytes = ? AND slot = ?", list(places))

    def rows(self) -> Iterator[Row]:
        """List every row that could be one; others are left out.

        Raises:
            TierUnavailableError: The file is damaged.
        """
        columns = "payload_bytes, slot, owner, generation, key, written_at_s"
        for payload_bytes, slot, owner, generation, key, written_at_s in self._pages(columns):
            if type(owner) is int and type(generation) is type(key) is bytes and type(written_at_s) is int:
                place = Place(payload_bytes, slot)
                yield Row(place, owner, int.from_bytes(generation, "big"), OffloadKey(key), written_at_s)

    def headers(self, owners: Collection[int], generation: int) -> Iterator[tuple[Place, bytes]]:
        """List the headers, packed, of what owners have of a generation.

        Raises:
            TierUnavailableError: The file is damaged.
        """
        columns, where = "payload_bytes, slot, owner, header", "AND generation = ?"
        for payload_bytes, slot, owner, header in self._pages(columns, where, (_packed(generation),)):
            if owner in owners and type(header) is bytes:
                yield Place(payload_bytes, slot), header

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._rows.close()

    # -- inside ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._rows.execute("PRAGMA journal_mode = WAL")
        # A commit is in the kernel's hands, not on the disk: enough for a process that dies.
        self._rows.execute("PRAGMA synchronous = NORMAL")
        self._rows.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        self._rows.execute(f"PRAGMA journal_size_limit = {LOG_PAGES * PAGE_BYTES}")
        (version,) = self._rows.execute("PRAGMA user_version").fetchone()
        (tables,) = self._rows.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables and version != VERSION:
            raise TierUnavailableError(f"{self._path}: tables of version {version}, where {VERSION} is known")
        self._rows.executescript(f"{_TABLES} PRAGMA user_version = {VERSION};")
        if not _tables_of(self._rows) <= _known_tables():
            raise TierUnavailableError(f"{self._path}: tables that are not ours")
        (answer,) = self._rows.execute("PRAGMA quick_check(1)").fetchone()
        if answer != b"ok":
            raise TierUnavailableError(f"{self._path}: {answer.decode(errors='replace')}")

    def _row(self, place: Place, header: RecordHeader) -> tuple[object, ...]:
        return (
            place.payload_bytes,
            place.slot,
            self.owner_of(header.fingerprint, header.shard),
            _packed(header.generation),
            header.written_at_s,
            header.name.key,
            pack(header),
        )

    def _pages(
        self, columns: str, where: str = "", values: tuple[Any, ...] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Read all rows, piece by piece; the first two columns are the slot."""
        after = (-1, -1)
        while True:
            found = self._all(
                f"SELECT {columns} FROM records WHERE (payload_bytes, slot) > (?, ?) {where}"
                f" ORDER BY payload_bytes, slot LIMIT {ROWS_AT_ONCE}",
                (*after, *values),
            )
            if any(type(row[0]) is not int or type(row[1]) is not int for row in found):
                raise TierUnavailableError(f"{self._path}: is damaged")
            yield from found
            if len(found) < ROWS_AT_ONCE:
                return
            if (found[-1][0], found[-1][1]) <= after:
                raise TierUnavailableError(f"{self._path}: is damaged")
            after = (found[-1][0], found[-1][1])

    def _all(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        with self._lock:
            try:
                return self._rows.execute(statement, values).fetchall()
            except SQL_ERRORS as error:
                raise TierUnavailableError(f"{self._path}: {error}") from None

    def _run(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement for each row, all or none of them."""
        with self._lock:
            try:
                if len(rows) == 1:
                    self._rows.execute(statement, rows[0])
                    return
                with self._rows:
                    self._rows.execute("BEGIN")
                    self._rows.executemany(statement, rows)
            except SQL_ERRORS as error:
                raise _told(self._path, error) from None


def _tables_of(rows: sqlite3.Connection) -> set[Any]:
    return {text for (text,) in rows.execute("SELECT sql FROM sqlite_schema WHERE sql NOT NULL")}


@functools.cache
def _known_tables() -> set[Any]:
    """As SQLite notes them down; a flipped bit there is a column of another name."""
    with contextlib.closing(sqlite3.connect(":memory:")) as rows:
        rows.text_factory = bytes
        rows.executescript(f"{_TABLES} {_BY_KEY};")
        return _tables_of(rows)


def _packed(generation: int) -> bytes:
    return generation.to_bytes(8, "big")


def _told(path: Path, error: Exception) -> TierError:
    full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return (TierFullError if full else TierUnavailableError)(f"{path}: {error}")
