"""A request a line, its blocks as numbers: what three public formats have in common.

Knows how many numbers a prompt has to have. What a format calls things, and in which unit it counts, is the
business of its own file.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from kvtide.errors import ConfigError
from kvtide.sim.traces.block_names import BlockNames, twice
from kvtide.sim.traces.faults import Faults, line_of, worded
from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.packed import read_lines
from kvtide.sim.traces.request import TraceRequest

Found = tuple[str, TraceRequest]
"""Where in the file, and what; times as the file counts them, in seconds."""

TokenCount = Annotated[int, Field(ge=0, le=1 << 40)]
BlockTokens = Annotated[int, Field(ge=1, le=1 << 20)]
Numbers = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 64)]], FailFast()]
Time = Annotated[float, Field(ge=-1e15, le=1e15)]


class Record(BaseModel):
    """A record as it is written: types are not bent, what is not known is let be."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class LastBlock(Enum):
    """Whether a block that the prompt fills in part has a number."""

    NUMBERED = "numbered"
    LEFT_OUT = "left out"
    EITHER = "either"


class Numbered(NamedTuple):
    """What a record says, in our units.

    Attributes:
        time_s: When it came.
        numbers: Of its blocks.
        block_tokens: Tokens of a block.
        prompt_tokens: Of the prompt.
        output_tokens: Generated.
        session: It belongs to; empty for none.
    """

    time_s: float
    numbers: list[int]
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    session: str = ""


def full_blocks(number_count: int, prompt_tokens: int, block_tokens: int, last: LastBlock) -> int:
    """Count the blocks that a prompt fills.

    Raises:
        ValueError: It has another count of numbers than is due; says so.
    """
    full = prompt_tokens // block_tokens
    begun = -(-prompt_tokens // block_tokens)
    due = {LastBlock.NUMBERED: (begun,), LastBlock.LEFT_OUT: (full,), LastBlock.EITHER: (full, begun)}[last]
    if number_count not in due:
        counts = sorted(set(due))
        verb = "is" if counts == [1] else "are"
        shown = " or ".join(map(str, counts))
        raise ValueError(f"hash_ids: {number_count} ids for {prompt_tokens} tokens, {shown} {verb} due")
    return full


def named(record: Numbered, last: LastBlock, names: BlockNames, options: TraceOptions) -> TraceRequest:
    """Make a request of a record.

    Raises:
        ValueError: It cannot be one; says why.
    """
    full = full_blocks(len(record.numbers), record.prompt_tokens, record.block_tokens, last)
    step = options.step(record.block_tokens)
    hashes = names.of(record.numbers[:full], step)
    if (again := twice(hashes)) is not None:
        raise ValueError(
            f"hash_ids: {int.from_bytes(hashes[again][4:])} twice in one prompt, ids must be chained"
        )
    return TraceRequest(
        record.time_s,
        hashes,
        record.block_tokens * step,
        record.prompt_tokens,
        record.output_tokens,
        record.session,
    )


def read_numbered(
    path: Path,
    names: BlockNames,
    options: TraceOptions,
    faults: Faults,
    last: LastBlock,
    parse: Callable[[bytes], Numbered],
) -> Iterator[Found]:
    """Read a file with a request a line.

    Args:
        path: Of the file.
        names: What becomes of its numbers.
        options: See there.
        faults: Where bad records go.
        last: See ``LastBlock``.
        parse: A line to what it says; raises ``ValueError``, of which ``ValidationError`` is one.
    """
    for number, line, _ in read_lines(path, faults):
        try:
            request = named(parse(line), last, names, options)
        except ConfigError:
            raise  # not the record's fault
        except ValidationError as error:
            faults.note(line_of(number), worded(error))
        except ValueError as error:
            faults.note(line_of(number), str(error))
        else:
            yield line_of(number), request
