"""What every byte of the device has to be, and whether it is.

Judges bytes against tokens, and nothing else: it knows neither the connector nor its books, and imports
nothing of what decides (a contract in ``pyproject.toml``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.vllm.testing.memory import DeviceMemory
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.promises import WrongBytesError


@dataclass(frozen=True, slots=True)
class Demanded:
    """A request, as a run without any cache computes it.

    Attributes:
        tokens: Prompt and all that is generated.
        prompt_tokens: How many of them are the prompt.
        states: ``uint64[len(tokens)]``.
    """

    tokens: list[int]
    prompt_tokens: int
    states: np.ndarray


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one request that a forward computes.

    Attributes:
        request_id: Of the request.
        begin: First token that is computed.
        end: One past the last one.
        places: Per group, ``int64[>= end]``: where each token's KV is.
    """

    request_id: str
    begin: int
    end: int
    places: Sequence[np.ndarray]


class Oracle:
    """Writes and judges KV.

    Args:
        memory: The device, all ranks.
    """

    SPARE = 2
    """Tokens after the last one: with asynchronous scheduling a step may run past the end."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        # Group, layer and shard each change every word.
        draw = np.random.default_rng(7)
        ranks = len(memory.kv_caches)
        self._marks = [
            draw.integers(1, 1 << 62, (ranks, len(group.layer_names), 1), dtype=np.uint64)
            for group in memory.groups
        ]
        self._requests: dict[str, Demanded] = {}
        self._by_hash: dict[bytes, np.ndarray] = {}

    # -- what is demanded -----------------------------------------------------------------------------

    def expect(self, request_id: str, prompt: Sequence[int], max_tokens: int, identity: str = "") -> Demanded:
        """Work out a request that is about to be asked."""
        tokens, states = PatternModel.run(prompt, max_tokens + self.SPARE, identity)
        self._requests[request_id] = Demanded(tokens, len(prompt), states)
        return self._requests[request_id]

    def demanded(self, request_id: str) -> Demanded:
        """Look up a request."""
        return self._requests[request_id]

    def forget(self) -> None:
        """Forget all requests and hashes."""
        self._requests.clear()
        self._by_hash.clear()

    # -- a forward ------------------------------------------------------------------------------------

    def write(self, spans: Sequence[Span]) -> None:
        """Compute: every rank and layer writes the tokens of these spans."""
        for group_index, marks in enumerate(self._marks):
            places = np.concatenate([span.places[group_index][span.begin : span.end] for span in spans])
            states = np.concatenate(
                [self._requests[span.request_id].states[span.begin : span.end] for span in spans]
            )
            self._memory.write(group_index, places, states ^ marks)

    def read(self, spans: Sequence[Span]) -> None:
        """Attend: every rank and layer reads what its queries see, up to the end of these spans.

        Raises:
            WrongBytesError: Something of it is not what its prefix demands.
        """
        for group_index, (group, marks) in enumerate(zip(self._memory.groups, self._marks, strict=True)):
            seen = [(span, group.first_read(span.begin)) for span in spans]
            places = np.concatenate([span.places[group_index][begin : span.end] for span, begin in seen])
            states = np.concatenate(
                [self._requests[span.request_id].states[begin : span.end] for span, begin in seen]
            )
            found = self._memory.read(group_index, places)
            if not np.array_equal(found, states ^ marks):
                self._complain(group_index, seen, found, states ^ marks)

    # -- loads ----------------------------------------------------------------------------------------

    def write_loaded(self, rank: int, request_id: str, places: Sequence[np.ndarray], tokens: range) -> None:
        """Write what somebody else brings to one rank."""
        states = self._requests[request_id].states[tokens.start : tokens.stop]
        for group_index, marks in enumerate(self._marks):
            at = places[group_index][tokens.start : tokens.stop]
            self._memory.write_rank(rank, group_index, at, states ^ marks[rank])

    def check_loaded(self, rank: int, request_id: str, places: Sequence[np.ndarray], end: int) -> None:
        """Check what a rank has just said to be there.

        Raises:
            WrongBytesError: One of the tokens that a query at ``end`` sees is not.
        """
        for group_index, (group, marks) in enumerate(zip(self._memory.groups, self._marks, strict=True)):
            begin = group.first_read(end)
            states = self._requests[request_id].states[begin:end]
            found = self._memory.read_rank(rank, group_index, places[group_index][begin:end])
            wrong = np.argwhere(found != states ^ marks[rank])
            if len(wrong):
                layer, token = wrong[0]
                raise WrongBytesError(
                    f"{request_id}: loaded {end} tokens, rank {rank}, group {group_index}, layer {layer},"
                    f" token {begin + token} and {len(wrong) - 1} more"
                )

    # -- the engine's own cache -----------------------------------------------------------------------

    def note_hashes(self, request_id: str, block_hashes: Sequence[bytes], tokens_per_hash: int) -> None:
        """Remember what the engine's block hashes of a request stand for."""
        states = self._requests[request_id].states
        for index, block_hash in enumerate(block_hashes):
            begin = index * tokens_per_hash
            self._by_hash[block_hash] = states[begin : begin + tokens_per_hash]

    def check_cached(self, group_index: int, cached: Mapping[int, bytes]) -> int:
        """Check blocks that the engine would give to whoever asks for their hash.

        Args:
            group_index: Whose blocks.
            cached: Hash of each block.

        Returns:
            Blocks looked at; those of requests that were forgotten are not.

        Raises:
            WrongBytesError: A block does not hold what its hash stands for.
        """
        known = {
            block: states for block, name in cached.items() if (states := self._by_hash.get(name)) is not None
        }
        if not known:
            return 0
        tokens = self._memory.groups[group_index].tokens_per_block
        places = (np.array(list(known))[:, None] * tokens + np.arange(tokens)).ravel()
        found = self._memory.read(group_index, places)
        wrong = np.argwhere(found != np.concatenate(list(known.values())) ^ self._marks[group_index])
        if len(wrong):
            rank, layer, at = wrong[0]
            raise WrongBytesError(
                f"cached block {places[at] // tokens}, rank {rank}, layer {layer},"
                f" token {places[at] % tokens} and {len(wrong) - 1} more words"
            )
        return len(known)

    def _complain(
        self, group_index: int, seen: Sequence[tuple[Span, int]], found: np.ndarray, demanded: np.ndarray
    ) -> None:
        wrong = np.argwhere(found != demanded)
        rank, layer, at = wrong[0]
        tokens = self._memory.groups[group_index].tokens_per_block
        for span, begin in seen:
            if at < span.end - begin:
                break
            at -= span.end - begin
        raise WrongBytesError(
            f"{span.request_id}: token {begin + at}, block {span.places[group_index][begin + at] // tokens},"
            f" rank {rank}, group {group_index}, layer {layer} and {len(wrong) - 1} more words;"
            f" computing {span.begin} to {span.end}"
        )
