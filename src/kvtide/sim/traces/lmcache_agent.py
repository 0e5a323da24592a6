"""Traces of agents that LMCache published: https://github.com/LMCache/lmcache-agent-trace.

A request a line with its session, block numbers derived from the prompts. Only blocks that a prompt fills
have a number.
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


class AgentRecord(Record):
    """A line; ``timestamp`` in milliseconds."""

    timestamp: Time
    session_id: str
    block_size: BlockTokens
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: Numbers


def read_lmcache_agent(path: Path, space: int, options: TraceOptions, faults: Faults) -> Iterator[Found]:
    """Read a file of this format; numbers of different ``space`` are different blocks."""
    return read_numbered(path, NumberedNames(space), options, faults, LastBlock.LEFT_OUT, _parse)


def _parse(line: bytes) -> Numbered:
    one = AgentRecord.model_validate_json(line)
    return Numbered(
        one.timestamp / 1000,
        one.hash_ids,
        one.block_size,
        one.input_length,
        one.output_length,
        one.session_id,
    )
