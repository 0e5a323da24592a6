"""One rank's folder of a private disk, read from outside, whether or not an instance uses it.

Knows how the folder is laid out. Changes nothing (SQLite may put its two files beside an index that is
read), keeps no lock, follows no link, and takes whatever it finds for somebody else's. Does not judge
payloads (``audit.py``) and removes nothing (``removal.py``).
"""

import contextlib
import fcntl
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtide.errors import CorruptRecordError
from kvtide.tiers.disk_index import FILE_NAME, VERSION
from kvtide.tiers.records import HEADER_BYTES, MAGIC, RecordHeader, served_generation, unpack
from kvtide.tiers.slabs import Place, slot_bytes_of

INDEX_NAMES = tuple(FILE_NAME + end for end in ("", "-wal", "-shm", "-journal"))

ROWS_PER_PAGE = 8192
"""So many rows are read in one go: as long as that takes, a running instance's log cannot be emptied."""

OUR_TABLES = {b"records", b"owners", b"facts", b"by_key"}
OUR_COLUMNS = (
    "payload_bytes, slot, owner, generation, written_at_s, key, header FROM records",
    "number, fingerprint, shard, generation FROM owners",
    "name, value FROM facts",
)

BLOCK_BYTES = 512
"""In which ``stat`` counts, whatever the file system."""

_SLAB = re.compile(r"slab-([1-9][0-9]{0,11})")


@dataclass(frozen=True, slots=True)
class Slab:
    """A file of slots.

    Attributes:
        payload_bytes: Of each of its records.
        byte_count: Length of the file.
        allocated_bytes: What of it is no hole: what counts against ``disk_limit``.
    """

    payload_bytes: int
    byte_count: int
    allocated_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Of a slot."""
        return slot_bytes_of(self.payload_bytes)

    @property
    def slot_count(self) -> int:
        """Whole slots that there are."""
        return self.byte_count // self.slot_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as the index names it, or, where there is no index, as its slot does.

    Attributes:
        place: Slot.
        packed: Header, ``bytes[HEADER_BYTES]`` if it is none.
    """

    place: Place
    packed: bytes

    @property
    def header(self) -> RecordHeader | None:
        """What the header says; None when it is no header."""
        try:
            return unpack(self.packed)
        except CorruptRecordError:
            return None


