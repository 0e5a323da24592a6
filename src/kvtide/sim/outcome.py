"""What came of a replay, in blocks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts over a whole trace.

    Attributes:
        access_count: Full blocks that were asked for.
        hit_count: Of them, those that were there, with all before them.
        stored_count: Blocks that were written.
        evicted_count: Blocks that left.
    """

    access_count: int
    hit_count: int
    stored_count: int
    evicted_count: int

    @property
    def hit_ratio(self) -> float:
        """Share of the full blocks that were hits; 0 of a trace that has none."""
        return self.hit_count / max(1, self.access_count)

    @property
    def writes_per_access(self) -> float:
        """Blocks written for each that was asked for."""
        return self.stored_count / max(1, self.access_count)
