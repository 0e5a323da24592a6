"""How fast the engine computes and loads, as seen from the scheduler: how long a prefix would take.

Waiting for somebody else's load is worth it only while it is shorter than computing.
"""


class RecomputePace:
    """A running mean of tokens per second over steps that mostly compute prompts."""

    MIN_TOKENS = 64  # decode steps say nothing of the speed of a prompt
    WEIGHT = 0.2

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None
        self._step: tuple[int, float] | None = None

    def step_began(self, token_count: int, now_s: float) -> None:
        """Note that a step of ``token_count`` tokens was planned."""
        self._step = (token_count, now_s)

    def step_ended(self, now_s: float) -> None:
        """Note that its results are in. Between here and the next step the engine may be idle."""
        if self._step is None:
            return
        token_count, began_s = self._step
        self._step = None
        if token_count >= self.MIN_TOKENS and now_s > began_s:
            rate = token_count / (now_s - began_s)
            old = self._tokens_per_s
            self._tokens_per_s = rate if old is None else old + self.WEIGHT * (rate - old)

    def seconds_for(self, token_count: int) -> float | None:
        """Estimate how long computing would take; None before anything was seen."""
        return None if self._tokens_per_s is None else token_count / self._tokens_per_s


class LoadPace:
    """A running mean of seconds per token over loads, from planning one to hearing of its end."""

    KEPT = 0.95
    """Of what was seen before, with each load."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def loaded(self, token_count: int, seconds: float) -> None:
        """Note a load."""
        self._tokens = self.KEPT * self._tokens + token_count
        self._seconds = self.KEPT * self._seconds + max(0.0, seconds)

    def seconds_for(self, token_count: int) -> float | None:
        """Estimate how long a load would take; None before anything was seen."""
        return token_count * self._seconds / self._tokens if self._tokens else None
