"""Policies against cache sizes: one replay for each pair, spread over processes.

A size is a share of the different full blocks of a trace, so that traces can be compared. Knows who can be
replayed, what a share is in blocks, and how processes are used; does not know how anything is shown.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from kvtide.errors import KVTideError
from kvtide.sim.accesses import Accesses
from kvtide.sim.manager_only import manager_of, managers, replay
from kvtide.sim.optimum import NextUses, optimum, unbounded
from kvtide.sim.outcome import Outcome

OPTIMUM = "optimum"

WORTH_PROCESSES = 400_000
"""Accesses in all replays together below which starting processes takes longer than it saves."""

TOLD_EVERY_S = 0.2


class Cell(NamedTuple):
    """One replay.

    Attributes:
        policy: Its name.
        capacity: In blocks.
    """

    policy: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """What came of it.

    Attributes:
        request_count: Prompts of the trace.
        access_count: Their full blocks.
        unique_count: The different ones among them.
        block_tokens: Tokens of a block.
        capacities: In blocks, by fraction as it was given.
        outcomes: By policy and fraction.
        unbounded: Of a cache that keeps everything.
    """

    request_count: int
    access_count: int
    unique_count: int
    block_tokens: int
    capacities: Mapping[str, int]
    outcomes: Mapping[str, Mapping[str, Outcome]]
    unbounded: Outcome


def known() -> tuple[str, ...]:
    """Name all that can be replayed, the optimum last."""
    return (*managers(), OPTIMUM)


def capacity_of(fraction: str, unique_count: int) -> int:
    """Say how many blocks a share of the different ones is, rounded down: 0.29 of 100 are 29."""
    return int(Decimal(fraction) * unique_count)


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def sweep(
    accesses: Accesses,
    policies: Sequence[str],
    fractions: Sequence[str],
    jobs: int | None = None,
    passed: Callable[[int], object] = lambda _: None,
) -> Sweep:
    """Replay a trace with every policy at every size.

    Args:
        accesses: The trace.
        policies: Of ``known``.
        fractions: Decimal numbers from 0 to 1.
        jobs: Processes at once; 1 uses none but this one. None for as many as there are cores, where that
            is worth it.
        passed: Told how many requests were replayed since it was told last, and every now and then of none;
            in the end every request has passed once for each policy and size.

    Raises:
        KVTideError: A process died.
    """
    capacities = {fraction: capacity_of(fraction, accesses.unique_count) for fraction in fractions}
    managed = [policy for policy in policies if policy != OPTIMUM]
    cells = [Cell(policy, size) for size in capacities.values() for policy in managed]
    if jobs is None:
        jobs = available_cores() if len(cells) * accesses.access_count >= WORTH_PROCESSES else 1
    jobs = min(jobs, len(cells))
    found = dict(_in_processes(accesses, cells, jobs, passed) if jobs > 1 else _here(accesses, cells, passed))
    if OPTIMUM in policies:
        uses = NextUses(accesses)
        for size in capacities.values():
            found[Cell(OPTIMUM, size)] = optimum(uses, size)
            passed(accesses.request_count)
    return Sweep(
        accesses.request_count,
        accesses.access_count,
        accesses.unique_count,
        accesses.block_tokens,
        capacities,
        {name: {one: found[Cell(name, size)] for one, size in capacities.items()} for name in policies},
        unbounded(accesses),
    )


def _here(
    accesses: Accesses, cells: Sequence[Cell], passed: Callable[[int], object]
) -> Iterator[tuple[Cell, Outcome]]:
    for cell in cells:
        yield cell, replay(accesses, manager_of(*cell), passed)


def _in_processes(
    accesses: Accesses, cells: Sequence[Cell], jobs: int, passed: Callable[[int], object]
) -> Iterator[tuple[Cell, Outcome]]:
    others = set(multiprocessing.active_children())
    # Spawned: whoever calls this may have threads.
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as ending:
        pool = ProcessPoolExecutor(jobs, context, _begin, (accesses,))
        ending.callback(pool.shutdown, wait=True, cancel_futures=True)
        # What has begun is not waited for when somebody stops this or something went wrong.
        stopping = ending.enter_context(contextlib.ExitStack())
        stopping.callback(_kill_all_but, others)
        running: dict[Future[Outcome], Cell] = {pool.submit(_replayed, cell): cell for cell in cells}
        while running:
            done, _ = wait(running, timeout=TOLD_EVERY_S, return_when=FIRST_COMPLETED)
            passed(0)
            for one in done:
                try:
                    yield running.pop(one), one.result()
                except BrokenProcessPool:
                    raise KVTideError(
                        "a process of the sweep has ended before its time, for want of memory perhaps:"
                        " try with fewer --jobs"
                    ) from None
                passed(accesses.request_count)
        stopping.pop_all()


def _kill_all_but(others: set[BaseProcess]) -> None:
    for one in {*multiprocessing.active_children()} - others:
        one.kill()


# In a process of the sweep -------------------------------------------------------------------------

_accesses: list[Accesses] = []


def _begin(accesses: Accesses) -> None:
    # Who interrupts the sweep from a terminal interrupts all of its processes, and wants no word of them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _accesses[:] = [accesses]


def _end_with_parent() -> None:
    # One that is killed tells nobody, and who waits for work would wait for ever.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _replayed(cell: Cell) -> Outcome:
    return replay(_accesses[0], manager_of(*cell))
