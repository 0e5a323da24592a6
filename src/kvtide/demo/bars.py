"""What has to be reached for the demo to count as passed, and whether it was.

Knows limits. Does not know how the figures were taken. A figure that could not be taken is a bar missed.
"""

from dataclasses import dataclass
from enum import Enum

from kvtide.demo.figures import Figures

MIN_COMPARED_REQUESTS = 40
MIN_LOADED_SHARE = 0.80
MAX_OF_RECOMPUTE = 1 / 6
MAX_OF_ENGINE_HIT = 1.15
MAX_WALL_S = 300.0


class Sense(Enum):
    """Which side of the limit is good."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        name: What is asked, for people.
        figure: What was reached, ``None`` when it could not be taken.
        unit: Of figure and limit, "" for counts and ratios.
    """

    name: str
    figure: float | None
    sense: Sense
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the figure is on the good side of the limit, or on it."""
        if self.figure is None:
            return False
        return self.figure >= self.limit if self.sense is Sense.AT_LEAST else self.figure <= self.limit


def bars_of(figures: Figures, wall_s: float) -> list[Bar]:
    """Hold the figures against the limits.

    Args:
        figures: What was measured.
        wall_s: Seconds of the whole demo after set-up.
    """
    verdict, ttft_ms = figures.verdict, figures.ttft_ms
    host_hit = ttft_ms["host_hit"].p50
    equal = max(0, verdict.compared_requests - verdict.diverging_requests)
    # Without a budget there is no bound that could have been kept.
    used = figures.host_bytes_used if figures.host_bytes_budget is not None else None
    return [
        Bar("answers equal to the reference's", equal, Sense.AT_LEAST,
            max(verdict.compared_requests, MIN_COMPARED_REQUESTS)),
        Bar("prompt tokens of these loaded", _ratio(verdict.loaded_tokens, verdict.prompt_tokens),
            Sense.AT_LEAST, MIN_LOADED_SHARE),
        Bar("first token: host hit / recompute, p50", _ratio(host_hit, ttft_ms["recompute"].p50),
            Sense.AT_MOST, MAX_OF_RECOMPUTE),
        Bar("first token: host hit / engine hit, p50", _ratio(host_hit, ttft_ms["engine_hit"].p50),
            Sense.AT_MOST, MAX_OF_ENGINE_HIT),
        Bar("host memory used", used, Sense.AT_MOST, figures.host_bytes_budget or 0, "bytes"),
        Bar("whole demo after set-up", wall_s, Sense.AT_MOST, MAX_WALL_S, "s"),
    ]  # fmt: skip


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
