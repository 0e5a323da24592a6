"""A million chunks in kvtide's books: what they weigh, what the garbage collector pays, the slowest call.

Runs alone in its process, so that what it grows by is the books: the hashes of a prompt are drawn, handed
over and dropped. Knows in which order the books are filled and used.
"""

import gc
import time
from pathlib import Path
from typing import Any

from benchmarks.frame.children import Tell
from benchmarks.scheduler.books import CONTEXT, Books, run_of
from benchmarks.scheduler.prompts import fillers, hashes
from benchmarks.scheduler.vocabulary import CALLS, CATALOG, LONG_CHUNKS, OURS, books_of

COLLECTIONS = 7
PROBES = 200
STEP_CHUNKS = 512  # 8,192 tokens
READ_PROMPTS = 64  # short prompts that are read in each round
TELL_EVERY_CHUNKS = 250_000


def measure_catalog(tell: Tell, capacity: int, run_chunks: int, rounds: int) -> list[dict[str, Any]]:
    """Fill the books with prompts of ``run_chunks`` chunks, then use them for ``rounds`` rounds."""
    _warm_up(run_chunks)
    collections_before_ms = _collections_ms()
    bytes_before = anonymous_bytes()
    books = Books(capacity)
    prompts = capacity // run_chunks
    _fill(tell, books, prompts, run_chunks)
    collections_after_ms = _collections_ms()
    sample = {
        "row": CATALOG,
        "run_chunks": run_chunks,
        "capacity": capacity,
        "chunks": books.manager.used_count,
        "found_share": _found_share(books, prompts, run_chunks),
        "grown_bytes": anonymous_bytes() - bytes_before,
        "collections_before_ms": collections_before_ms,
        "collections_after_ms": collections_after_ms,
    }
    tell(f"{books_of(run_chunks)}: {rounds} rounds of use")
    books.calls.phase = "using"
    before = books.evicted_chunks
    sample |= {
        "wanted_chunks": rounds * LONG_CHUNKS,
        "stored_chunks": sum(_use(books, index, prompts, run_chunks) for index in range(rounds)),
        "evicted_chunks": books.evicted_chunks - before,
    }
    return [sample, {"row": CALLS, "of": books_of(run_chunks), "arm": OURS} | books.calls.record()]


def _fill(tell: Tell, books: Books, prompts: int, run_chunks: int) -> None:
    books.calls.phase = "filling"
    told = 0
    for index, found in enumerate(fillers("catalog", 0, prompts, run_chunks)):
        chunks = (index + 1) * run_chunks
        books.store(run_of(found))
        if not chunks % STEP_CHUNKS:
            books.end_step()
        if chunks >= told + TELL_EVERY_CHUNKS:
            told = chunks
            tell(f"{books_of(run_chunks)}: {told:,} chunks")


def _warm_up(run_chunks: int) -> None:
    """Let code and allocator reach their size before anything is weighed."""
    books = Books(2 * LONG_CHUNKS)
    for found in fillers("warm-up", 0, 4 * LONG_CHUNKS // run_chunks, run_chunks):
        books.store(run_of(found))
    _use(books, -1, 1, run_chunks)


def _use(books: Books, index: int, prompts: int, run_chunks: int) -> int:
    """One round: a long prompt pushes out many short ones, is read, and short ones are read.

    A call may store less than it was offered; the rest is offered again, as in the next step.
    """
    found = hashes(f"long/{index}", LONG_CHUNKS)
    stored = 0
    while stored < LONG_CHUNKS and (more := books.store(run_of(found))):
        stored += more
        books.end_step()
    books.load(run_of(hashes(f"long/{index}", LONG_CHUNKS)))
    # The newest short prompts: the oldest have left.
    first = max(0, prompts - (index + 2) * READ_PROMPTS)
    for short in fillers("catalog", first, min(READ_PROMPTS, prompts), run_chunks):
        books.load(run_of(short))
    return stored


def _found_share(books: Books, prompts: int, run_chunks: int) -> float:
    """Ask for some prompts, spread over all, whether they are there."""
    step = max(1, prompts // PROBES)
    ready = asked = 0
    for index in range(0, prompts, step):
        (found,) = fillers("catalog", index, 1, run_chunks)
        ready += books.manager.lookup(run_of(found), CONTEXT).ready_count
        asked += run_chunks
    return ready / asked


def _collections_ms() -> list[float]:
    gc.collect()
    took: list[float] = []
    for _ in range(COLLECTIONS):
        began_cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
        gc.collect()
        wall_ns, cpu_ns = time.perf_counter_ns() - began_ns, time.thread_time_ns() - began_cpu_ns
        took.append(min(wall_ns, cpu_ns) / 1e6)
    return took


def anonymous_bytes() -> int:
    """Return the memory of this process that is backed by no file and resident."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Anonymous":
            return int(rest.split()[0]) << 10
    raise RuntimeError("smaps_rollup says nothing of anonymous memory")
