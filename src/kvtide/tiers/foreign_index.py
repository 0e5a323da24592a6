"""Another rank's index, from which its records are found by key.

Reads what ``DiskIndex`` writes, while its owner goes on writing; never changes it.
"""

import sqlite3
import threading
from pathlib import Path
from typing import NamedTuple

from kvtide.errors import TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.tiers.disk_index import FILE_NAME, SQL_ERRORS
from kvtide.tiers.slabs import Place

_FACT = "(SELECT value FROM facts WHERE name = '{}')"
# One statement sees one moment: a row and the facts it is held against belong together.
_FIND = (
    f"SELECT payload_bytes, slot, owners.generation, {_FACT.format('session')}, {_FACT.format('resets')}"
    " FROM records JOIN owners ON owner = number AND records.generation = owners.generation"
    " WHERE key = ? AND fingerprint = ?"
)


class Found(NamedTuple):
    """Where a record should be.

    Attributes:
        place: The slot.
        generation: Of the owner, at this moment.
        session: Which run of the owner says so.
        resets: How many there were in that run.
    """

    place: Place
    generation: int
    session: bytes
    resets: int


class ForeignIndex:
    """Rows by key.

    Args:
        folder: Of the other rank.

    Raises:
        TierUnavailableError: It is not there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._lock = threading.Lock()
        try:
            self._rows = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=rw",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
            )
            self._rows.text_factory = bytes
            self._rows.execute("PRAGMA query_only = 1")
        except sqlite3.Error as error:
            raise TierUnavailableError(f"{self._path}: {error}") from None

    def session(self) -> bytes:
        """Tell which run of its owner has opened it last.

        Raises:
            TierUnavailableError: It cannot be read, or no run has.
        """
        with self._lock:
            try:
                row = self._rows.execute("SELECT value FROM facts WHERE name = 'session'").fetchone()
            except SQL_ERRORS as error:
                raise TierUnavailableError(f"{self._path}: {error}") from None
        if row is None or not isinstance(row[0], bytes):
            raise TierUnavailableError(f"{self._path}: not opened yet")
        return row[0]

    def find(self, key: OffloadKey, fingerprint: bytes) -> list[Found]:
        """Find the slots that should hold a record of the owner's present generation.

        Raises:
            TierUnavailableError: It cannot be read.
        """
        with self._lock:
            try:
                rows = self._rows.execute(_FIND, (key, fingerprint)).fetchall()
            except SQL_ERRORS as error:
                raise TierUnavailableError(f"{self._path}: {error}") from None
        return [
            Found(Place(payload_bytes, slot), _number(generation), session, _number(resets))
            for payload_bytes, slot, generation, session, resets in rows
            if type(payload_bytes) is type(slot) is int
            and type(generation) is type(session) is type(resets) is bytes
        ]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._rows.close()


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, "big")
