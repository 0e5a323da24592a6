"""The lanes of a walk, one per rank and tier, who asks shared tiers, and what is drawn for their calls today.

Production's own tiers are behind them. Knows calls and whether they ever end; does not know requests.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from kvtide.config import KVTideConfig
from kvtide.probing import Prober
from kvtide.spec_tiers import TierIdentity, prober_of
from kvtide.testing.clock import VirtualClock
from kvtide.testing.lane_faults import LanePlan
from kvtide.testing.virtual_lane import VirtualLane
from kvtide.testing.virtual_prober import ProberPlan, VirtualProber
from kvtide.tiers.base import Tier
from kvtide.transfer.prober import NamedMaker
from kvtide.transfer.tier_lane import LaneSettings

CALM = {"instant": 1.0}


class Lanes:
    """The lanes of every rank.

    Args:
        chance: The only source of choice.
        clock: When things happen.

    Attributes:
        questions: Decides over what shared tiers are asked.
    """

    def __init__(self, chance: random.Random, clock: VirtualClock) -> None:
        self._clock = clock
        self._plan = LanePlan(chance)
        self._lanes: list[VirtualLane] = []
        self.questions = ProberPlan(chance)
        self._probers: list[VirtualProber] = []

    def lane(self, tier: Tier, name: str, settings: LaneSettings) -> VirtualLane:
        """Make a lane."""
        made = VirtualLane(tier, name, settings, self._plan, self._clock)
        self._lanes.append(made)
        return made

    def prober(self, config: KVTideConfig, identity_of: Callable[[], TierIdentity]) -> Prober | None:
        """Make who asks the shared tiers that settings name; None without any."""
        return prober_of(config, identity_of, self._asking)

    def _asking(self, makers: Mapping[int, NamedMaker], wait_s: float) -> Prober:
        made = VirtualProber(makers, self.questions, self._clock)
        self._probers.append(made)
        return made

    def go_like(self, calls: Mapping[str, float], questions: Mapping[str, float] | None = None) -> None:
        """From now on calls, and questions to shared tiers, are drawn with these weights of kinds."""
        self._plan.weights = dict(calls) or CALM
        self.questions.weights = dict(questions or {})

    def progress(self) -> None:
        """Do what is due by now."""
        for lane in self._lanes:
            lane.progress()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._clock.advance(seconds)
        self.progress()

    def release(self) -> None:
        """Let calls that would never return do so, and questions be answered."""
        for one in self._all():
            one.release()

    def kill(self) -> None:
        """End every lane where it stands."""
        for lane in self._lanes:
            lane.kill()

    def forget_closed(self) -> None:
        """Forget lanes of a process that has ended."""
        self._lanes = [lane for lane in self._lanes if not lane.closed]
        self._probers = [prober for prober in self._probers if not prober.closed]

    def _all(self) -> Iterator[VirtualLane | VirtualProber]:
        yield from self._lanes
        yield from self._probers

    @property
    def are_idle(self) -> bool:
        """Whether none has anything to do."""
        return all(one.is_idle for one in self._all())

    @property
    def harmed(self) -> set[bytes]:
        """Records of private tiers that were damaged or removed behind everybody's back."""
        return set(self._plan.harmed)

    def happened(self) -> Counter[str]:
        """What was drawn, and what became of calls."""
        return self._plan.happened + self.questions.happened

    def describe(self) -> list[str]:
        """What each is about."""
        return [one.describe() for one in self._all()]