class RankFolder:
    """One rank's folder.

    Args:
        path: The folder.
        rank: As its name says.

    Raises:
        OSError: It cannot be opened, or is no folder; ``PermissionError`` also where a file cannot.

    Attributes:
        slabs: By bytes of payload, as they were when it was opened.
        index_bytes: What the index takes, its log included.
        left_aside: What was found and not used, and why.
        index_trouble: Why records are taken from the slots instead of the index; None while they are not.
        index_gone: Whether that is because there is none: nothing is lost with it, it is made anew.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path.absolute(), rank
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.slabs: dict[int, Slab] = {}
        self.index_bytes = 0
        self.left_aside: list[str] = []
        self.index_trouble: str | None = None
        self.index_gone = False
        self._rows: sqlite3.Connection | None = None
        try:
            for name in sorted(os.listdir(self.descriptor)):
                self._look_at(name)
            self._rows = self._opened_index()
        except PermissionError:
            os.close(self.descriptor)
            raise
        except (OSError, sqlite3.Error) as error:
            self.index_trouble = f"{FILE_NAME}: {reason(error)}"
            self.index_gone = isinstance(error, FileNotFoundError)

    @property
    def slab_bytes(self) -> int:
        """Of all slabs together, without their holes."""
        return sum(slab.allocated_bytes for slab in self.slabs.values())

    def in_use(self) -> bool:
        """Whether an instance has this folder now.

        Asked by taking the lock for an instant, shared; an instance that starts in that instant tries again.
        """
        try:
            descriptor = self.open("lock", os.O_RDONLY)
        except OSError:  # without one nobody has it
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def row_count(self) -> int | None:
        """How many records the index names; None where it cannot be read."""
        if self._rows is None:
            return None
        try:
            ((count,),) = _asked(self._rows, "SELECT count(*) FROM records")
            return int(count)
        except sqlite3.Error as error:
            self._give_up_index(error)
            return None

    def check_index(self) -> None:
        """Read all of the index, and leave it aside from then on if it is damaged."""
        if self._rows is None:
            return
        try:
            for columns in OUR_COLUMNS:
                _asked(self._rows, f"SELECT {columns} LIMIT 0")
            names = {
                name for (name,) in _asked(self._rows, "SELECT name FROM sqlite_schema WHERE sql NOT NULL")
            }
            if not names <= OUR_TABLES:
                raise sqlite3.DatabaseError("there are tables that are not ours")
            ((answer,),) = _asked(self._rows, "PRAGMA quick_check(1)")
            if answer != b"ok":
                raise sqlite3.DatabaseError(answer.decode(errors="replace").splitlines()[-1])
        except sqlite3.Error as error:
            self._give_up_index(error)

    def served(self) -> set[tuple[bytes, int]]:
        """Tell which generations are served, or would be after a restart, where the index says so.

        Returns:
            Fingerprint, ``bytes[32]``, and generation as records have it.
        """
        if self._rows is None:
            return set()
        running, served = self.in_use(), set()
        with contextlib.suppress(sqlite3.Error):  # then it is not known
            for fingerprint, packed in _asked(self._rows, "SELECT fingerprint, generation FROM owners"):
                if isinstance(fingerprint, bytes) and isinstance(packed, bytes):
                    generation = int.from_bytes(packed, "big")
                    served.add((fingerprint, generation if running else served_generation(generation)))
        return served

    def records(self) -> Iterator[Stored]:
        """List what is stored, by slab and slot.

        An index that cannot be read, or not to its end, is made up for by the headers in the slots; of
        those some may be of records that were discarded.
        """
        after = (0, -1)
        while self._rows is not None:
            try:
                page = self._page(after)
            except sqlite3.Error as error:
                self._give_up_index(error)
                break
            for payload_bytes, slot, packed in page:
                after = (payload_bytes, slot)
                yield Stored(Place(*after), bytes(packed) if isinstance(packed, bytes) else b"")
            if len(page) < ROWS_PER_PAGE:
                return
        if self.index_trouble is not None:
            yield from self._found_in_slots(after)

    def named_now(self, place: Place) -> bytes | None:
        """Ask the index anew which header a slot should hold; None: none, or there is no index."""
        if self._rows is None:
            return None
        try:
            found = _asked(
                self._rows,
                "SELECT header FROM records WHERE payload_bytes = ? AND slot = ?",
                (place.payload_bytes, place.slot),
            )
        except sqlite3.Error as error:
            self._give_up_index(error)
            return None
        return found[0][0] if found and isinstance(found[0][0], bytes) else None

    def open(self, name: str, flags: int) -> int:
        """Open one of its files, and nothing that only looks like one: the descriptor is the caller's.

        Raises:
            OSError: It is not there, a link, or no file.
        """
        # A pipe would keep us waiting for whoever writes to it.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is not a regular file")
        return descriptor

    def close_index(self) -> None:
        """Let go of the index, so that whoever has the lock may change it."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def close(self) -> None:
        """Let go of everything."""
        self.close_index()
        os.close(self.descriptor)

    # -- inside ---------------------------------------------------------------------------------

    def _look_at(self, name: str) -> None:
        try:
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:  # such as the log of an index that was just closed
            return
        slab = _SLAB.fullmatch(name)
        if slab is None and name != "lock" and name not in INDEX_NAMES:
            self.left_aside.append(f"{self.path.name}/{name}: not one of kvtide's")
        elif not stat.S_ISREG(found.st_mode):
            self.left_aside.append(f"{self.path.name}/{name}: not a regular file")
        elif name in INDEX_NAMES:
            self.index_bytes += found.st_blocks * BLOCK_BYTES
        elif slab is not None:
            self.slabs[int(slab[1])] = Slab(int(slab[1]), found.st_size, found.st_blocks * BLOCK_BYTES)

    def _opened_index(self) -> sqlite3.Connection | None:
        """Open the index for reading; None when there is none and nothing that it could name."""
        for name in INDEX_NAMES:
            try:
                os.close(self.open(name, os.O_RDONLY))
            except FileNotFoundError:
                if name == FILE_NAME and not self.slabs:
                    return None
                if name == FILE_NAME:
                    raise
        how = "immutable=1" if self._nobody_can_write() else "mode=ro"
        rows = sqlite3.connect(f"{(self.path / FILE_NAME).as_uri()}?{how}", uri=True, isolation_level=None)
        rows.text_factory = bytes  # whatever somebody put there
        # Nothing of a schema that is not ours is run.
        try:
            _asked(rows, "PRAGMA trusted_schema = OFF")
            _check_tables(rows)
        except sqlite3.Error:
            rows.close()
            raise
        return rows

    def _nobody_can_write(self) -> bool:
        """Whether the folder is a copy that cannot change, as SQLite wants to know to read one."""
        if os.access(self.path, os.W_OK):
            return False
        try:
            return os.stat(f"{FILE_NAME}-wal", dir_fd=self.descriptor).st_size == 0
        except FileNotFoundError:
            return True

    def _page(self, after: tuple[int, int]) -> list[tuple[int, int, Any]]:
        assert self._rows is not None
        return _asked(
            self._rows,
            "SELECT payload_bytes, slot, header FROM records WHERE (payload_bytes, slot) > (?, ?)"
            " AND typeof(payload_bytes) = 'integer' AND typeof(slot) = 'integer'"
            " ORDER BY payload_bytes, slot LIMIT ?",
            (*after, ROWS_PER_PAGE),
        )

    def _give_up_index(self, error: sqlite3.Error) -> None:
        self.index_trouble = f"{FILE_NAME}: {reason(error)}"
        self.close_index()

    def _found_in_slots(self, after: tuple[int, int]) -> Iterator[Stored]:
        for payload_bytes, slab in sorted(self.slabs.items()):
            if payload_bytes < after[0]:
                continue
            first = after[1] + 1 if payload_bytes == after[0] else 0
            try:
                descriptor = self.open(f"slab-{payload_bytes}", os.O_RDONLY)
            except OSError as error:
                self.left_aside.append(f"{self.path.name}/slab-{payload_bytes}: {reason(error)}")
                continue
            try:
                for slot in _written_slots(descriptor, slab, first):
                    with contextlib.suppress(OSError):  # what cannot be read is not there
                        packed = os.pread(descriptor, HEADER_BYTES, slot * slab.slot_bytes)
                        if packed.startswith(MAGIC):
                            yield Stored(Place(payload_bytes, slot), packed)
            finally:
                os.close(descriptor)


