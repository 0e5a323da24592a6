"""What a reader may be told beside the files."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.errors import ConfigError

Tokenizer = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a reader may be told beside the files; each part of it means something to some formats only.

    Attributes:
        block_tokens: Tokens of a block, a multiple of those the trace has: its hashes are chained, so that
            the last one of several names them all. Of prompts as text: any number; 16 without. None: as the
            trace has them.
        seed: Of what is invented: when sessions begin that do not say it.
        session_span_s: Such sessions begin uniformly within so many seconds.
        tokenizer: For prompts as text: a tokenizer's file or folder, ``bytes`` for one token a byte, or a
            function from text to token ids.
        interval_s: Between prompts that do not say when they came.
        continued: Several files are parts of one trace, in the order in which they are listed, or in a folder
            in that of their names: times and numbers of blocks go on from one to the next.
        pause_s: In a stream of KV events, a request that has stored nothing for so long has ended.

    Raises:
        ConfigError: One of them cannot be.
    """

    block_tokens: int | None = None
    seed: int = 0
    session_span_s: float = 3 * 3600.0
    tokenizer: str | Tokenizer | None = None
    interval_s: float = 1.0
    pause_s: float = 5.0
    continued: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ConfigError("block_tokens", self.block_tokens, "give a whole number of tokens from 1 up")
        for setting in ("session_span_s", "interval_s", "pause_s"):
            value = getattr(self, setting)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(setting, value, "give seconds from 0 up")

    def step(self, block_tokens: int) -> int:
        """Say how many blocks of a trace become one.

        Raises:
            ConfigError: They do not divide what was asked for.
        """
        if self.block_tokens is None:
            return 1
        if self.block_tokens % block_tokens:
            hint = f"give a multiple of {block_tokens}, the tokens of a block in this trace"
            raise ConfigError("block_tokens", self.block_tokens, hint)
        return self.block_tokens // block_tokens
