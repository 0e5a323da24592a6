"""A model that can tell when its KV cache is wrong.

Writes into each token's place in a block what the whole prefix up to it demands, and reads it back before
every forward. Judges bytes; knows nothing of the connector, its books or its jobs.
"""

from collections.abc import Sequence

import torch

_MULTIPLIER = 6364136223846793005
_MASK = (1 << 62) - 1


class WrongBytesError(AssertionError):
    """A forward was about to read bytes that its prefix does not demand."""


class PatternModel:
    """One full-attention group whose KV of a token is a number derived from all tokens up to it.

    Attributes:
        kv_caches: Per layer ``int64[num_blocks, 1, tokens_per_block, 1]``, views of one storage.
    """

    VOCABULARY = 97

    def __init__(self, layer_names: Sequence[str], num_blocks: int, tokens_per_block: int, block_first: bool):
        self.tokens_per_block = tokens_per_block
        layers = len(layer_names)
        if block_first:
            storage = torch.zeros(num_blocks, layers, 1, tokens_per_block, 1, dtype=torch.int64)
            views = [storage[:, layer] for layer in range(layers)]
        else:
            storage = torch.zeros(layers, num_blocks, 1, tokens_per_block, 1, dtype=torch.int64)
            views = list(storage)
        self.kv_caches = dict(zip(layer_names, views, strict=True))

    def forward(self, tokens: Sequence[int], begin: int, end: int, block_ids: Sequence[int], who: str) -> int:
        """Compute ``tokens[begin:end]`` on top of what the blocks hold for the tokens before.

        Returns:
            The next token.

        Raises:
            WrongBytesError: A block does not hold what the tokens before ``begin`` demand.
        """
        demanded = self._prefix_states(tokens[:end])
        for layer_index, (name, cache) in enumerate(self.kv_caches.items()):
            for position, state in enumerate(demanded):
                block_id = block_ids[position // self.tokens_per_block]
                place = cache[block_id, 0, position % self.tokens_per_block]
                if position >= begin:
                    place[0] = state + layer_index
                elif int(place[0]) != state + layer_index:
                    raise WrongBytesError(f"{who}: token {position}, block {block_id}, layer {name}")
        return demanded[-1] % self.VOCABULARY

    @classmethod
    def answer(cls, prompt: Sequence[int], count: int) -> list[int]:
        """What a run without any cache would generate."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(cls._prefix_states(tokens)[-1] % cls.VOCABULARY)
        return tokens[len(prompt) :]

    @staticmethod
    def _prefix_states(tokens: Sequence[int]) -> list[int]:
        state, states = 1, []
        for token in tokens:
            state = (state * _MULTIPLIER + token + 1) & _MASK
            states.append(state)
        return states