def _asked(rows: sqlite3.Connection, statement: str, values: tuple[int, ...] = ()) -> list[Any]:
    """Ask an index.

    Raises:
        sqlite3.Error: It is damaged.
    """
    try:
        return rows.execute(statement, values).fetchall()
    except UnicodeDecodeError:  # what SQLite says of a damaged file may quote it
        raise sqlite3.DatabaseError("it is damaged") from None


def _check_tables(rows: sqlite3.Connection) -> None:
    """See that the tables are ours, and are tables.

    Raises:
        sqlite3.Error: They are not.
    """
    ((version,),) = _asked(rows, "PRAGMA user_version")
    if version != VERSION:
        raise sqlite3.DatabaseError(f"tables of version {version}, where {VERSION} is known")
    ((plain,),) = _asked(
        rows, "SELECT count(*) FROM sqlite_schema WHERE name = 'records' AND type = 'table' AND rootpage > 0"
    )
    if not plain:
        raise sqlite3.DatabaseError("there is no table of records")


def _written_slots(descriptor: int, slab: Slab, first: int) -> Iterator[int]:
    """List the slots of which something was written: of a file that is mostly holes, few."""
    slot = first
    while slot < slab.slot_count:
        try:
            at = os.lseek(descriptor, slot * slab.slot_bytes, os.SEEK_DATA)
        except OSError:  # nothing but holes from here on
            return
        slot = max(slot, at // slab.slot_bytes)
        if slot < slab.slot_count:
            yield slot
        slot += 1


def reason(error: Exception) -> str:
    """Say what went wrong, without the path."""
    return str(getattr(error, "strerror", None) or error)
