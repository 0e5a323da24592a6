"""What the layers of a drafter read and write: its KV at a token depends on the next token too.

Judges bytes against what requests demand; knows neither the connector nor its books.
"""

from collections.abc import Sequence

import numpy as np

from kvtide.vllm.testing.contents import WRONG, Cached, Loaded, TokenContents
from kvtide.vllm.testing.demands import Demanded, Span, follows_some_token
from kvtide.vllm.testing.memory import DeviceMemory


class DraftContents(TokenContents):
    """Attention of a drafter, which is fed the token after each: written when that is known.

    The last token of a block is not determined by the block's hash. What the engine's own cache serves of it
    may be of another continuation; that costs guesses, and is none of ours.
    """

    def __init__(self, memory: DeviceMemory, group_index: int) -> None:
        super().__init__(memory, group_index)
        self._of_others: set[int] = set()

    def write(self, spans: Sequence[Span]) -> None:
        """Do nothing: the drafter runs after the model."""

    def read(self, spans: Sequence[Span]) -> None:
        """Do nothing: the drafter runs after the model."""

    def settle(self, spans: Sequence[Span]) -> None:
        for span in spans:
            table = span.tables[self.group_index]
            for shard, ranks in enumerate(self.group.shards()):
                tokens = self.group.tokens_of(shard, span.begin, span.kept)
                words = span.demanded.drafted[tokens] ^ self.marks[ranks]
                self.memory.write(self.group_index, self.group.places(table, tokens), words, ranks)
                # Guesses are fed to it too: what they leave is written again.
                ahead = min(span.kept + span.guesses, len(table) * self.group.block_tokens)
                tokens = self.group.tokens_of(shard, span.kept, ahead)
                words = np.full(len(tokens), WRONG) ^ self.marks[ranks]
                self.memory.write(self.group_index, self.group.places(table, tokens), words, ranks)
        for span in spans:
            self._check(span.request_id, span.demanded, span.tables[self.group_index], span.begin, span.kept)

    def check_loaded(self, loaded: Loaded) -> int:
        tokens, ranks, found = self.brought(loaded)
        # What the engine had itself may be of this very step, and the drafter has not run yet.
        mine = tokens >= loaded.local_tokens
        what = f"{loaded.request_id}: loaded {loaded.end} tokens of a drafter"
        nowhere = np.zeros(int(mine.sum()), dtype=bool)
        self._compare_drafted(found[..., mine], ranks, tokens[mine], loaded.demanded, nowhere, what)
        return int(found[..., mine].size)

    def check_cached(self, cached: Sequence[Cached]) -> None:
        for one in cached:
            begin = self.group.column(one.end) * self.group.block_tokens
            table = np.full(one.end // self.group.block_tokens + 1, one.block)
            for shard, ranks in enumerate(self.group.shards()):
                tokens = self.group.tokens_of(shard, begin, self.determined(one))
                found = self.memory.read(self.group_index, self.group.places(table, tokens), ranks)
                what = f"block {one.block} of a drafter after {one.end} tokens"
                self._compare_drafted(found, ranks, tokens, one.demanded, tokens < 0, what)

    def words(self, demanded: Demanded) -> np.ndarray:
        return demanded.drafted

    def determined(self, cached: Cached) -> int:
        return cached.end if cached.beyond else cached.end - 1

    def _check(self, request: str, demanded: Demanded, table: np.ndarray, begin: int, end: int) -> None:
        for shard, ranks in enumerate(self.group.shards()):
            tokens = self.group.tokens_of(shard, self.group.first_read(begin), end)
            found = self.memory.read(self.group_index, self.group.places(table, tokens), ranks)
            what = f"{request}: drafting from {begin} to {end}"
            self._compare_drafted(found, ranks, tokens, demanded, tokens < begin, what)

    def _compare_drafted(
        self,
        found: np.ndarray,
        ranks: slice,
        tokens: np.ndarray,
        demanded: Demanded,
        local: np.ndarray,
        what: str,
    ) -> None:
        words = found ^ self.marks[ranks]
        wrong = words != demanded.drafted[tokens]
        if not wrong.any():
            return
        # From the engine's own cache, or from host memory where that was stored.
        last = local & ((tokens + 1) % self.group.block_tokens == 0)
        other = last & follows_some_token(words, demanded.states[tokens])
        other |= np.isin(words, list(self._of_others))
        if (wrong & ~(other & (words == words[:1, :1]))).any():
            self.compare(found, demanded.drafted[tokens], ranks, what)
        self._of_others.update(words[0, 0][wrong[0, 0]].tolist())
