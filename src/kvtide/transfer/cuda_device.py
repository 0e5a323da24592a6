"""What the two directions of one device share: registered memory, thresholds, and each other's copies.

Knows who is open and which host memory the device may reach. Does not know how a copy proceeds; that is
``cuda.py``.
"""

import logging
import mmap
import threading
from collections import deque
from typing import Protocol

import numpy as np

from kvtide.jobs import Direction
from kvtide.transfer.cuda_order import Touched
from kvtide.transfer.cuda_runtime import CudaError, CudaRuntime, Event, Stream
from kvtide.transfer.cuda_ways import PORTION_PIECES
from kvtide.transfer.plans import CopyPlan

logger = logging.getLogger(__name__)

TABLES = 64
"""Tables of pieces for kernels that have not run yet; 96 KiB each."""

FALLBACK_BYTES = 28 << 10
"""From this size on pieces go by the copy engine where nothing was measured."""


class OpenCopy(Protocol):
    """A copy that others may have to wait for.

    Attributes:
        touched: What it reads and writes.
        settled: Nothing of it will be submitted any more.
        ended: No byte of it will follow.
        last: Reached once all that was submitted of it is done; None before that.
    """

    touched: Touched
    ended: bool
    last: Event | None

    @property
    def settled(self) -> bool: ...


class Advancing(Protocol):
    """One direction."""

    def advance(self) -> bool:
        """Note what has ended and submit what may be submitted; True when something was submitted."""


class CudaDevice:
    """Shared by both directions; used by the engine's thread, but for ``register`` and ``unregister``.

    Args:
        runtime: Of the device.

    Attributes:
        runtime: The same.
        engine_from_bytes: Per direction, the size of piece from which on the copy engine is faster.
        copies: Open ones of both directions, in order of submission.
        copiers: Directions that are open.
        broken: What the runtime said when it lost track of what had been submitted; nothing that is under
            way is reported any more.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self.engine_from_bytes = dict.fromkeys(Direction, FALLBACK_BYTES)
        self.copies: list[OpenCopy] = []
        self.copiers: list[Advancing] = []
        self.broken: CudaError | None = None
        self._registered: dict[int, int] = {}
        self._lock = threading.Lock()  # around what is registered: another thread adds to it
        self._begins = self._ends = self._bounds = np.empty(0, dtype=np.int64)
        self._events: list[Event] = []
        self._tables_map = mmap.mmap(
            -1, TABLES * 3 * PORTION_PIECES * 8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._tables = np.frombuffer(self._tables_map, dtype=np.int64).reshape(TABLES, 3 * PORTION_PIECES)
        self._free_tables: deque[int] = deque()
        self._tables_open = False

    # -- memory of the host -----------------------------------------------------------------------

    def register(self, address: int, byte_count: int) -> bool:
        """Let the device reach a piece of host memory; False when the system would not have it.

        May be called from any thread.
        """
        try:
            self.runtime.register(address, byte_count)
        except CudaError as error:
            logger.error("host_memory: %d MiB cannot be registered: %s", byte_count >> 20, error)
            return False
        with self._lock:
            self._registered[address] = byte_count
            self._note_registered()
        return True

    def unregister(self, address: int) -> None:
        """Undo ``register``; no copy is under way in that memory. May be called from any thread."""
        with self._lock:
            del self._registered[address]
            self._note_registered()
        try:
            self.runtime.unregister(address)
        except CudaError as error:  # of a context that is lost: its registrations are gone, too
            logger.error("memory at %#x stays registered: %s", address, error)

    def _note_registered(self) -> None:
        pieces = sorted(self._registered.items())
        begins = np.array([begin for begin, _ in pieces], dtype=np.int64)
        ends = begins + np.array([size for _, size in pieces], dtype=np.int64)
        self._begins, self._ends, self._bounds = begins, ends, np.union1d(begins, ends)

    def registered(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Name the registered memory: ``int64`` begins, ends, and both together in order."""
        with self._lock:
            return self._begins, self._ends, self._bounds

    # -- what a kernel reads ----------------------------------------------------------------------

    def open_tables(self) -> None:
        """Register the tables that kernels read. Without them all pieces go by the copy engine."""
        address = int(self._tables.ctypes.data)
        if not self._tables_open and self.register(address, self._tables.nbytes):
            self._tables_open = True
            self._free_tables.extend(range(TABLES))

    def close_tables(self) -> None:
        """Give them back; no kernel is under way."""
        if self._tables_open:
            self._tables_open = False
            self._free_tables.clear()
            self.unregister(int(self._tables.ctypes.data))

    @property
    def has_table(self) -> bool:
        """Whether ``take_table`` would find one."""
        return bool(self._free_tables)

    def take_table(self, plan: CopyPlan) -> tuple[int, int]:
        """Write a plan where a kernel can read it.

        Returns:
            Which table it is, for ``free_table``, and its address.
        """
        index = self._free_tables.popleft()
        table, count = self._tables[index], len(plan.size)
        table[:count] = plan.source
        table[count : 2 * count] = plan.target
        table[2 * count : 3 * count] = plan.size
        return index, int(table.ctypes.data)

    def free_table(self, index: int) -> None:
        """Give a table back: the kernel that reads it has run."""
        self._free_tables.append(index)

    # -- events and order -------------------------------------------------------------------------

    def take_event(self) -> Event:
        """Hand out an event nobody else uses."""
        return self._events.pop() if self._events else self.runtime.new_event()

    def free_event(self, event: Event) -> None:
        """Give it back. Who was told to wait for it before still waits for the recording of that time."""
        self._events.append(event)

    def before(self, touched: Touched) -> list[OpenCopy]:
        """Open copies of either direction that a new one may not overtake."""
        return [copy for copy in self.copies if touched.conflicts(copy.touched)]

    def advance(self) -> None:
        """Let both directions go on until neither can submit anything."""
        while any(copier.advance() for copier in self.copiers):
            continue

    def lose(self, error: CudaError) -> None:
        """Note that nothing can be learned any more about what has been submitted."""
        if self.broken is None:
            self.broken = error
            logger.error("copies under way are not reported any more: %s", error)

    def open(self, copier: Advancing) -> None:
        """Take note of a direction."""
        self.copiers.append(copier)
        if any(self.engine_from_bytes.values()):
            self.open_tables()

    def close(self, copier: Advancing, streams: list[Stream], events: list[Event]) -> None:
        """Forget a direction that has ended, and what it used; with the last one everything shared goes."""
        self.copiers.remove(copier)
        if not self.copiers:
            events, self._events = events + self._events, []
        if self.broken is not None:
            return
        if not self.copiers:
            self.close_tables()
        try:
            self.runtime.drop(streams, events)
        except CudaError as error:
            logger.error("not all of a copier could be given back: %s", error)
