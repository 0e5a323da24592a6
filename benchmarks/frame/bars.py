"""A bar: a ratio that was measured, and what it has to be.

Knows numbers and names. Does not know samples: who judges a benchmark computes the ratio from them.
"""

import math
from dataclasses import dataclass
from enum import Enum


class Sense(Enum):
    """On which side of the bar the ratio has to be."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclass(frozen=True, slots=True)
class Bar:
    """What was measured, beside what was promised.

    Attributes:
        name: What the ratio is of; unique within a benchmark.
        ratio: What was measured. NaN meets no bar.
        bar: The promise.
        sense: Whether the ratio has to be at least or at most that.
    """

    name: str
    ratio: float
    bar: float
    sense: Sense

    @property
    def met(self) -> bool:
        """Whether the promise was kept; exactly on the bar is kept."""
        if self.sense is Sense.AT_LEAST:
            return self.ratio >= self.bar
        return self.ratio <= self.bar

    def record(self) -> dict[str, object]:
        """Return what ``results.json`` says of it."""
        ratio = self.ratio if math.isfinite(self.ratio) else None  # JSON knows no NaN
        return {
            "name": self.name,
            "ratio": ratio,
            "bar": self.bar,
            "sense": self.sense.value,
            "met": self.met,
        }


def at_least(name: str, ratio: float, bar: float) -> Bar:
    """Promise that ``ratio`` is ``bar`` or more."""
    return Bar(name, ratio, bar, Sense.AT_LEAST)


def at_most(name: str, ratio: float, bar: float) -> Bar:
    """Promise that ``ratio`` is ``bar`` or less."""
    return Bar(name, ratio, bar, Sense.AT_MOST)
