"""The same trace served with several setups, in processes side by side.

Knows processes; a setup and what comes of it are ``serving``'s.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess

from kvtide.errors import KVTideError
from kvtide.sim.serving import ServingSetup, serve
from kvtide.sim.serving_result import ServingResult
from kvtide.sim.traces.request import TraceRequest

TOLD_EVERY_S = 0.2


def serve_all(
    requests: Sequence[TraceRequest],
    setups: Sequence[ServingSetup],
    jobs: int = 1,
    passed: Callable[[int], object] = lambda _: None,
) -> list[ServingResult]:
    """Serve a trace with every setup.

    Args:
        requests: The trace.
        setups: With what.
        jobs: Processes at once; 1 uses none but this one.
        passed: Told how many requests have ended since it was told last, and now and then of none.

    Returns:
        A result for each setup, in their order.

    Raises:
        ConfigError: Of ``serve``.
        KVTideError: A process died.
    """
    jobs = min(jobs, len(setups))
    if jobs > 1:
        found = dict(_in_processes(requests, setups, jobs, passed))
        return [found[index] for index in range(len(setups))]
    return [_here(requests, setup, passed) for setup in setups]


def _here(
    requests: Sequence[TraceRequest], setup: ServingSetup, passed: Callable[[int], object]
) -> ServingResult:
    told = 0

    def seen(count: int) -> None:
        nonlocal told
        passed(count - told)
        told = count

    return serve(requests, setup, seen)


def _in_processes(
    requests: Sequence[TraceRequest],
    setups: Sequence[ServingSetup],
    jobs: int,
    passed: Callable[[int], object],
) -> Iterator[tuple[int, ServingResult]]:
    # Spawned: whoever calls this may have threads.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, context, _begin, (requests,))
    with contextlib.ExitStack() as stopping:
        # What has begun is not waited for when somebody stops this or something went wrong.
        stopping.callback(pool.shutdown, wait=False, cancel_futures=True)
        stopping.callback(_kill_all_but, others)
        running: dict[Future[ServingResult], int] = {
            pool.submit(_served, setup): index for index, setup in enumerate(setups)
        }
        while running:
            done, _ = wait(running, timeout=TOLD_EVERY_S, return_when=FIRST_COMPLETED)
            passed(0)
            for one in done:
                try:
                    yield running.pop(one), one.result()
                except BrokenProcessPool:
                    raise KVTideError(
                        "a process has ended before its time, for want of memory perhaps: try fewer --jobs"
                    ) from None
                passed(len(requests))
        stopping.pop_all()
    pool.shutdown()


def _kill_all_but(others: set[BaseProcess]) -> None:
    for one in {*multiprocessing.active_children()} - others:
        one.kill()


# In a process of the sweep -------------------------------------------------------------------------

_requests: list[TraceRequest] = []


def _begin(requests: Sequence[TraceRequest]) -> None:
    # Who interrupts this from a terminal interrupts all of its processes, and wants no word of them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _requests[:] = requests


def _served(setup: ServingSetup) -> ServingResult:
    return serve(_requests, setup)
