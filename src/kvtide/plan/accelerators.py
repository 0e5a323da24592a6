"""What accelerators can do, by their makers' data sheets: none of it was measured here."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvtide.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device.

    Attributes:
        label: Its name, for people.
        memory_bytes: Of its own.
        bf16_flops: Floating-point operations a second, dense matrices, at most.
        fp8_flops: The same with FP8; None where it has none.
        link_bytes_per_s: To host memory, each way, at most.
        step_tokens: What vLLM 0.32 computes in a step on it unless told otherwise.
        source: Who says so.
    """

    label: str
    memory_bytes: int
    bf16_flops: float
    fp8_flops: float | None
    link_bytes_per_s: float
    step_tokens: int
    source: str


@cache
def known_accelerators() -> dict[str, Accelerator]:
    """Read the table of this package."""
    table = json.loads(files("kvtide.plan").joinpath("accelerators.json").read_text("utf-8"))
    return {name: Accelerator(**numbers) for name, numbers in table.items()}


def accelerator_named(name: str) -> Accelerator:
    """Find an accelerator.

    Raises:
        ConfigError: Nobody here knows it.
    """
    table = known_accelerators()
    known = table.get(name.strip().lower())
    if known is None:
        raise ConfigError("--accelerator", name, f"known are {', '.join(table)}")
    return known
