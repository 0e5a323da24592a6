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
    short: list[int] = []

    def work(index: int) -> None:
        if call(descriptor, [pages.chunk(index)], offsets[index]) != pages.chunk_bytes:
            short.append(index)

    in_turns(work, pages.chunk_count, thread_count)
    if short:
        raise RuntimeError(f"{len(short)} chunks were not moved whole")


def in_turns(work: Callable[[int], None], count: int, thread_count: int) -> None:
    """Call ``work`` with every number below ``count``, in so many threads that each take the next one.

    Raises:
        Exception: What a call raised; its thread did no more, the others went on.
    """
    turn = itertools.count()  # one step of the interpreter: no two threads get the same number
    trouble: list[Exception] = []

    def take() -> None:
        try:
            while (index := next(turn)) < count:
                work(index)
        except Exception as error:
            trouble.append(error)

    threads = [threading.Thread(target=take) for _ in range(thread_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if trouble:
        raise trouble[0]


def preallocated(path: Path, pages: Pages, direct: bool) -> tuple[int, list[int]]:
    """Make a file with room for all chunks: its descriptor, and an offset for each."""
    descriptor = opened(path, direct)
    os.posix_fallocate(descriptor, 0, pages.chunk_count * pages.chunk_bytes)
    return descriptor, [index * pages.chunk_bytes for index in range(pages.chunk_count)]
