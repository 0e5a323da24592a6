"""The yardstick: threads that move bytes between memory and a file, with nothing around it.

No index, no checksum, no header: each thread takes the next chunk and moves its bytes.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.storage.pages import Pages

Move = Callable[[int, list[memoryview], int], int]


def opened(path: Path, direct: bool) -> int:
    """Open a file for reading and writing; past the page cache if ``direct``."""
    return os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)


def takes_direct(folder: Path) -> bool:
    """Say whether files in ``folder`` can be opened past the page cache."""
    path = folder / "takes-direct"
    try:
        os.close(opened(path, direct=True))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def move(call: Move, descriptor: int, offsets: Sequence[int], pages: Pages, thread_count: int) -> None:
    """Move chunk i between memory and ``offsets[i]``, all chunks, with so many threads.

    Raises:
        RuntimeError: A call moved less than it should.
    """
    turn = itertools.count()  # one step of the interpreter: no two threads get the same number
    short: list[int] = []

    def work() -> None:
        while (index := next(turn)) < pages.chunk_count:
            if call(descriptor, [pages.chunk(index)], offsets[index]) != pages.chunk_bytes:
                short.append(index)

    threads = [threading.Thread(target=work) for _ in range(thread_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if short:
        raise RuntimeError(f"{len(short)} chunks were not moved whole")


def preallocated(path: Path, pages: Pages, direct: bool) -> tuple[int, list[int]]:
    """Make a file with room for all chunks: its descriptor, and an offset for each."""
    descriptor = opened(path, direct)
    os.posix_fallocate(descriptor, 0, pages.chunk_count * pages.chunk_bytes)
    return descriptor, [index * pages.chunk_bytes for index in range(pages.chunk_count)]
