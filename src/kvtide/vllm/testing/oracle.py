"""What every byte of the device has to be, and whether it is.

Judges bytes against tokens, and nothing else: it knows neither the connector nor its books, and imports
nothing of what decides (a contract in ``pyproject.toml``).
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvtide.vllm.testing.contents import Cached, Contents, Loaded, ReplayContents, RingContents, TokenContents
from kvtide.vllm.testing.demands import Demanded, Span
from kvtide.vllm.testing.drafts import DraftContents
from kvtide.vllm.testing.groups import Kind
from kvtide.vllm.testing.memory import DeviceMemory
from kvtide.vllm.testing.states import StateContents


class Oracle:
    """Writes and judges KV.

    Args:
        memory: The device, all ranks.
        spare_tokens: Tokens after the last one of a request that a step may run to: with asynchronous
            scheduling, or guesses.

    Attributes:
        loaded_words: Words looked at after loads, per kind of group.
    """

    def __init__(self, memory: DeviceMemory, spare_tokens: int = 2) -> None:
        self._draw = np.random.default_rng(8)
        self._contents = [_contents(memory, index) for index in range(len(memory.groups))]
        self.load_weights(0)
        self._spare_tokens = spare_tokens
        self._requests: dict[str, Demanded] = {}
        self._by_hash: dict[bytes, tuple[Demanded, int]] = {}
        self.loaded_words: Counter[str] = Counter()

    # -- what is demanded -----------------------------------------------------------------------------

    def expect(self, request_id: str, prompt: Sequence[int], max_tokens: int, identity: str = "") -> Demanded:
        """Work out a request that is about to be asked."""
        demanded = Demanded.of(prompt, max_tokens + self._spare_tokens, identity)
        self._requests[request_id] = demanded
        return demanded

    def demanded(self, request_id: str) -> Demanded:
        """Look up a request."""
        return self._requests[request_id]

    def new_weights(self) -> None:
        """From now on everything is computed with other weights; what was before is wrong."""
        for contents in self._contents:
            contents.draw_weights(self._draw)

    def load_weights(self, version: int) -> None:
        """Compute with the weights of a file from now on: what was before is right if they are the same."""
        draw = np.random.default_rng((7, version))
        for contents in self._contents:
            contents.draw_weights(draw)

    def forget(self) -> None:
        """Forget all requests; what hashes stand for is known for ever."""
        self._requests.clear()

    # -- a forward ------------------------------------------------------------------------------------

    def write(self, spans: Sequence[Span]) -> None:
        """Compute: every rank and layer continues what is there and writes the tokens of these spans.

        Raises:
            WrongBytesError: A state that is continued is not what its prefix demands.
        """
        for contents in self._contents:
            contents.prepare(spans)
        for contents in self._contents:
            contents.write(spans)

    def read(self, spans: Sequence[Span]) -> None:
        """Attend: every rank and layer reads what its queries see, up to the end of these spans.

        Raises:
            WrongBytesError: Something of it is not what its prefix demands.
        """
        for contents in self._contents:
            contents.read(spans)

    def settle(self, spans: Sequence[Span]) -> None:
        """Do what follows once tokens are sampled: move states, run a drafter.

        Raises:
            WrongBytesError: Something that a drafter reads is not what its prefix demands.
        """
        for contents in self._contents:
            contents.settle(spans)

    # -- loads ----------------------------------------------------------------------------------------

    def write_loaded(self, rank: int, request_id: str, tables: Sequence[np.ndarray], tokens: range) -> None:
        """Write what somebody else brings to one rank; ``tables``: ids of blocks per group."""
        for contents, table in zip(self._contents, tables, strict=True):
            contents.write_loaded(rank, self._requests[request_id], table, tokens)

    def check_loaded(
        self,
        rank: int,
        request_id: str,
        tables: Sequence[np.ndarray],
        end: int,
        local_tokens: Sequence[int],
    ) -> None:
        """Check what a rank has just said to be there.

        Args:
            rank: Which rank.
            request_id: For whom.
            tables: Ids of its blocks per group.
            end: Tokens it has now.
            local_tokens: So many of them the engine had itself, per group.

        Raises:
            WrongBytesError: One of the tokens that a query at ``end`` sees is not.
        """
        demanded = self._requests[request_id]
        for contents, table, local in zip(self._contents, tables, local_tokens, strict=True):
            count = contents.check_loaded(Loaded(rank, request_id, demanded, table, end, local))
            self.loaded_words[contents.group.kind.value] += count

    # -- the engine's own cache -----------------------------------------------------------------------

    def note_hashes(self, request_id: str, block_hashes: Sequence[bytes], tokens_per_hash: int) -> None:
        """Remember what the engine's block hashes of a request stand for."""
        demanded = self._requests[request_id]
        for index, block_hash in enumerate(block_hashes):
            self._by_hash[block_hash] = demanded, (index + 1) * tokens_per_hash

    def knows(self, block_hash: bytes) -> bool:
        """Whether a hash is of a request that was asked."""
        return block_hash in self._by_hash

    def check_cached(
        self, group_index: int, cached: Iterable[tuple[bytes, int]], tokens_before: int = 0
    ) -> int:
        """Check blocks that are given to whoever asks for their hash.

        Args:
            group_index: Whose blocks.
            cached: Hashes, and the block of each.
            tokens_before: So many tokens before the end of what a hash stands for a block ends.

        Returns:
            Blocks looked at; those whose hash was never noted are not.

        Raises:
            WrongBytesError: A block does not hold what its hash stands for.
        """
        known = [
            Cached(block, prefix[0], prefix[1] - tokens_before, tokens_before)
            for block_hash, block in cached
            if (prefix := self._by_hash.get(block_hash)) is not None
        ]
        if known:
            self._contents[group_index].check_cached(known)
        return len(known)


def _contents(memory: DeviceMemory, group_index: int) -> Contents:
    group = memory.groups[group_index]
    if group.draft:
        return DraftContents(memory, group_index)
    kinds: dict[Kind, type[Contents]] = {
        Kind.MAMBA: StateContents,
        Kind.RING: RingContents,
        Kind.REPLAY: ReplayContents,
    }
    return kinds.get(group.kind, TokenContents)(memory, group_index)
