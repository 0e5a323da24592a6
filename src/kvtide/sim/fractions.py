"""Policies against cache sizes: one replay for each pair, spread over processes.

A size is a share of the different full blocks of a trace, so that traces can be compared. Knows who can be
replayed, what a share is in blocks; does not know how anything is shown.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from kvtide.sim.accesses import Accesses
from kvtide.sim.manager_only import manager_of, managers, replay
from kvtide.sim.optimum import NextUses, optimum, unbounded
from kvtide.sim.outcome import Outcome
from kvtide.sim.processes import available_cores, spread

OPTIMUM = "optimum"

WORTH_PROCESSES = 400_000
"""Accesses in all replays together below which starting processes takes longer than it saves."""


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
    with closing(spread(_replayed, accesses, cells, jobs, lambda: passed(0))) as ended:
        for index, outcome in ended:
            passed(accesses.request_count)
            yield cells[index], outcome


def _replayed(accesses: Accesses, cell: Cell) -> Outcome:
    return replay(accesses, manager_of(*cell))
