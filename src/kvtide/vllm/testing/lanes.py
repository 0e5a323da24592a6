"""The lanes of a walk: one per rank and tier, and what is drawn for their calls today.

Production's own tiers are behind them. Knows calls and whether they ever end; does not know requests.
"""

import random
from collections import Counter
from collections.abc import Mapping

from kvtide.testing.clock import VirtualClock
from kvtide.testing.lane_faults import LanePlan
from kvtide.testing.virtual_lane import VirtualLane
from kvtide.tiers.base import Tier
from kvtide.transfer.tier_lane import LaneSettings

CALM = {"instant": 1.0}


class Lanes:
    """The lanes of every rank.

    Args:
        chance: The only source of choice.
        clock: When things happen.
    """

    def __init__(self, chance: random.Random, clock: VirtualClock) -> None:
        self._clock = clock
        self._plan = LanePlan(chance)
        self._lanes: list[VirtualLane] = []

    def lane(self, tier: Tier, name: str, settings: LaneSettings) -> VirtualLane:
        """Make a lane."""
        made = VirtualLane(tier, name, settings, self._plan, self._clock)
        self._lanes.append(made)
        return made

    def go_like(self, weights: Mapping[str, float]) -> None:
        """From now on calls are drawn with these weights of kinds."""
        self._plan.weights = dict(weights) or CALM

    def progress(self) -> None:
        """Do what is due by now."""
        for lane in self._lanes:
            lane.progress()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._clock.advance(seconds)
        self.progress()

    def release(self) -> None:
        """Let calls that would never return do so."""
        for lane in self._lanes:
            lane.release()

    def kill(self) -> None:
        """End every lane where it stands."""
        for lane in self._lanes:
            lane.kill()

    def forget_closed(self) -> None:
        """Forget lanes of a process that has ended."""
        self._lanes = [lane for lane in self._lanes if not lane.closed]

    @property
    def are_idle(self) -> bool:
        """Whether none has anything to do."""
        return all(lane.is_idle for lane in self._lanes)

    @property
    def harmed(self) -> set[bytes]:
        """Records that were damaged or removed behind everybody's back."""
        return set(self._plan.harmed)

    def happened(self) -> Counter[str]:
        """What was drawn, and what became of calls."""
        return self._plan.happened

    def describe(self) -> list[str]:
        """What each is about."""
        return [lane.describe() for lane in self._lanes]
