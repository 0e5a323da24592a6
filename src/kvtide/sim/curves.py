"""What replays found, over capacity.

Knows ratios, times and the names they go by. Does not know how they came about, nor how they are drawn.
"""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kvtide.errors import ConfigError

OPTIMUM = "optimum"
"""The bound that stands among the policies and is none: it knows what comes."""

LARGEST_CAPACITY = 1000.0
"""In sizes of the trace: more than all of it is no use, and much more a slip of the pen."""

Ratio = Annotated[float, Field(ge=0, le=1, strict=True)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore"))
class Curves:
    """Figures of a trace at several capacities.

    A capacity is a share of the trace's unique full blocks (``"0.005"``) or, where ``memory_bytes`` says what
    each is, a size (``"64GiB"``): spelt as it was given. What was not measured is left out. Checked when
    made; ``curves_of`` says what is wrong in a user's words.

    Attributes:
        hit_ratio: Policy, capacity: share of the full blocks asked for that were found. May have ``OPTIMUM``.
        unbounded: The same of a cache that forgets nothing.
        traces: Files that were replayed.
        requests: Of the trace.
        accesses: Full blocks asked for.
        unique_blocks: Different ones among them.
        block_bytes: Of one block.
        memory_bytes: Capacity: bytes. Empty where capacities are shares.
        writes_per_access: Policy, capacity: blocks written for each block asked for.
        written_per_day: Policy, capacity, tier: bytes.
        ttft_s: Policy, capacity, percentile (``"p50"``): seconds to the first token.
        command: What made the figures, for whoever wants them again.
    """

    hit_ratio: Annotated[Mapping[str, Mapping[str, Ratio]], Field(min_length=1)]
    unbounded: Ratio | None = None
    traces: tuple[str, ...] = ()
    requests: Count | None = None
    accesses: Count | None = None
    unique_blocks: Count | None = None
    block_bytes: Count | None = None
    memory_bytes: Mapping[str, Annotated[Count, Field(gt=0)]] = Field(default_factory=dict)
    writes_per_access: Mapping[str, Mapping[str, Amount]] = Field(default_factory=dict)
    written_per_day: Mapping[str, Mapping[str, Mapping[str, Amount]]] = Field(default_factory=dict)
    ttft_s: Mapping[str, Mapping[str, Mapping[str, Amount]]] = Field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        spelt = self._spelt()
        if not spelt:
            raise ValueError("no policy has a figure at any capacity")
        for capacity in sorted(spelt):
            if self.memory_bytes and capacity not in self.memory_bytes:
                raise ValueError(f"capacity {capacity!r} is not among memory_bytes")
            if not self.memory_bytes and not _is_share(capacity):
                raise ValueError(
                    f"a capacity is a share of the unique blocks above 0, and {capacity!r} is not"
                )

    @property
    def capacities(self) -> tuple[str, ...]:
        """All there are in any figure, the smallest first."""
        return tuple(sorted(self._spelt(), key=lambda capacity: (self.place_of(capacity), capacity)))

    def place_of(self, capacity: str) -> Decimal:
        """Say where a capacity stands among others: a share, or bytes where capacities are sizes."""
        return Decimal(self.memory_bytes.get(capacity, capacity))

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that a cache could follow, in the order given."""
        return tuple(name for name in self.hit_ratio if name != OPTIMUM)

    def blocks_at(self, capacity: str) -> int | None:
        """Count the blocks that fit, where a capacity is a share of so many; 0.29 of 100 are 29."""
        if self.memory_bytes or self.unique_blocks is None:
            return None
        return int(Decimal(capacity) * self.unique_blocks)

    def bytes_at(self, capacity: str) -> int | None:
        """Say what that takes, where it is known."""
        blocks = self.blocks_at(capacity)
        known = blocks * self.block_bytes if blocks is not None and self.block_bytes else None
        return self.memory_bytes.get(capacity, known)

    def _spelt(self) -> set[str]:
        tables: tuple[Mapping[str, Mapping[str, object]], ...] = (
            self.hit_ratio,
            self.writes_per_access,
            self.written_per_day,
            self.ttft_s,
        )
        return {capacity for table in tables for row in table.values() for capacity in row}


def curves_of(figures: Mapping[str, object]) -> Curves:
    """Check figures as ``kvtide replay --json`` prints them; what else they say is ignored.

    Raises:
        ConfigError: Something is missing or cannot be; names the figure.
    """
    try:
        return TypeAdapter(Curves).validate_python(figures)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "figures"
        value = first["input"] if first["loc"] and first["type"] != "missing" else None
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(name, value, f"give what kvtide replay --json prints ({reason})") from None


def _is_share(capacity: str) -> bool:
    try:
        share = Decimal(capacity)
    except InvalidOperation:
        return False
    # A float has to hold it, too: 1e-999 is above 0 and has no place on an axis.
    return share.is_finite() and 0 < float(share) <= LARGEST_CAPACITY
