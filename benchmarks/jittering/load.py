"""Who asks for what: runners that generate steadily, and others whose prompts begin like earlier ones.

Knows prompts. The others take their beginnings in turn from a fixed set, so that how large the set is
decides where a beginning is found: of a few it is still in the engine's own cache, of many it has left
that and has to come from host memory.
"""

import numpy as np

from benchmarks.frame.registry import UnfitError
from benchmarks.jittering.vocabulary import (
    NEW_TOKENS,
    OTHER_EVERY_TOKENS,
    OTHER_TOKENS,
    OTHERS,
    RUNNER_PROMPT_TOKENS,
    RUNNER_TOKENS,
    RUNNERS,
    SHARED_TOKENS,
    Other,
    Turn,
)

SPECIAL_TOKENS = 1000  # ids below may mean something to a tokenizer; none is needed
FIRST_AT_TOKEN = 2


class Load:
    """Turns of one arm.

    Args:
        vocabulary: Token ids are below this.
        beginnings: How many different ones the others' prompts have.
        seed: The same seed asks the same.

    Raises:
        UnfitError: There are too few token ids to draw from.
    """

    def __init__(self, vocabulary: int, beginnings: int, seed: int) -> None:
        if vocabulary <= SPECIAL_TOKENS:
            raise UnfitError(
                f"the model has {vocabulary} token ids, and the first {SPECIAL_TOKENS} are left alone:"
                " give --model one with more"
            )
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._beginnings = [self._drawn(SHARED_TOKENS) for _ in range(beginnings)]
        self._next = 0

    def introduction(self) -> Turn:
        """Ask for every beginning once, so that it is known, one after another and with nobody else."""
        others = tuple(Other(0, 0, (*beginning, *self._drawn(1))) for beginning in self._beginnings)
        return Turn((), 0, others, 1)

    def turn(self) -> Turn:
        """Return the next turn; all turns are alike but for the tokens."""
        others = []
        for index in range(OTHERS):
            beginning = self._beginnings[self._next]
            self._next = (self._next + 1) % len(self._beginnings)
            at_token = FIRST_AT_TOKEN + index * OTHER_EVERY_TOKENS
            others.append(Other(at_token, SHARED_TOKENS, (*beginning, *self._drawn(NEW_TOKENS))))
        runners = tuple(self._drawn(RUNNER_PROMPT_TOKENS) for _ in range(RUNNERS))
        return Turn(runners, RUNNER_TOKENS, tuple(others), OTHER_TOKENS)

    def _drawn(self, count: int) -> tuple[int, ...]:
        # Of 32 drawn tokens no two runs are alike by chance: no block is a hit that should be none.
        return tuple(self._random.integers(SPECIAL_TOKENS, self._vocabulary, count).tolist())
