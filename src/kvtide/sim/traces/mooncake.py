"""Traces of Mooncake: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.

R. Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025. A request a line, blocks of
512 tokens, numbers that are chained and the same all through a file; the last block has one though it is not
full. Traces that others have made in this format say their ``block_size`` where it is another one.
"""

from collections.abc import Iterator
from pathlib import Path

from kvtide.sim.traces.block_names import NumberedNames
from kvtide.sim.traces.faults import Faults
from kvtide.sim.traces.numbered import (
    BlockTokens,
    Found,
    LastBlock,
    Numbered,
    Numbers,
    Record,
    Time,
    TokenCount,
    read_numbered,
)
from kvtide.sim.traces.options import TraceOptions

BLOCK_TOKENS = 512


class MooncakeRecord(Record):
    """A line; ``timestamp`` in milliseconds."""

    timestamp: Time
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: Numbers
    block_size: BlockTokens = BLOCK_TOKENS


def read_mooncake(path: Path, space: int, options: TraceOptions, faults: Faults) -> Iterator[Found]:
    """Read a file of this format; numbers of different ``space`` are different blocks."""
    return read_numbered(path, NumberedNames(space), options, faults, LastBlock.NUMBERED, _parse)


def _parse(line: bytes) -> Numbered:
    one = MooncakeRecord.model_validate_json(line)
    return Numbered(one.timestamp / 1000, one.hash_ids, one.block_size, one.input_length, one.output_length)
