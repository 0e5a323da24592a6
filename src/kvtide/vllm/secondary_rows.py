"""Rows of vLLM's host memory, lent to a tier's threads so that they can be taken back at any time.

A call to a medium may never return, and vLLM keeps a row, and whoever waits for it, until its job has ended.
So no tier is ever handed a row: a thread copies between the row and a buffer of its own, and what is late
keeps that buffer alone. Knows bytes; does not know keys, jobs or requests.
"""

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvtide.errors import CorruptRecordError
from kvtide.keys import OffloadKey
from kvtide.tiers.base import PrivateTier, Tier, Written
from kvtide.tiers.records import ChunkName, RecordHeader


class HostRows:
    """vLLM's host memory as rows.

    Args:
        view: ``[row_count, row_bytes]`` of single bytes, C-contiguous; vLLM's own.

    Attributes:
        row_bytes: Of each.
    """

    def __init__(self, view: memoryview) -> None:
        assert view.shape is not None
        self.row_bytes = view.shape[1]
        self._bytes = view.cast("B")

    def row(self, row_index: int) -> memoryview:
        """``uint8[row_bytes]``."""
        return self._bytes[row_index * self.row_bytes : (row_index + 1) * self.row_bytes]

    def release(self) -> None:
        """Let vLLM unmap it; no row may be used any more."""
        self._bytes.release()


class LentRow:
    """One row, as long as it is lent.

    Args:
        rows: Of which it is one.
        row_index: Which.

    Attributes:
        ticket: ``uint8[row_bytes]`` of no use but to be told from others: what is handed around in its place.
        filled: Whether verified bytes were put in.
    """

    def __init__(self, rows: HostRows, row_index: int, ticket: memoryview) -> None:
        self.ticket = ticket
        self.filled = False
        self._rows: HostRows | None = rows
        self._row_index = row_index
        self._lock = threading.Lock()

    def copy_to(self, buffer: memoryview) -> bool:
        """Copy the row out; False when it has been taken back."""
        with self._lock:
            if self._rows is None:
                return False
            _copy(buffer, self._rows.row(self._row_index))
            return True

    def fill_from(self, buffer: memoryview) -> bool:
        """Copy into the row; False, and nothing was touched, when it has been taken back."""
        with self._lock:
            if self._rows is None:
                return False
            _copy(self._rows.row(self._row_index), buffer)
            self.filled = True
            return True

    def take_back(self) -> None:
        """End the loan: when this returns nobody reads or writes the row. Waits for one copy at most."""
        with self._lock:
            self._rows = None


def _copy(target: memoryview, source: memoryview) -> None:
    # By numpy, which lets other threads run meanwhile; the engine's is one of them.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Lending(Tier):
    """Stands before a tier, and knows tickets.

    Args:
        inner: Sees buffers instead of rows. Owned.
        rows: vLLM's.
    """

    def __init__(self, inner: Tier, rows: HostRows) -> None:
        self._inner = inner
        self._rows = rows
        self._lent: dict[int, LentRow] = {}  # by identity of the ticket, which the row keeps alive
        self._spare: list[mmap.mmap] = []
        # Never touched, so it takes no memory.
        self._tickets = memoryview(mmap.mmap(-1, rows.row_bytes))
        self._asking = 0
        self._lock = threading.Lock()

    # -- loans; called by the engine's thread -----------------------------------------------------------

    def lend(self, row_indices: Sequence[int]) -> list[LentRow]:
        """Lend rows; each is the tier's until it is taken back, and known until it is forgotten."""
        lent = [LentRow(self._rows, index, self._tickets[:]) for index in row_indices]
        self._lent.update((id(row.ticket), row) for row in lent)
        return lent

    def forget(self, lent: Sequence[LentRow]) -> None:
        """Take rows back, and know them no more."""
        for row in lent:
            row.take_back()
            self._lent.pop(id(row.ticket), None)

    # -- the contract -----------------------------------------------------------------------------------

    def open(self) -> None:
        self._inner.open()

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        row = self._lent.get(id(payload))
        if row is None:
            return False
        with self._buffer() as buffer:
            return self._inner.read_into(key, buffer, deadline_s) and row.fill_from(buffer)

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        row = self._lent.get(id(payload))
        with self._buffer() as buffer:
            if row is None or not row.copy_to(buffer):
                raise CorruptRecordError("the row was taken back before it could be read")
            return self._inner.write(name, buffer, deadline_s)

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        with self._lock:
            self._asking += 1
        try:
            return self._inner.contains(keys, deadline_s)
        finally:
            with self._lock:
                self._asking -= 1

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._inner.discard(keys)

    def begin_generation(self, trusted: bool = False) -> None:
        self._inner.begin_generation(trusted)

    def close(self) -> None:
        """Close the tier, unless it was asked something and has not answered: that one is left as it is."""
        with self._lock:
            asking = self._asking
        if not asking:
            self._inner.close()

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """``uint8[row_bytes]``, page-aligned: as many as calls are under way at once."""
        with self._lock:
            memory = self._spare.pop() if self._spare else mmap.mmap(-1, self._rows.row_bytes)
        try:
            yield memoryview(memory)
        finally:
            with self._lock:
                self._spare.append(memory)


class LendingPrivate(Lending, PrivateTier):
    """The same before a private tier.

    Args:
        inner: As ``Lending``.
        rows: vLLM's.
    """

    _inner: PrivateTier

    def __init__(self, inner: PrivateTier, rows: HostRows) -> None:
        super().__init__(inner, rows)

    def inventory(self) -> Iterator[RecordHeader]:
        return self._inner.inventory()

    @property
    def capacity_bytes(self) -> int:
        return self._inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    def record_bytes(self, payload_bytes: int) -> int:
        return self._inner.record_bytes(payload_bytes)
