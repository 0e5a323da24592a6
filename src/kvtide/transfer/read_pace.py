"""How fast a tier brings chunks, as its lane has seen it lately.

Time is an argument. Knows seconds and counts; does not know calls.
"""

import math

WEIGHT = 0.2
"""Of the last call, in the running mean."""

HALVED_S, LONGEST_HALVED_S = 10.0, 40.0
"""Nothing was read for so long: half of what is known is forgotten, so that a slow tier is tried again. Each
time that shows it as slow as before, it takes twice as long, and no longer than the second."""

LEAST_S = 1e-4
"""Below it nobody has to know."""


class ReadPace:
    """A running mean of seconds a chunk.

    Args:
        call_count: Calls there may be side by side.
    """

    def __init__(self, call_count: int) -> None:
        self._call_count = call_count
        self._mean_s = 0.0
        self._noted_s = 0.0
        self._halved_s = HALVED_S

    def note(self, seconds: float, chunk_count: int, now_s: float) -> None:
        """Note a call that read chunks, or tried."""
        chunk_s, mean_s = seconds / chunk_count, self._faded(now_s)
        if chunk_s < self._mean_s / 2:
            self._halved_s = HALVED_S
        elif 0 < mean_s <= self._mean_s / 2:  # tried again, and whoever tried has waited for nothing
            self._halved_s = min(2 * self._halved_s, LONGEST_HALVED_S)
        self._mean_s = chunk_s if mean_s < LEAST_S else mean_s + WEIGHT * (chunk_s - mean_s)
        self._noted_s = now_s

    def chunk_s(self, now_s: float) -> float:
        """Say in how many seconds one more chunk comes, to the nearest power of two; 0 for hardly any."""
        seconds = self._faded(now_s) / self._call_count
        return 0.0 if seconds < LEAST_S else 2.0 ** round(math.log2(seconds))

    def _faded(self, now_s: float) -> float:
        return float(self._mean_s * 0.5 ** (max(0.0, now_s - self._noted_s) / self._halved_s))
