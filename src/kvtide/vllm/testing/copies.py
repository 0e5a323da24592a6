"""All copiers of a walk: one per rank and direction, and what is drawn for their copies today.

Knows copies and whether they ever end; does not know requests or blocks.
"""

import random
from collections import Counter
from collections.abc import Mapping

from kvtide.jobs import Direction, JobId
from kvtide.testing.clock import VirtualClock
from kvtide.testing.faulty import FaultPlan, FaultyDevice

CALM = {"instant": 1.0}


class Copies:
    """The copiers of every rank.

    Args:
        chance: The only source of choice.
        clock: When things happen.
        flush_limit_s: Of the engine, for copies that outlast it.
    """

    def __init__(self, chance: random.Random, clock: VirtualClock, flush_limit_s: float) -> None:
        self._clock = clock
        self._plans = {
            direction: FaultPlan(random.Random(chance.random()), CALM, flush_limit_s)
            for direction in Direction
        }
        self._copiers: dict[tuple[int, Direction], FaultyDevice] = {}

    def copier(self, rank: int, direction: Direction) -> FaultyDevice:
        """Find or make the copier of one direction of one rank."""
        made = FaultyDevice(self._plans[direction], self._clock)
        return self._copiers.setdefault((rank, direction), made)

    def go_like(self, weights: Mapping[Direction, Mapping[str, float]]) -> None:
        """From now on copies are drawn with these weights of kinds; a direction left out is calm."""
        for direction, plan in self._plans.items():
            plan.weights = dict(weights.get(direction, CALM))

    def progress(self) -> None:
        """Move what is due by now."""
        for copier in self._copiers.values():
            copier.progress()

    def release(self) -> None:
        """Let copies that would never end go on to their end."""
        for copier in self._copiers.values():
            copier.release()

    def forget(self) -> None:
        """Forget every copy, as when the process has ended."""
        self._copiers.clear()

    def open(self, direction: Direction) -> bool:
        """Whether any copy of a direction is under way."""
        return any(one.open_ids for (_, way), one in self._copiers.items() if way is direction)

    def stuck(self, direction: Direction) -> set[JobId]:
        """Copies of a direction that have moved all they will ever move without ending."""
        ways = (one for (_, way), one in self._copiers.items() if way is direction)
        return {job_id for one in ways for job_id in one.stuck_ids}

    @property
    def any_stuck(self) -> bool:
        """Whether there is one, of either direction."""
        return any(self.stuck(direction) for direction in Direction)

    @property
    def only_stuck(self) -> bool:
        """Whether no other copy is under way."""
        return all(one.open_ids == one.stuck_ids for one in self._copiers.values())

    def happened(self) -> Counter[str]:
        """What was drawn, and what became of copies."""
        return sum((plan.happened for plan in self._plans.values()), Counter[str]())

    def describe(self) -> dict[str, list[JobId]]:
        """Open copies by rank and direction."""
        return {f"{rank} {way.value}": one.open_ids for (rank, way), one in self._copiers.items()}
