"""Which record is in which slot of a private disk, in a SQLite file beside the slabs.

A row is there once its record can be read, so a process that is killed loses what was being written and no
more. After a loss of power rows may be missing or name slots that hold something else: every record that is
read proves itself, and a file that cannot be read at all is made anew from the headers in the slabs.
"""

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtide.errors import TierUnavailableError
from kvtide.tiers.records import RecordHeader, pack
from kvtide.tiers.slabs import Place

FILE_NAME = "index.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    payload_bytes INTEGER, slot INTEGER, header BLOB NOT NULL, PRIMARY KEY (payload_bytes, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
"""


class DiskIndex:
    """Rows by slot, and the generation of now.

    Args:
        folder: Where the file is, or is made.

    Raises:
        TierUnavailableError: The file cannot be opened or is none of ours: it can be made anew.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._path = folder / FILE_NAME
        try:
            self._path.touch(mode=0o600)
            self._rows = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            self._rows.execute("PRAGMA journal_mode = WAL")
            # A commit is in the kernel's hands, not on the disk: enough for a process that dies.
            self._rows.execute("PRAGMA synchronous = NORMAL")
            self._rows.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise TierUnavailableError(f"{self._path}: {error}") from None

    @property
    def generation(self) -> int:
        """As it was last set; 0 in a new file."""
        return self._fact("generation")

    def set_generation(self, generation: int) -> None:
        """Remember a generation."""
        self._run("REPLACE INTO facts VALUES ('generation', ?)", [(generation.to_bytes(8, "big"),)])

    def put(self, place: Place, header: RecordHeader) -> None:
        """Note that a slot holds a record that can be read."""
        row = (place.payload_bytes, place.slot, pack(header))
        self._run("REPLACE INTO records VALUES (?, ?, ?)", [row])

    def put_all(self, rows: Iterable[tuple[Place, RecordHeader]]) -> None:
        """Note many at once."""
        packed = [(place.payload_bytes, place.slot, pack(header)) for place, header in rows]
        self._run("REPLACE INTO records VALUES (?, ?, ?)", packed)

    def remove(self, places: Iterable[Place]) -> None:
        """Note that slots hold nothing."""
        rows = [(place.payload_bytes, place.slot) for place in places]
        self._run("DELETE FROM records WHERE payload_bytes = ? AND slot = ?", rows)

    def rows(self) -> list[tuple[Place, bytes]]:
        """List every row: a slot, and the header it should hold.

        Raises:
            TierUnavailableError: The file is damaged.
        """
        with self._lock:
            try:
                found = self._rows.execute("SELECT payload_bytes, slot, header FROM records").fetchall()
            except sqlite3.Error as error:
                raise TierUnavailableError(f"{self._path}: {error}") from None
        return [(Place(payload_bytes, slot), header) for payload_bytes, slot, header in found]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._rows.close()

    # -- inside ---------------------------------------------------------------------------------

    def _fact(self, name: str) -> int:
        with self._lock:
            try:
                row = self._rows.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
            except sqlite3.Error as error:
                raise TierUnavailableError(f"{self._path}: {error}") from None
        return int.from_bytes(row[0], "big") if row is not None else 0

    def _run(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Run a statement for each row, all or none of them."""
        with self._lock:
            try:
                if len(rows) == 1:
                    self._rows.execute(statement, rows[0])
                    return
                self._rows.execute("BEGIN")
                self._rows.executemany(statement, rows)
                self._rows.execute("COMMIT")
            except sqlite3.Error as error:
                raise TierUnavailableError(f"{self._path}: {error}") from None
