"""One request of a trace: when it came, and which blocks its prompt consists of.

Knows no format and no text: a block is its chained hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What a server was asked.

    Attributes:
        arrival_s: Seconds since the trace began; they never decrease from one request to the next.
        block_hashes: One per full block of the prompt, all of one length; chained, so that equal hashes have
            equal blocks before them. What is left over is a part of a block, which nothing keeps.
        block_tokens: Tokens of a block.
        prompt_tokens: Of the prompt, at least ``len(block_hashes) * block_tokens``.
        output_tokens: Generated.
        session: Of requests that continue each other, where the trace says so.
        generated_hashes: Of the blocks that were filled while the answer came, where the trace says so.
    """

    arrival_s: float
    block_hashes: Sequence[bytes] = field(repr=False)
    block_tokens: int
    prompt_tokens: int
    output_tokens: int = 0
    session: str = ""
    generated_hashes: Sequence[bytes] = field(default=(), repr=False)
