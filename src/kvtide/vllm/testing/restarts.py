"""An engine that ends, in order or killed, and begins anew over the same disk.

Whoever was served is gone. What the disk holds of the same weights is right; weights that were put in memory
since the start (see ``Resets``) are gone with the process, and nothing computed with them may be seen again.
"""

import random
from collections import Counter

from kvtide.testing.clock import VirtualClock
from kvtide.vllm.testing.below import hops_under_way
from kvtide.vllm.testing.copies import Copies
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.lanes import Lanes

KILLED_SHARE = 0.6
OTHER_WEIGHTS_SHARE = 0.25

RESTART_S = 5.0
"""A process takes so long to begin."""


class Restarts:
    """Restarts an engine.

    Args:
        engine: To be restarted.
        copies: Of its device.
        lanes: To its tiers.
        clock: Its time.
        happened: Where to count.
        chance: The only source of choice.
    """

    def __init__(
        self,
        engine: ModelEngine,
        copies: Copies,
        lanes: Lanes,
        clock: VirtualClock,
        happened: Counter[str],
        chance: random.Random,
    ) -> None:
        self._engine = engine
        self._copies = copies
        self._lanes = lanes
        self._clock = clock
        self._happened = happened
        self._chance = chance
        self._weights = 0
        self._lives = 0

    def by_chance(self) -> None:
        """End in order or not, and begin with the same weights or others."""
        killed = self._chance.random() < KILLED_SHARE
        other = self._chance.random() < OTHER_WEIGHTS_SHARE
        self.restart(killed, other)

    def restart(self, killed: bool, other_weights: bool = False) -> None:
        """End the process and begin another one.

        Args:
            killed: No call returns, nothing that waits is done.
            other_weights: The folder of the model holds others from now on.
        """
        happened = self._happened
        happened["restart: killed" if killed else "restart: in order"] += 1
        happened["restart: other weights" if other_weights else "restart: same weights"] += 1
        for kind, count in hops_under_way(self._engine).items():
            happened[f"restart: {kind} under way"] += count > 0
        if killed:
            self._lanes.kill()
        self._weights ^= other_weights
        self._copies.forget()
        # Nobody starts in no time; and a name that should be new may be that of an earlier life.
        self._clock.advance(RESTART_S)
        self._lives += self._chance.random() < 0.5
        self._engine.restart(self._weights, f"life {self._lives}")
        self._lanes.forget_closed()
