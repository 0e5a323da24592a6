"""Which bytes copies under way read and write, and so which of them may not overtake which.

Knows addresses; does not know streams, jobs or blocks. Copies that share no byte, or only read the bytes
they share, are in no order at all.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from kvtide.transfer.plans import CopyPlan


@dataclass(frozen=True, slots=True)
class Ranges:
    """A set of bytes.

    Attributes:
        begin: ``int64[n]``, ascending.
        reach: ``int64[n]``, the furthest end of any range up to this one.
    """

    begin: np.ndarray
    reach: np.ndarray

    @classmethod
    def of(cls, address: np.ndarray, size: np.ndarray) -> Self:
        """Take pieces in any order; they may overlap."""
        order = np.argsort(address, kind="stable")
        begin = address[order]
        return cls(begin, np.maximum.accumulate(begin + size[order]))

    def meets(self, other: Self) -> bool:
        """Say whether a byte is in both."""
        if not len(self.begin) or not len(other.begin):
            return False
        few, many = (self, other) if len(self.begin) <= len(other.begin) else (other, self)
        # Of the many that begin before one of the few ends: does any end after that one begins?
        before = np.searchsorted(many.begin, few.reach, side="left")
        return bool(((before > 0) & (many.reach[before - 1] > few.begin)).any())


class Touched:
    """What a copy reads and what it writes; sorted when somebody asks, as most copies are alone.

    Args:
        plan: Of the copy.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan

    @cached_property
    def read(self) -> Ranges:
        """Bytes of all sources."""
        return Ranges.of(self._plan.source, self._plan.size)

    @cached_property
    def written(self) -> Ranges:
        """Bytes of all targets."""
        return Ranges.of(self._plan.target, self._plan.size)

    def conflicts(self, other: Self) -> bool:
        """Say whether the order of the two copies can be seen in the bytes."""
        return (
            self.written.meets(other.written)
            or self.written.meets(other.read)
            or self.read.meets(other.written)
        )
