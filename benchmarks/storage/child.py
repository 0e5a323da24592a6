"""The process in which the arms take turns.

For each size of chunks: both tiers write the same bytes once, then the same gibibyte is read by each arm in
turn; after that a smaller part is written anew by each. What was read is looked at page by page, outside of
what is timed. Knows turns and clocks; what an arm does is in the files beside this one.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame.children import Tell
from benchmarks.frame.machine import wait_quiet
from benchmarks.frame.rounds import rounds
from benchmarks.storage import plain
from benchmarks.storage.clock import timed
from benchmarks.storage.native import NativeTier
from benchmarks.storage.ours import OurTier
from benchmarks.storage.pages import Pages
from benchmarks.storage.vocabulary import (
    ARMS,
    NATIVE,
    NATIVE_SPLIT,
    OURS,
    PLAIN,
    READ,
    WRITE,
    size_name,
)

Arm = Callable[[], object]

WAIT_LIMIT_S = 3.0  # for quiet, before each size


def measure_sizes(
    tell: Tell,
    folder: str,
    thread_count: int,
    reads: Sequence[tuple[int, int, int]],
    write_bytes: int,
    write_rounds: int,
) -> list[dict[str, Any]]:
    """Take all samples; leaves nothing in ``folder``.

    Args:
        tell: Is told once before each round, and once before the first of each size.
        folder: For the files.
        thread_count: Of kvtide's lane and the yardstick.
        reads: For each size: bytes of a chunk, bytes read by an arm in a round, rounds.
        write_bytes: Written by an arm in a round.
        write_rounds: Of each size.
    """
    place = Path(folder)
    samples: list[dict[str, Any]] = []
    for chunk_bytes, read_bytes, read_rounds in reads:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            direct = plain.takes_direct(place)
            found = _reads(tell, place, Pages(read_bytes, chunk_bytes), thread_count, read_rounds, direct)
            found += _writes(tell, place, Pages(write_bytes, chunk_bytes), thread_count, write_rounds, direct)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        common = {"chunk_bytes": chunk_bytes, "threads": thread_count, "direct": direct}
        samples += [common | sample for sample in found]
    return samples


def _reads(
    tell: Tell, place: Path, pages: Pages, thread_count: int, count: int, direct: bool
) -> list[dict[str, Any]]:
    tell(f"{size_name(pages.chunk_bytes)}: writing what is to be read")
    pages.fill()
    ours = OurTier(place / "ours", pages, thread_count)
    native = NativeTier(place / "native", pages)
    ours.write()
    native.write()
    path, offsets = ours.places(direct)
    descriptor = plain.opened(path, direct)
    arms: dict[str, Arm] = {
        OURS: ours.read,
        PLAIN: lambda: plain.move(os.preadv, descriptor, offsets, pages, thread_count),
        NATIVE: lambda: native.read(1),
        NATIVE_SPLIT: lambda: native.read(thread_count),
    }
    samples = []
    wait_quiet(WAIT_LIMIT_S)
    for index, order in rounds(ARMS[READ], count):
        tell(f"{size_name(pages.chunk_bytes)}: reading, round {index + 1} of {count}")
        for arm in order:
            pages.spoil()
            _forget_cached(place)
            samples.append({"what": READ, "round": index, "arm": arm, **timed(arms[arm], len(pages.view))})
            samples[-1]["wrong_pages"] = pages.wrong_pages()
    os.close(descriptor)
    ours.close()
    native.close()
    pages.close()
    return samples


def _writes(
    tell: Tell, place: Path, pages: Pages, thread_count: int, count: int, direct: bool
) -> list[dict[str, Any]]:
    pages.fill()
    samples = []
    for index, order in rounds(ARMS[WRITE], count):
        tell(f"{size_name(pages.chunk_bytes)}: writing, round {index + 1} of {count}")
        for arm in order:
            fresh = place / f"write-{index}-{arm}"
            write, close = _writer(arm, fresh, pages, thread_count, direct)
            samples.append({"what": WRITE, "round": index, "arm": arm, **timed(write, len(pages.view))})
            samples[-1]["wrong_pages"] = 0
            close()
    pages.close()
    return samples


def _writer(arm: str, fresh: Path, pages: Pages, thread_count: int, direct: bool) -> tuple[Arm, Arm]:
    """Make an arm that writes into a folder of its own, and what ends it."""
    if arm == OURS:
        ours = OurTier(fresh, pages, thread_count)
        return ours.write, ours.close
    if arm == NATIVE:
        native = NativeTier(fresh, pages)
        return native.write, native.close
    fresh.mkdir()

    def write() -> None:
        descriptor, offsets = plain.preallocated(fresh / "plain", pages, direct)
        plain.move(os.pwritev, descriptor, offsets, pages, thread_count)
        os.close(descriptor)

    return write, lambda: None


def _forget_cached(place: Path) -> None:
    """Let the page cache forget the files: without direct I/O the second arm would read memory."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
