"""What a request demands of its KV, and which of its tokens a forward computes.

Values only; does not know memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.vllm.testing.model import PatternModel

NEXT_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Demanded:
    """A request, as a run without any cache computes it.

    Attributes:
        tokens: Prompt and all that is generated.
        prompt_tokens: How many of them are the prompt.
        states: ``uint64[len(tokens)]``: determined by all tokens up to each.
        drafted: ``uint64[len(tokens) - 1]``: determined by the token after it as well.
    """

    tokens: list[int]
    prompt_tokens: int
    states: np.ndarray
    drafted: np.ndarray

    @classmethod
    def of(cls, prompt: Sequence[int], count: int, identity: str = "") -> "Demanded":
        """Run the model on a prompt and ``count`` tokens more."""
        tokens, states = PatternModel.run(prompt, count, identity)
        drafted = states[:-1] * NEXT_FACTOR + np.array(tokens[1:], dtype=np.uint64)
        return cls(tokens, len(prompt), states, drafted)


def follows_some_token(words: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Say of words of a drafter whether each is right for some next token, if not for the one that came."""
    is_token: np.ndarray = words - states * NEXT_FACTOR < PatternModel.VOCABULARY
    return is_token


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one request that a forward computes.

    Attributes:
        demanded: The request.
        request_id: Its name.
        admitted: First token that was computed since it was admitted.
        begin: First token that is computed.
        end: One past the last one, guesses of a drafter included.
        kept: One past the last one that is right: guesses behind it were wrong.
        guesses: How many of the tokens are guesses.
        tables: Per group, ``int64[blocks]``: ids of its blocks.
        state_column: Where in a table recurrent layers left their states in the step before; None if they
            have computed nothing of it since it was admitted.
        state_offset: How many blocks behind it the one is that is continued.
        checkpoint: Tokens after which recurrent layers leave their state beside that at the end, and in which
            block of a table; None for nothing.
    """

    demanded: Demanded
    request_id: str
    admitted: int
    begin: int
    end: int
    kept: int
    guesses: int
    tables: Sequence[np.ndarray]
    state_column: int | None = None
    state_offset: int = 0
    checkpoint: tuple[int, int] | None = None
