"""The host pool: one anonymous mapping, its pages touched in the background.

Bounded by bytes that mean resident bytes: the mapping is as large as the budget's whole slots, and no
larger. Nothing to clean up: it goes with the process, also after SIGKILL.
"""

import ctypes
import logging
import mmap
import os
import threading

import numpy as np

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Capacity grows in these steps."""

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostPool:
    """``slot_count`` slots of ``slot_bytes``, usable from the first on as they become resident.

    Args:
        slot_count: At least 1.
        slot_bytes: Bytes of one slot.
        prefault: Touch the pages in the background; otherwise all slots are ready at once and the copies
            pay for their first touch.
    """

    def __init__(self, slot_count: int, slot_bytes: int, prefault: bool = True) -> None:
        self.slot_count = slot_count
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(-1, slot_count * slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = np.frombuffer(self._map, dtype=np.uint8)
        """``uint8[slot_count * slot_bytes]``."""
        self.address: int = self.view.ctypes.data
        self._ready_slots = 0 if prefault else slot_count
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if prefault:
            self._thread = threading.Thread(target=self._prefault, name="kvtide-prefault", daemon=True)
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
        """End the background work. The pages go when the last view of them does."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _prefault(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        except OSError:
            logger.debug("the thread that touches the pool's pages runs at normal priority")
        for begin in range(0, self.byte_count, PIECE_BYTES):
            if self._closing.is_set():
                return
            end = min(begin + PIECE_BYTES, self.byte_count)
            if not self._touch(begin, end):
                logger.error(
                    "host_memory: the machine gave %d of %d MiB; the pool stays at that size",
                    begin >> 20,
                    self.byte_count >> 20,
                )
                return
            self._ready_slots = end // self.slot_bytes

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
