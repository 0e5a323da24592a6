"""How far a prompt that was stored has to be brought back, and how many chunks that takes.

Knows groups, blocks and chunks as an engine under test has them. Does not know what the connector keeps.
"""

import math

from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.shape import EngineShape


class Reach:
    """What an engine has to hit, were there room for everything.

    Args:
        shape: Of the engine.
        hash_tokens: Tokens of a block hash.

    Attributes:
        interval_tokens: Tokens between the points at which every group can continue.
        one_prefix: Whether all that is stored is a prefix, and part of it is of use.
    """

    def __init__(self, shape: EngineShape, hash_tokens: int) -> None:
        self._shape = shape
        self._hash_tokens = hash_tokens
        self._kept = [group for group in shape.groups if group.offloaded]
        self.interval_tokens = math.lcm(shape.tokens_per_block, *map(self._chunk_tokens, self._kept))
        replayed = [group.window_tokens for group in shape.groups if group.kind is Kind.REPLAY]
        self._replayed_tokens = max((tokens or 0 for tokens in replayed), default=0)
        self.one_prefix = len(self._kept) == 1 and self._kept[0].window_tokens is None
        self.one_prefix = self.one_prefix and self._kept[0].kind is not Kind.MAMBA

    def of_prompt(self, prompt_tokens: int) -> int:
        """Tokens of a prompt that come back when it is asked again."""
        # The last token is always computed; a drafter's KV wants to know the one after it.
        named = prompt_tokens // self._hash_tokens - self._shape.has_drafter
        most = min(prompt_tokens - 1, named * self._hash_tokens)
        if all(group.kind is not Kind.MAMBA for group in self._kept):
            reached = max(most, 0) // self.interval_tokens * self.interval_tokens
            # A hit that would be computed again in full is none.
            return reached if reached > self._replayed_tokens else 0
        # Of states only those are kept that a step leaves behind; one ends on the last block for certain.
        block = min(group.tokens_per_block for group in self._kept)
        kept = (
            prompt_tokens - (not self._shape.has_drafter)
        ) // block * block - block * self._shape.has_drafter
        return kept if 0 < kept <= most and kept % self.interval_tokens == 0 else 0

    def of_chunks(self, chunk_count: int) -> int:
        """Tokens at whose end a request can go on that so many chunks of one prefix hold."""
        tokens = chunk_count * self._chunk_tokens(self._kept[0])
        reached = tokens - tokens % self.interval_tokens
        return reached if reached > self._replayed_tokens else 0

    def chunks(self, token_count: int) -> int:
        """Chunks of all groups that so many tokens take at most."""
        return sum(token_count // self._chunk_tokens(group) for group in self._kept)

    def _chunk_tokens(self, group: GroupShape) -> int:
        whole = group.kind in (Kind.FULL, Kind.MLA)
        return group.block_tokens * (int(self._shape.settings.get("blocks_per_chunk", 1)) if whole else 1)
