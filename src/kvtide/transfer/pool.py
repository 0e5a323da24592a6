"""The host pool: one anonymous mapping, its pages touched, and registered with a device, in the background.

Bounded by bytes that mean resident bytes: the mapping is as large as the budget's whole slots, and no
larger. Nothing to clean up: it goes with the process, also after SIGKILL.
"""

import ctypes
import logging
import mmap
import os
import threading
import time
from typing import Protocol

import numpy as np

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Capacity grows in these steps."""

REGISTERED_PIECE_BYTES = 256 << 20
"""The same where a device has to know the pages: its driver is locked for as long as one takes."""

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PageRegistrar(Protocol):
    """Lets a device reach host memory; called from the pool's thread."""

    def register(self, address: int, byte_count: int) -> bool:
        """Lock pages and make them known; False when the system would not have it."""

    def unregister(self, address: int) -> None:
        """Undo ``register`` of what begins at the address."""


class HostPool:
    """``slot_count`` slots of ``slot_bytes``, usable from the first on as they become resident.

    Args:
        slot_count: At least 1.
        slot_bytes: Bytes of one slot.
        prefault: Touch the pages in the background; otherwise all slots are ready at once and the copies
            pay for their first touch.
        registrar: Makes pages known to a device before they count as ready; None where copies need no such
            thing.
    """

    def __init__(
        self,
        slot_count: int,
        slot_bytes: int,
        prefault: bool = True,
        registrar: PageRegistrar | None = None,
    ) -> None:
        self.slot_count = slot_count
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(-1, slot_count * slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = np.frombuffer(self._map, dtype=np.uint8)
        """``uint8[slot_count * slot_bytes]``."""
        self.address: int = self.view.ctypes.data
        self._registrar = registrar
        self._registered: list[int] = []
        self._ready_slots = slot_count if registrar is None and not prefault else 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if registrar is not None or prefault:
            self._thread = threading.Thread(target=self._make_ready, name="kvtide-prefault", daemon=True)
            self._thread.start()

    @property
    def ready_slots(self) -> int:
        """Slots from the first on that can be used now."""
        return self._ready_slots

    @property
    def byte_count(self) -> int:
        """Bytes of the whole pool."""
        return self.slot_count * self.slot_bytes

    def close(self) -> None:
        """End the background work. The pages go when the last view of them does.

        No copy between them and a device is under way any more.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._registrar is not None:
            for address in self._registered:
                self._registrar.unregister(address)
            self._registered.clear()

    def await_slots(self, count: int, timeout_s: float) -> bool:
        """Wait until so many slots are ready, at start; False when the time was not enough."""
        until_s = time.monotonic() + timeout_s
        while self._ready_slots < min(count, self.slot_count):
            if time.monotonic() > until_s or self._thread is None or not self._thread.is_alive():
                return self._ready_slots >= count
            time.sleep(0.001)
        return True

    def _make_ready(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        except OSError:
            logger.debug("the thread that touches the pool's pages runs at normal priority")
        piece_bytes = PIECE_BYTES if self._registrar is None else REGISTERED_PIECE_BYTES
        for begin in range(0, self.byte_count, piece_bytes):
            if self._closing.is_set():
                return
            end = min(begin + piece_bytes, self.byte_count)
            parts = range(begin, end, PIECE_BYTES)
            touched = all(self._touch(part, min(part + PIECE_BYTES, end)) for part in parts)
            if not touched or not self._register(begin, end):
                logger.error(
                    "host_memory: the machine gave %d of %d MiB; the pool stays at that size",
                    begin >> 20,
                    self.byte_count >> 20,
                )
                return
            self._ready_slots = end // self.slot_bytes

    def _register(self, begin: int, end: int) -> bool:
        """Make a piece known to the device, if there is one; False when it could not be."""
        if self._registrar is None:
            return True
        if not self._registrar.register(self.address + begin, end - begin):
            return False
        self._registered.append(self.address + begin)
        return True

    def _touch(self, begin: int, end: int) -> bool:
        """Make a piece resident; False when there is no memory for it."""
        address, count = self.address + begin, end - begin
        # Fewer, larger faults where the kernel has huge pages; it does no harm where it has not.
        _libc.madvise(address, count, _MADV_HUGEPAGE)
        if _libc.madvise(address, count, _MADV_POPULATE_WRITE) == 0:
            return True
        if ctypes.get_errno() == 22:  # EINVAL: an older kernel, whose pages are touched one by one
            self.view[begin : end : mmap.PAGESIZE] = 0
            return True
        return False
