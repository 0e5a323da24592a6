"""When a tier is left out for a while, and when it is tried again.

Told how calls ended, and asked before each. Time is an argument. Knows nothing of what the calls were.
"""

from enum import Enum


class BreakerState(Enum):
    """As it is shown in metrics."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Opens after trouble in a row, lets one call through when it has rested, and closes when that went well.

    Args:
        trouble_limit: Calls in a row that fail before it opens.
        rest_s: How long it stays open at first; twice as long each time the probe fails.
        longest_rest_s: And no longer than this.
    """

    def __init__(self, trouble_limit: int = 3, rest_s: float = 1.0, longest_rest_s: float = 60.0) -> None:
        self._trouble_limit = trouble_limit
        self._first_rest_s = self._rest_s = rest_s
        self._longest_rest_s = longest_rest_s
        self._in_a_row = 0
        self._opened_s: float | None = None
        self._probe_s: float | None = None  # since when a probe is under way

    def state(self, now_s: float) -> BreakerState:
        """Say how it stands."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._opened_s + self._rest_s else BreakerState.PROBING

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made; while it probes, one, until that has ended or was forgotten."""
        state = self.state(now_s)
        if state is not BreakerState.PROBING:
            return state is BreakerState.CLOSED
        if self._probe_s is not None and now_s < self._probe_s + self._rest_s:
            return False
        self._probe_s = now_s
        return True

    def succeeded(self) -> None:
        """Note a call that went well."""
        self._in_a_row, self._rest_s = 0, self._first_rest_s
        self._opened_s = self._probe_s = None

    def failed(self, now_s: float) -> bool:
        """Note a call that did not; True when the tier is left out by it, and was not before."""
        self._in_a_row += 1
        if self._opened_s is not None:
            if self._probe_s is not None:
                self._rest_s = min(2 * self._rest_s, self._longest_rest_s)
                self._opened_s, self._probe_s = now_s, None
            return False
        if self._in_a_row < self._trouble_limit:
            return False
        self._opened_s = now_s
        return True
