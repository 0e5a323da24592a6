"""kvtide's own trace: how a line of it is written and read.

The first line says what all others are measured in. A request is written when it ends, so they come in the
order of their ends; each line says when the oldest request that was still open had come, and so the reader
knows which of those it has read may go on. Hashes are those of the server under a random salt that nobody
keeps: equal blocks of one file are equal, and more is not to be learnt from it.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from kvtide.sim.traces.block_names import twice
from kvtide.sim.traces.faults import Faults, line_of, worded
from kvtide.sim.traces.numbered import BlockTokens, Found, Record, Time, TokenCount
from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.packed import read_lines
from kvtide.sim.traces.request import TraceRequest

VERSION = 1

HASH_BYTES = 8
"""Of a salted hash. Among a million blocks any two are alike with a probability of 3e-8."""


class Header(Record):
    """The first line; ``began_s`` in seconds since 1970."""

    kvtide_trace: Literal[1]
    block_tokens: BlockTokens
    began_s: Time


class RequestRecord(Record):
    """Another line; times in seconds since ``began_s``, hashes in base64 one after the other."""

    t: Time
    open_since: Time
    prompt_tokens: TokenCount
    output_tokens: TokenCount
    blocks: str
    generated: str = Field(default="")


def header_line(block_tokens: int, began_s: float) -> bytes:
    """Write the first line."""
    return _line({"kvtide_trace": VERSION, "block_tokens": block_tokens, "began_s": round(began_s, 6)})


def request_line(
    arrival_s: float,
    open_since_s: float,
    prompt_tokens: int,
    output_tokens: int,
    blocks: Sequence[bytes],
    generated: Sequence[bytes],
) -> bytes:
    """Write a request that has ended.

    Args:
        arrival_s: When it came, since the beginning.
        open_since_s: When the oldest request came that has not ended; now, without any.
        prompt_tokens: Of the prompt.
        output_tokens: Generated.
        blocks: Salted hashes of the blocks that the prompt fills.
        generated: Of those after them.
    """
    return _line(
        {
            "t": round(arrival_s, 6),
            "open_since": round(open_since_s, 6),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "blocks": base64.b64encode(b"".join(blocks)).decode(),
            "generated": base64.b64encode(b"".join(generated)).decode(),
        }
    )


def began_s(path: Path) -> float | None:
    """Say when a recording began, in seconds since 1970; None where that cannot be read."""
    for _, line, _ in read_lines(path, Faults(path, "skip")):
        try:
            return Header.model_validate_json(line).began_s
        except ValidationError:
            break
    return None


def read_recording(path: Path, space: int, options: TraceOptions, faults: Faults) -> Iterator[Found]:
    """Read a file of this format; hashes are of contents and need no ``space``.

    A last line without its end is left out in silence: that is how a recording ends that was not closed.
    """
    header: Header | None = None
    # What may be overtaken by a request that came earlier and has not ended.
    held: list[tuple[float, int, TraceRequest]] = []
    for number, line, has_end in read_lines(path, faults):
        try:
            if header is None:
                header = Header.model_validate_json(line)
                continue
            record = RequestRecord.model_validate_json(line)
            request = _request(record, header, options)
        except ValidationError as error:
            if header is None:
                faults.note(line_of(number), worded(error))
                return
            if has_end:
                faults.note(line_of(number), worded(error))
        except _BadHashes as error:
            faults.note(line_of(number), str(error))
        else:
            heappush(held, (request.arrival_s, number, request))
            while held and held[0][0] < record.open_since:
                yield _next(held)
    while held:
        yield _next(held)


class _BadHashes(Exception):
    pass


def _next(held: list[tuple[float, int, TraceRequest]]) -> Found:
    _, number, request = heappop(held)
    return line_of(number), request


def _request(record: RequestRecord, header: Header, options: TraceOptions) -> TraceRequest:
    blocks = _hashes("blocks", record.blocks)
    generated = _hashes("generated", record.generated)
    full = record.prompt_tokens // header.block_tokens
    if len(blocks) > full:
        raise _BadHashes(f"blocks: {len(blocks)} hashes for {record.prompt_tokens} tokens, {full} are due")
    most = (record.prompt_tokens + record.output_tokens) // header.block_tokens - len(blocks)
    if len(generated) > most:
        raise _BadHashes(f"generated: {len(generated)} hashes, no more than {most} can be")
    if twice(blocks + generated) is not None:
        raise _BadHashes("blocks: a hash comes twice, they must be chained")
    step = options.step(header.block_tokens)
    whole = len(blocks) // step
    return TraceRequest(
        record.t,
        blocks[step - 1 :: step],
        header.block_tokens * step,
        record.prompt_tokens,
        record.output_tokens,
        generated_hashes=(blocks[whole * step :] + generated)[step - 1 :: step],
    )


def _hashes(name: str, text: str) -> list[bytes]:
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _BadHashes(f"{name}: no base64") from None
    if len(packed) % HASH_BYTES:
        raise _BadHashes(f"{name}: {len(packed)} bytes are no hashes of {HASH_BYTES}")
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
