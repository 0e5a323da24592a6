"""Traces of Alibaba's Bailian: https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon.

J. Wang et al., "KVCache Cache in the Wild", ATC 2025. A request a line, blocks of 16 tokens, the last one
numbered though it is not full, and of each turn of a chat the turn before it: a chat's session is its first
turn. That a number stands for what is before its block, too, is nowhere said, so numbers are chained here.
"""

from collections.abc import Iterator
from pathlib import Path

from kvtide.sim.traces.block_names import ChainedNames
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

BLOCK_TOKENS = 16

CHATS = 1 << 20
"""Turns whose session is remembered; the longest known is forgotten, and what follows it begins a new one."""


class BailianRecord(Record):
    """A line; ``timestamp`` in seconds, ``parent_chat_id`` below 0 for the first turn of a chat."""

    chat_id: int
    parent_chat_id: int = -1
    timestamp: Time
    input_length: TokenCount
    output_length: TokenCount
    type: str = ""
    turn: int = 1
    hash_ids: Numbers
    block_size: BlockTokens = BLOCK_TOKENS


def read_bailian(path: Path, space: int, options: TraceOptions, faults: Faults) -> Iterator[Found]:
    """Read a file of this format; numbers of different ``space`` are different blocks."""
    sessions: dict[int, int] = {}

    def parse(line: bytes) -> Numbered:
        one = BailianRecord.model_validate_json(line)
        first = one.parent_chat_id if one.parent_chat_id >= 0 else one.chat_id
        session = sessions[one.chat_id] = sessions.get(first, first)
        if len(sessions) > CHATS:
            del sessions[next(iter(sessions))]
        return Numbered(
            one.timestamp,
            one.hash_ids,
            one.block_size,
            one.input_length,
            one.output_length,
            str(session),
        )

    return read_numbered(path, ChainedNames(space), options, faults, LastBlock.EITHER, parse)
