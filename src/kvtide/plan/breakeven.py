"""From which pace on a prefix is brought back sooner than it is computed again.

Knows what a reader needs, what computing it takes, and paces. A prompt of n tokens takes two operations for
each parameter and token, and for each layer of attention four for each number of a query and each pair of a
token with one before it, itself included (Kaplan et al., 2020, but with the pairs that a causal mask leaves).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.geometry import chunks_needed
from kvtide.plan.accelerators import Accelerator
from kvtide.plan.groups import ModelKV
from kvtide.plan.layers import Layer

PREFIXES = (4 << 10, 32 << 10, 128 << 10)

UTILISATION = 0.5
"""Of a device's arithmetic, what computing prompts is taken to reach: assumed, and on the high side, so that
the pace asked for is rather too high."""

LINK_SHARE = 0.8
"""Of a link's pace, what copies are taken to reach: assumed."""

PATHS = {
    "disk": 6.5e9,
    "100 Gbit/s": 100e9 / 8 * 0.9,
    "400 Gbit/s": 400e9 / 8 * 0.9,
}
"""Bytes a second that are typical: one NVMe disk on PCIe 4.0 x4 by data sheets (6.5 to 7 GB/s of reads), and
networks at nine tenths of their line rate."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Who computes.

    Attributes:
        kv: Of the model on its ranks.
        met_parameters: By each token of a prompt.
        flops: Of all devices together, a second, as they are taken to reach them.
        link_bytes_per_s: Between host memory and all devices together, likewise.
    """

    kv: ModelKV
    met_parameters: int
    flops: float
    link_bytes_per_s: float

    def prompt_s(self, tokens: int) -> float:
        """Seconds to compute a prompt of so many tokens."""
        layers = self.kv.layers.layers
        pairs = sum(layer.pair_flops * pairs_of(layer, tokens) for layer in layers)
        return (2 * self.met_parameters * tokens + pairs) / self.flops


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Of a prefix.

    Attributes:
        tokens: It has.
        compute_s: To compute it again.
        load_bytes: To bring it back, to all ranks together.
        bytes_per_s: The pace at which both take the same time, all ranks together.
        load_s: Seconds to bring it back from host memory and over other paths, by name.
    """

    tokens: int
    compute_s: float
    load_bytes: int
    bytes_per_s: float
    load_s: dict[str, float]


def engine_of(
    kv: ModelKV,
    accelerator: Accelerator,
    met_parameters: int,
    in_fp8: bool = False,
    utilisation: float = UTILISATION,
) -> Engine:
    """Say how fast a model computes on so many devices as it has ranks.

    Raises:
        ConfigError: A share that is none.
    """
    if not 0 < utilisation <= 1:
        raise ConfigError("--utilisation", utilisation, "give a share of the arithmetic above 0, up to 1")
    peak = accelerator.fp8_flops if in_fp8 and accelerator.fp8_flops else accelerator.bf16_flops
    devices = kv.ranks.count
    link = accelerator.link_bytes_per_s * LINK_SHARE
    return Engine(kv, met_parameters, peak * utilisation * devices, link * devices)


def break_evens(
    engine: Engine, prefixes: Sequence[int] = PREFIXES, disk: float | None = None
) -> list[BreakEven]:
    """Say it for each prefix.

    Args:
        engine: Who would compute.
        prefixes: In tokens.
        disk: Pace of the disk in bytes a second, where it is known.
    """
    found = []
    for tokens in prefixes:
        compute_s, load_bytes = engine.prompt_s(tokens), bytes_to_load(engine.kv, tokens)
        paces = {"host memory": engine.link_bytes_per_s} | PATHS | ({"disk": disk} if disk else {})
        load_s = {name: load_bytes / pace for name, pace in paces.items()}
        found.append(BreakEven(tokens, compute_s, load_bytes, load_bytes / compute_s, load_s))
    return found


def bytes_to_load(kv: ModelKV, tokens: int) -> int:
    """What a reader is brought back who continues after so many tokens, all ranks together."""
    end = kv.geometry.restore_point(tokens)
    return sum(
        len(chunks_needed(group.geometry, 0, end)) * kv.chunk_bytes(group, stage) * kv.ranks.tensor
        for group in kv.groups
        for stage in range(kv.ranks.pipeline)
    )


def pairs_of(layer: Layer, tokens: int) -> int:
    """Count pairs of a token with one that it looks at, itself included."""
    if layer.local_tokens is not None:
        whole, rest = divmod(tokens, layer.local_tokens)
        return whole * _triangle(layer.local_tokens) + _triangle(rest)
    if layer.window_tokens is None:
        return _triangle(tokens)
    window = min(layer.window_tokens, tokens)
    return _triangle(window) + (tokens - window) * window


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
