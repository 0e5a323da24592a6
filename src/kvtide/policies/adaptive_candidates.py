"""Runs that may leave, and which of them ranks lowest.

Knows runs, their classes and when they were used; ranks a sample of those that may leave, not all of them, as
in "Hyperbolic Caching" (A. Blankstein, S. Sen, M. Freedman, USENIX ATC 2017).
"""

from array import array
from bisect import insort

import numpy as np

from kvtide.policies.adaptive_density import HitDensity
from kvtide.policies.columns import Columns

SAMPLE_RUNS = 512
KEPT_RUNS = 8
"""Of a sample, so many that rank lowest leave before another one is drawn: one in 64."""

_WORD = (1 << 64) - 1

Ranked = tuple[float, int, int]
"""Rank, the number of its last use, the run."""


class Candidates:
    """Classes and uses of all runs, and the order in which some of them would leave.

    Args:
        density: What a class is worth at an age.
        seed: Of the sample; not 0.

    Attributes:
        now_s: Now.
        by_recency: Rank by the last use alone.
        columns: A value per run; whoever names a run covers it there first.
    """

    def __init__(self, density: HitDensity, seed: int) -> None:
        self._density = density
        self._state = seed & _WORD or 1
        self.now_s = 0.0
        self.by_recency = False
        self.columns = Columns()
        self.classes = self.columns.ints("H")
        self.times_s = self.columns.floats()
        self.uses = self.columns.ints("q")
        self._places = self.columns.ints()  # in the list of those that may leave, from 1
        self._leaving = array("i")
        self._use_count = 0
        self._lowest: list[Ranked] = []  # the lowest of the last sample, the next one at its end

    def use(self, run: int, class_index: int) -> None:
        """Note a use of a run, and its class from now on."""
        self._use_count += 1
        self.classes[run], self.times_s[run], self.uses[run] = class_index, self.now_s, self._use_count

    def copy(self, run: int, other: int) -> None:
        """Give a run the history of another one."""
        self.classes[run], self.times_s[run] = self.classes[other], self.times_s[other]
        self.uses[run] = self.uses[other]

    def offer(self, run: int) -> None:
        """Note that a run may leave."""
        if self._places[run]:
            return
        self._leaving.append(run)
        self._places[run] = len(self._leaving)
        if self._lowest:
            ranked = self._ranked(run)
            if ranked < self._lowest[0]:
                insort(self._lowest, ranked, key=_descending)

    def withdraw(self, run: int) -> None:
        """Note that a run must stay, or has left."""
        place = self._places[run]
        if place:
            last = self._leaving.pop()
            if last != run:
                self._leaving[place - 1] = last
                self._places[last] = place
            self._places[run] = 0

    def forget_ranks(self) -> None:
        """Rank anew: time has gone on, or what is known has changed."""
        self._lowest.clear()

    def lowest(self) -> Ranked | None:
        """Name the run that should leave first; None when none may."""
        for _ in range(2):
            while self._lowest:
                _, use, run = self._lowest[-1]
                if self._places[run] and self.uses[run] == use:
                    return self._lowest[-1]
                self._lowest.pop()
            if not self._leaving:
                break
            self._draw()
        return None

    def value(self, class_index: int, age_s: float) -> float:
        """Rank a class at an age."""
        return 0.0 if self.by_recency else self._density.value(class_index, age_s)

    def _ranked(self, run: int) -> Ranked:
        return self.value(self.classes[run], self.now_s - self.times_s[run]), self.uses[run], run

    def _draw(self) -> None:
        """Rank a sample; all, where there are few."""
        runs = np.frombuffer(self._leaving, dtype=np.int32)
        if len(runs) > SAMPLE_RUNS:
            # One of each stretch of the list: it is in no order.
            at = (np.arange(SAMPLE_RUNS) * len(runs)) // SAMPLE_RUNS + self._lot(len(runs))
            runs = runs[at % len(runs)]
        uses = np.frombuffer(self.uses, dtype=np.int64)[runs]
        if self.by_recency:
            values = np.zeros(len(runs))
        else:
            ages_s = self.now_s - np.frombuffer(self.times_s, dtype=np.float64)[runs]
            values = self._density.values(np.frombuffer(self.classes, dtype=np.uint16)[runs], ages_s)
        order = np.lexsort((uses, values))[:KEPT_RUNS][::-1]
        self._lowest = list(
            zip(values[order].tolist(), uses[order].tolist(), runs[order].tolist(), strict=True)
        )

    def _lot(self, limit: int) -> int:
        """Draw a number below ``limit``: xorshift64* (S. Vigna, ACM TOMS 42(4), 2016)."""
        state = self._state
        state ^= state >> 12
        state ^= state << 25 & _WORD
        state ^= state >> 27
        self._state = state
        return (state * 0x2545F4914F6CDD1D & _WORD) * limit >> 64


def _descending(ranked: Ranked) -> tuple[float, int]:
    return -ranked[0], -ranked[1]
