"""What a walk saw, counted by name."""

from collections import Counter
from dataclasses import dataclass, field

from kvtide.testing.lane_faults import UNHARMED

HARMLESS = {"copy: instant", "copy: quick"}


@dataclass(slots=True)
class Report:
    """What a walk saw.

    Attributes:
        steps: Steps of the engine.
        token_steps: Those that scheduled tokens.
        requests: Asked.
        loads: That ended well, whatever the number of ranks.
        hit_tokens: That came from host memory.
        happened: Events and faults, by name.
    """

    steps: int = 0
    token_steps: int = 0
    requests: int = 0
    loads: int = 0
    hit_tokens: int = 0
    happened: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Report") -> None:
        """Add another walk's."""
        self.steps += other.steps
        self.token_steps += other.token_steps
        self.requests += other.requests
        self.loads += other.loads
        self.hit_tokens += other.hit_tokens
        self.happened.update(other.happened)

    @property
    def faults(self) -> int:
        """Copies that did not simply go well, and answers that were late."""
        return sum(
            count
            for name, count in self.happened.items()
            if (name.startswith("copy: ") and name not in HARMLESS)
            or (name.startswith("call: ") and name.split(" ", 2)[2] not in UNHARMED)
            or name in ("late answer", "sibling failed")
        )
