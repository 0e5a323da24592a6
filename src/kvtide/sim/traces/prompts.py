"""Prompts as text: JSON lines with ``prompt``, ``text`` or ``messages``, as logs of servers have them.

Blocks are hashed here, each together with all before it. Where a line says when it came (``timestamp``,
seconds), all must; else they come at equal distances.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
from pydantic import FailFast, Field, TypeAdapter, ValidationError, field_validator, model_validator

from kvtide.sim.traces.faults import Faults, line_of, worded
from kvtide.sim.traces.numbered import Found, Record, Time, TokenCount
from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.packed import read_lines
from kvtide.sim.traces.request import TraceRequest
from kvtide.sim.traces.tokens import Tokens

BLOCK_TOKENS = 16

_TOKEN_IDS = TypeAdapter(Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], FailFast()])


class Message(Record):
    """One of a chat; of its content the parts that are text."""

    role: str
    content: str | list[dict[str, Any]] | None = ""

    def plain(self) -> dict[str, str]:
        """The message with its content as one text."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(str(part.get("text", "")) for part in content)
        return {"role": self.role, "content": content}


class PromptRecord(Record):
    """A line: one of ``prompt``, which may be token ids, ``text`` and ``messages``."""

    prompt: str | list[Any] | None = None
    text: str | None = None
    messages: list[Message] | None = None
    timestamp: Time | None = None
    output_tokens: TokenCount = 0
    session: str = ""

    @field_validator("prompt")
    @classmethod
    def _token_ids(cls, prompt: str | list[Any] | None) -> str | list[Any] | None:
        return _TOKEN_IDS.validate_python(prompt, strict=True) if isinstance(prompt, list) else prompt

    @model_validator(mode="after")
    def _one_of_three(self) -> "PromptRecord":
        if (self.prompt is not None) + (self.text is not None) + (self.messages is not None) != 1:
            raise ValueError("one of prompt, text and messages is due")
        return self


def read_prompts(path: Path, space: int, options: TraceOptions, faults: Faults) -> Iterator[Found]:
    """Read a file of this format; hashes are of contents and need no ``space``.

    Raises:
        ConfigError: No tokenizer was given and one is needed, or there is none of that name.
    """
    tokens: Tokens | None = None
    block_tokens = options.block_tokens or BLOCK_TOKENS
    are_timed: bool | None = None
    count = 0
    for number, line, _ in read_lines(path, faults):
        try:
            record = PromptRecord.model_validate_json(line)
        except ValidationError as error:
            faults.note(line_of(number), worded(error))
            continue
        if are_timed is None:
            are_timed = record.timestamp is not None
        elif are_timed != (record.timestamp is not None):
            faults.note(
                line_of(number), f"timestamp: is {'missing' if are_timed else 'there'}, unlike before"
            )
            continue
        if isinstance(record.prompt, list):
            ids: Sequence[int] = record.prompt
        else:
            tokens = tokens or Tokens(options.tokenizer)
            ids = _tokens(record, tokens)
        time_s = count * options.interval_s if record.timestamp is None else record.timestamp
        count += 1
        yield (
            line_of(number),
            TraceRequest(
                time_s,
                chained_hashes(ids, block_tokens),
                block_tokens,
                len(ids),
                record.output_tokens,
                record.session,
            ),
        )


def chained_hashes(token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Hash the full blocks of a prompt, each together with the hash of the one before it: 16 bytes each."""
    packed = np.asarray(token_ids, dtype="<u4").tobytes()
    block_bytes = 4 * block_tokens
    hashes: list[bytes] = []
    above = b""
    for end in range(block_bytes, len(packed) + 1, block_bytes):
        above = xxhash.xxh3_128_digest(above + packed[end - block_bytes : end])
        hashes.append(above)
    return hashes


def _tokens(record: PromptRecord, tokens: Tokens) -> Sequence[int]:
    if record.messages is not None:
        return tokens.of_chat([one.plain() for one in record.messages])
    text = record.prompt if isinstance(record.prompt, str) else record.text
    return tokens.of_text(text or "")
