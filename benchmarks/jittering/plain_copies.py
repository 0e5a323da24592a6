"""The control's copies: ``memcpy`` and ``pwrite`` by threads, with nothing around them.

No index, no checksum, no plan, no answer: a thread takes what is next and moves its bytes, between buffers
as large as an engine's KV cache and its host pool, and into a file as large as its disk tier. A copy is one
call, however many pieces, so that the interpreter is asked for as seldom as can be. As many threads as
kvtide has: one for each direction, and those of the disk.
"""

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import numpy as np

from benchmarks.jittering.vocabulary import Moved
from benchmarks.storage.plain import opened, takes_direct

SEED = 7


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """Of what size the control's buffers are.

    Attributes:
        folder: For its file; exists.
        host_bytes: What stands for the host pool.
        disk_bytes: Of the file.
        disk_threads: That write to it.
    """

    folder: Path
    host_bytes: int
    disk_bytes: int
    disk_threads: int


class PlainCopies:
    """Copies pieces of ``piece_bytes``, each behind the last one, around and around.

    Args:
        settings: Sizes.
        piece_bytes: Of a piece, a multiple of the page size.
        device_bytes: What stands for the engine's KV cache.
        cores: On which the threads may run: who makes this object may be bound to a single one.

    Raises:
        OSError: The file or the memory cannot be had.
        ValueError: A buffer has no room for a piece.
    """

    def __init__(
        self, settings: PlainSettings, piece_bytes: int, device_bytes: int, cores: Collection[int]
    ) -> None:
        self._piece_bytes = piece_bytes
        self._cores = cores
        self._device = _Ring(device_bytes, piece_bytes)
        self._host = _Ring(settings.host_bytes, piece_bytes)
        self._places = itertools.cycle(_places(settings.disk_bytes, piece_bytes))
        self._file = _preallocated(settings)
        self._trouble: list[Exception] = []
        self._loads: Queue[int] = Queue()
        self._stores: Queue[int] = Queue()
        self._writes: Queue[int] = Queue()
        self._asked = Moved()
        self._start(self._loads, self._load)
        self._start(self._stores, self._store)
        for _ in range(settings.disk_threads):
            self._start(self._writes, self._write)

    def load(self, piece_count: int) -> None:
        """Copy so many pieces from host to device, soon."""
        self._asked += Moved(loaded_bytes=piece_count * self._piece_bytes)
        self._loads.put(piece_count)

    @property
    def is_loading(self) -> bool:
        """Whether a load has not ended."""
        return self._loads.unfinished_tasks > 0

    def store(self, piece_count: int) -> None:
        """Copy so many pieces from device to host and write each of them to disk, soon."""
        byte_count = piece_count * self._piece_bytes
        self._asked += Moved(stored_bytes=byte_count, written_bytes=byte_count)
        self._stores.put(piece_count)

    def finish(self) -> Moved:
        """Wait until all that was asked for is done; returns that, since the beginning.

        Raises:
            Exception: What a copy or a write raised.
        """
        for waiting in (self._loads, self._stores, self._writes):
            waiting.join()
        if self._trouble:
            raise self._trouble[0]
        return self._asked

    # -- threads --------------------------------------------------------------------------------------

    def _start(self, waiting: "Queue[int]", work: Callable[[int], None]) -> None:
        def serve() -> None:
            os.sched_setaffinity(0, self._cores)
            while True:
                item = waiting.get()
                try:
                    work(item)
                except Exception as error:
                    self._trouble.append(error)
                finally:
                    waiting.task_done()

        threading.Thread(target=serve, name=f"plain{work.__name__}", daemon=True).start()

    def _load(self, piece_count: int) -> None:
        byte_count = piece_count * self._piece_bytes
        self._copy(self._host.read(byte_count), self._host, self._device.write(byte_count), self._device)

    def _store(self, piece_count: int) -> None:
        byte_count = piece_count * self._piece_bytes
        place = self._host.write(byte_count)
        self._copy(self._device.read(byte_count), self._device, place, self._host)
        for begin in range(place.start, place.stop, self._piece_bytes):
            self._writes.put(begin)

    def _copy(self, begin: range, source: "_Ring", place: range, target: "_Ring") -> None:
        # ctypes lets go of the interpreter for as long as memmove runs.
        ctypes.memmove(target.address + place.start, source.address + begin.start, len(place))

    def _write(self, place: int) -> None:
        piece = self._host.view[place : place + self._piece_bytes]
        if os.pwrite(self._file, piece, next(self._places)) != self._piece_bytes:
            raise OSError("a piece was not written whole")


class _Ring:
    """Resident memory whose bytes are taken in turn, by the thread that reads and by the one that writes."""

    def __init__(self, byte_count: int, piece_bytes: int) -> None:
        self._byte_count = _places(byte_count, piece_bytes)[-1] + piece_bytes
        self.view = memoryview(mmap.mmap(-1, byte_count))
        array = np.frombuffer(self.view, dtype=np.uint8)
        # Touched, and of no two pages alike: nothing on the way can be shorter than it looks.
        array[:] = np.random.default_rng(SEED).integers(0, 256, byte_count, dtype=np.uint8)
        self.address = int(array.ctypes.data)
        self._next_read = self._next_write = 0

    def read(self, byte_count: int) -> range:
        """Take the next so many neighbouring bytes; begins anew where they do not fit."""
        taken = self._next(self._next_read, byte_count)
        self._next_read = taken.stop
        return taken

    def write(self, byte_count: int) -> range:
        taken = self._next(self._next_write, byte_count)
        self._next_write = taken.stop
        return taken

    def _next(self, begin: int, byte_count: int) -> range:
        if byte_count > self._byte_count:
            raise ValueError(f"{self._byte_count} bytes have no room for {byte_count}")
        if begin + byte_count > self._byte_count:
            begin = 0
        return range(begin, begin + byte_count)


def _places(byte_count: int, piece_bytes: int) -> range:
    if piece_bytes > byte_count:
        raise ValueError(f"{byte_count} bytes have no room for a piece of {piece_bytes}")
    return range(0, byte_count - piece_bytes + 1, piece_bytes)


def _preallocated(settings: PlainSettings) -> int:
    path = settings.folder / "plain"
    descriptor = opened(path, takes_direct(settings.folder))
    path.unlink()  # gone with the process, however that ends
    os.posix_fallocate(descriptor, 0, settings.disk_bytes)
    return descriptor
