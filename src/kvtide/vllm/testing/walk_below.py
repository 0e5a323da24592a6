"""What a walk does with tiers below host memory at the end of a day: settle, look, ask again.

Knows when; what has to be true is in ``below`` and ``revisit_below``.
"""

import random
from collections import Counter
from collections.abc import Callable

from kvtide.vllm.testing.asks import Ask
from kvtide.vllm.testing.below import check_below, is_settled, shared_of
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.lanes import Lanes
from kvtide.vllm.testing.promises import HangError
from kvtide.vllm.testing.revisit_below import RevisitBelow

SETTLE_TURNS = 600
"""Half a second each: longer than any tier is left out."""


class Below:
    """The tiers of one engine.

    Args:
        engine: At rest whenever it is asked for something.
        lanes: To its tiers.
        happened: Where to count.
        chance: The only source of choice.
        settle: Runs the engine until it is idle.
        restart: Begins the process anew; told whether it is killed.
    """

    def __init__(
        self,
        engine: ModelEngine,
        lanes: Lanes,
        happened: Counter[str],
        chance: random.Random,
        settle: Callable[[], None],
        restart: Callable[[bool], None],
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._happened = happened
        self._chance = chance
        self._settle = settle
        self._restart = restart
        self._asked = 0

    def settle(self) -> None:
        """Let tiers end what they are about; nothing of it is waited for by an engine that is idle.

        Raises:
            HangError: They do not.
        """
        for _ in range(SETTLE_TURNS):
            self._settle()
            if self._lanes.are_idle and is_settled(self._engine):
                return
            self._lanes.wait(0.5)
            self._engine.step()
        raise HangError(f"tiers do not settle: {self._lanes.describe()}, books {self._engine.describe()}")

    def check(self) -> None:
        """Hold books and tiers against one another."""
        self._happened["chunks below checked"] += check_below(self._engine, self._chance, self._lanes.harmed)

    def revisit(self, ask: Ask, longest_tokens: int) -> int:
        """Have host memory lose something that was asked, and ask it again.

        Args:
            ask: What is asked.
            longest_tokens: Of a prompt that fits the device.

        Returns:
            Requests that were asked.
        """
        if ask.identity.lora_request is not None:
            return 0  # nothing of an adapter is written below
        again = RevisitBelow(self._engine, ask, self.settle, self._asked)
        again.store()
        restarted = self._chance.random() < 0.4
        if restarted:
            self._restart(self._chance.random() < 0.5)
            self.settle()
        if restarted or again.push_out(longest_tokens):
            self._read(again, "after a restart" if restarted else "pushed out")
        self._asked += again.asked
        return again.asked

    def _read(self, again: RevisitBelow, how: str) -> None:
        found, settings = again.read(), self._engine.shape.settings
        self._happened[f"revisit below, {how}"] += 1
        self._happened["tokens due from below"] += found.due_tokens
        if found.promoted_chunks:
            self._happened[f"hit again from below, {how}"] += 1
            if shared_of(self._engine):
                self._happened[f"hit again from shared, {how}"] += found.shared_chunks > 0
            if "disk" in settings:
                self._happened[f"hit again from below: {settings['disk_demotion']}"] += 1
        self.check()
