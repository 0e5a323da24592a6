"""The memory that is read into and written from, and whether it holds what it should.

A part of kvtide's own host pool, page by page: every page begins with its own number, the rest is drawn
once, so that nothing on the way can be shorter than it looks. Knows bytes; does not know files.
"""

import time

import numpy as np
import xxhash

from kvtide.transfer.pool import HostPool

PAGE_BYTES = 4096
SEED = 5
DRAWN_BYTES = 16 << 20
READY_LIMIT_S = 60.0


class Pages:
    """``byte_count`` bytes of a host pool in slots of ``chunk_bytes``.

    Raises:
        RuntimeError: The machine does not give the memory.
    """

    def __init__(self, byte_count: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunk_count = byte_count // chunk_bytes
        self._pool = HostPool(self.chunk_count, chunk_bytes)
        give_up_s = time.monotonic() + READY_LIMIT_S
        while self._pool.ready_slots < self.chunk_count:
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"{byte_count >> 20} MiB of memory did not become resident")
            time.sleep(0.01)
        self.view = memoryview(self._pool.view)
        """``uint8[byte_count]``."""
        self._digests: list[int] = []
        self._first_words = self._pool.view.view(np.uint64)[:: PAGE_BYTES // 8]

    @property
    def address(self) -> int:
        """Of the first byte."""
        return int(self._pool.view.ctypes.data)

    def chunk(self, index: int) -> memoryview:
        """``uint8[chunk_bytes]``."""
        begin = index * self.chunk_bytes
        return self.view[begin : begin + self.chunk_bytes]

    def fill(self) -> None:
        """Make every page the one it should be."""
        drawn = np.frombuffer(np.random.default_rng(SEED).bytes(DRAWN_BYTES), dtype=np.uint8)
        whole = self._pool.view
        for begin in range(0, len(whole), DRAWN_BYTES):
            part = whole[begin : begin + DRAWN_BYTES]
            part[:] = drawn[: len(part)]
        self._first_words[:] = np.arange(1, len(self._first_words) + 1)
        self._digests = [self._digest(index) for index in range(self.chunk_count)]

    def blank(self) -> None:
        """Leave nothing of what should be there."""
        self._pool.view[:] = 0

    def wrong_chunks(self) -> int:
        """Count chunks that are not, byte for byte, the ones they should be."""
        return sum(self._digest(index) != due for index, due in enumerate(self._digests))

    def spoil(self) -> None:
        """Make no page the one it should be."""
        self._first_words[:] = 0

    def wrong_pages(self) -> int:
        """Count pages that are not the ones they should be."""
        return int((self._first_words != np.arange(1, len(self._first_words) + 1)).sum())

    def _digest(self, index: int) -> int:
        return xxhash.xxh3_64_intdigest(self.chunk(index))

    def close(self) -> None:
        """Give the memory back."""
        self._pool.close()
