"""The same work for many things, spread over processes that end when it does, however it does.

Knows processes. Does not know what is done in them.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from kvtide.errors import KVTideError

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

TOLD_EVERY_S = 0.2


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def spread(
    work: Callable[[Shared, Item], Result],
    shared: Shared,
    items: Sequence[Item],
    jobs: int,
    alive: Callable[[], object],
) -> Generator[tuple[int, Result], None, None]:
    """Call ``work(shared, item)`` for every item.

    Args:
        work: Can be pickled, as can what it is given and what it returns.
        shared: Sent to each process once.
        items: Begun in this order.
        jobs: Processes.
        alive: Called every now and then while nothing has come of any.

    Yields:
        The index of an item and what came of it, as they end. Close it: when that is before the end, or
        anything is raised, the processes are killed.

    Raises:
        KVTideError: A process died.
    """
    others = set(multiprocessing.active_children())
    # Spawned: whoever calls this may have threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (work, shared))
    with contextlib.ExitStack() as stopping:
        stopping.callback(pool.shutdown, wait=True, cancel_futures=True)
        stopping.callback(_kill_all_but, others)
        running: dict[Future[Result], int] = {pool.submit(_call, item): at for at, item in enumerate(items)}
        while running:
            done, _ = wait(running, timeout=TOLD_EVERY_S, return_when=FIRST_COMPLETED)
            if not done:
                alive()
            for one in done:
                try:
                    yield running.pop(one), one.result()
                except BrokenProcessPool:
                    raise KVTideError(
                        "a process has ended before its time, for want of memory perhaps: try fewer --jobs"
                    ) from None
        stopping.pop_all()
    pool.shutdown()


def _kill_all_but(others: set[BaseProcess]) -> None:
    for one in {*multiprocessing.active_children()} - others:
        one.kill()


# In such a process ---------------------------------------------------------------------------------

_begun: list[tuple[Callable[[Any, Any], Any], Any]] = []


def _begin(work: Callable[[Any, Any], Any], shared: object) -> None:
    # Who interrupts this from a terminal interrupts all of its processes, and wants no word of them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _begun[:] = [(work, shared)]


def _end_with_parent() -> None:
    # One that is killed tells nobody, and who waits for work would wait for ever.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _call(item: object) -> Any:
    ((work, shared),) = _begun
    return work(shared, item)
