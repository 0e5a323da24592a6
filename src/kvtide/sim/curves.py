"""What replays found, over capacity.

Knows ratios, times and the names they go by. Does not know how they came about, nor how they are drawn.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kvtide.errors import ConfigError

OPTIMUM = "optimum"
"""The bound that stands among the policies and is none: it knows what comes."""

LARGEST_CAPACITY = 1000.0
"""In sizes of the trace: more than all of it is no use, and much more a slip of the pen."""


def _checked(capacity: str) -> str:
    try:
        share = Decimal(capacity)
    except InvalidOperation:
        share = Decimal("nan")
    # A float has to hold it, too: 1e-999 is above 0 and has no place on an axis.
    if not share.is_finite() or not 0 < float(share) <= LARGEST_CAPACITY:
        raise ValueError(f"a capacity is a share of the unique blocks above 0, and {capacity!r} is not")
    return capacity


Capacity = Annotated[str, AfterValidator(_checked)]
Ratio = Annotated[float, Field(ge=0, le=1, strict=True)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore"))
class Curves:
    """Figures of a trace at several capacities.

    A capacity is a share of the trace's unique full blocks, spelt as it was given (``"0.005"``); what was not
    measured is left out. Checked when made; ``curves_of`` says what is wrong in a user's words.

    Attributes:
        hit_ratio: Policy, capacity: share of the full blocks asked for that were found. May have ``OPTIMUM``.
        unbounded: The same of a cache that forgets nothing.
        files: What was replayed.
        requests: Of the trace.
        accesses: Full blocks asked for.
        unique_blocks: Different ones among them.
        block_bytes: Of one block.
        writes_per_access: Policy, capacity: blocks written for each block asked for.
        ttft_s: Policy, capacity, percentile (``"p50"``): seconds to the first token.
        command: What made the figures, for whoever wants them again.
    """

    hit_ratio: Annotated[Mapping[str, Mapping[Capacity, Ratio]], Field(min_length=1)]
    unbounded: Ratio
    files: tuple[str, ...] = ()
    requests: Count | None = None
    accesses: Count | None = None
    unique_blocks: Count | None = None
    block_bytes: Count | None = None
    writes_per_access: Mapping[str, Mapping[Capacity, Amount]] = Field(default_factory=dict)
    ttft_s: Mapping[str, Mapping[Capacity, Mapping[str, Amount]]] = Field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        if not self.capacities:
            raise ValueError("no policy has a figure at any capacity")

    @property
    def capacities(self) -> tuple[str, ...]:
        """All there are in any figure, the smallest first."""
        spelt = {name for table in self._tables() for row in table.values() for name in row}
        return tuple(sorted(spelt, key=lambda capacity: (Decimal(capacity), capacity)))

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that a cache could follow, in the order given."""
        return tuple(name for name in self.hit_ratio if name != OPTIMUM)

    def blocks_at(self, capacity: str) -> int | None:
        """Count the blocks that fit, where it is known how many there are; 0.29 of 100 are 29."""
        return None if self.unique_blocks is None else int(Decimal(capacity) * self.unique_blocks)

    def bytes_at(self, capacity: str) -> int | None:
        """Say what that takes, where the size of a block is known."""
        blocks = self.blocks_at(capacity)
        return None if blocks is None or not self.block_bytes else blocks * self.block_bytes

    def _tables(self) -> Iterator[Mapping[str, Mapping[str, object]]]:
        yield self.hit_ratio
        yield self.writes_per_access
        yield self.ttft_s


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
        raise ConfigError(name, value, f"give what kvtide replay --json prints ({first['msg']})") from None
