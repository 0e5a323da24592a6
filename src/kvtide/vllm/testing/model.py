"""A model whose KV of a token is a number derived from everything that determines it.

Knows tokens; does not know blocks, bytes or who looks.
"""

import zlib
from collections.abc import Sequence

import numpy as np

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 62) - 1


class PatternModel:
    """Every token's state depends on all tokens up to it, on the adapter and on the cache salt.

    The salt does not change what a model computes; here it does, so that a prefix which crosses from one
    salt to another is seen.
    """

    VOCABULARY = 97

    @classmethod
    def run(cls, prompt: Sequence[int], count: int, identity: str = "") -> tuple[list[int], np.ndarray]:
        """Generate ``count`` tokens without any cache.

        Returns:
            Prompt and generated tokens, and ``uint64[len(prompt) + count]``: their states.
        """
        tokens, states = list(prompt), []
        state = zlib.crc32(identity.encode()) + 1 if identity else 1
        for index in range(len(prompt) + count):
            if index == len(tokens):
                tokens.append(state % cls.VOCABULARY)
            state = (state * _MULTIPLIER + tokens[index] + 1) & _MASK
            states.append(state)
        return tokens, np.array(states, dtype=np.uint64)

    @classmethod
    def answer(cls, prompt: Sequence[int], count: int, identity: str = "") -> list[int]:
        """What a run without any cache would generate."""
        return cls.run(prompt, count, identity)[0][len(prompt) :]
