"""Time that passes only when a test says so."""


class VirtualClock:
    """Takes the place of module ``time`` in a module under test.

    Args:
        now_s: Where it begins.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        """Say what time it is."""
        return self._now_s

    def time(self) -> float:
        """Say how many seconds have passed since the epoch."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += max(0.0, seconds)

    def advance_to(self, until_s: float) -> None:
        """Let time pass until then; it never goes back."""
        self._now_s = max(self._now_s, until_s)
