"""What the layers of each kind of group read and write in a forward, and what their blocks have to hold.

Judges bytes against what requests demand; knows neither the connector nor its books.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.vllm.testing.demands import Demanded, Span, follows_some_token
from kvtide.vllm.testing.groups import LATENT, GroupShape, Kind
from kvtide.vllm.testing.memory import DeviceMemory
from kvtide.vllm.testing.promises import WrongBytesError

WRONG = np.uint64(0xBAD)
"""What a guess that was wrong leaves behind differs from what is right by this."""


def contents_of(memory: DeviceMemory, group_index: int, draw: np.random.Generator) -> "Contents":
    """What a group of a device holds."""
    group = memory.groups[group_index]
    ranks = 1 if group.kind in LATENT else memory.rank_count
    marks = draw.integers(1, 1 << 62, (ranks, memory.lane_count(group_index), 1), dtype=np.uint64)
    kind: type[Contents] = TokenContents
    if group.kind is Kind.MAMBA:
        kind = StateContents
    elif group.kind is Kind.RING:
        kind = RingContents
    elif group.draft:
        kind = DraftContents
    return kind(memory, group_index, np.broadcast_to(marks, (memory.rank_count, *marks.shape[1:])))


class Cached(NamedTuple):
    """A block that the engine's own cache offers.

    Attributes:
        block: Its id.
        demanded: A request of whose prefix it is the end.
        end: Tokens of that prefix.
    """

    block: int
    demanded: Demanded
    end: int


class Contents(ABC):
    """What one group holds.

    Args:
        memory: The device, all ranks.
        group_index: Which group.
        marks: ``uint64[ranks, lanes, 1]``: differs in every layer and rank.
    """

    def __init__(self, memory: DeviceMemory, group_index: int, marks: np.ndarray) -> None:
        self.memory = memory
        self.group_index = group_index
        self.group: GroupShape = memory.groups[group_index]
        self.marks = marks

    def prepare(self, spans: Sequence[Span]) -> None:
        """Bring states to where this step continues them, and check them."""

    @abstractmethod
    def write(self, spans: Sequence[Span]) -> None:
        """Compute: every rank and layer writes the tokens of these spans."""

    def settle(self, spans: Sequence[Span]) -> None:
        """Do what follows once it is known which guesses were right."""

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> None:
        """Check what queries of these spans see, on every rank and in every layer."""

    @abstractmethod
    def check_loaded(self, rank: int, request: str, demanded: Demanded, table: np.ndarray, end: int) -> int:
        """Check what a rank says to have brought, for a query at ``end``; returns the words looked at."""

    @abstractmethod
    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        """Write what somebody else brings to one rank."""

    @abstractmethod
    def check_cached(self, cached: Sequence[Cached]) -> None:
        """Check blocks that are offered to whoever asks for what they hold."""

    def compare(self, found: np.ndarray, words: np.ndarray, ranks: slice, what: str) -> None:
        """Compare ``uint64[ranks, lanes, places]`` with what the places demand.

        Raises:
            WrongBytesError: They differ.
        """
        demanded = words ^ self.marks[ranks]
        if not np.array_equal(found, demanded):
            wrong = np.argwhere(found != demanded)
            rank, lane, at = wrong[0]
            raise WrongBytesError(
                f"{what}: {self.group.kind.value}, group {self.group_index}, rank"
                f" {range(self.memory.rank_count)[ranks][rank]}, lane {lane}, place {at} and"
                f" {len(wrong) - 1} more words"
            )


class TokenContents(Contents):
    """Attention: a word for every token, which queries see as far back as they look."""

    def write(self, spans: Sequence[Span]) -> None:
        for shard, ranks in enumerate(self.group.shards()):
            places, words = [], []
            for span in spans:
                tokens = self.group.tokens_of(shard, span.begin, span.end)
                of_span = span.demanded.states[tokens]
                if span.kept < span.end:
                    of_span = np.where(tokens < span.kept, of_span, of_span ^ WRONG)
                places.append(self.group.places(span.tables[self.group_index], tokens))
                words.append(of_span)
            self.memory.write(
                self.group_index, np.concatenate(places), np.concatenate(words) ^ self.marks[ranks], ranks
            )

    def read(self, spans: Sequence[Span]) -> None:
        for shard, ranks in enumerate(self.group.shards()):
            places, words = [], []
            for span in spans:
                tokens = self.group.tokens_of(shard, self.group.first_read(span.begin), span.kept)
                places.append(self.group.places(span.tables[self.group_index], tokens))
                words.append(span.demanded.states[tokens])
            found = self.memory.read(self.group_index, np.concatenate(places), ranks)
            if not np.array_equal(found, np.concatenate(words) ^ self.marks[ranks]):
                self._complain(spans, shard, ranks)

    def check_loaded(self, rank: int, request: str, demanded: Demanded, table: np.ndarray, end: int) -> int:
        tokens = self.group.tokens_of(self.group.shard_of(rank), self.group.first_read(end), end)
        ranks = slice(rank, rank + 1)
        found = self.memory.read(self.group_index, self.group.places(table, tokens), ranks)
        self.compare(found, demanded.states[tokens], ranks, f"{request}: loaded {end} tokens")
        return found.size

    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        mine = self.group.tokens_of(self.group.shard_of(rank), tokens.start, tokens.stop)
        ranks = slice(rank, rank + 1)
        words = self.words(demanded)[mine] ^ self.marks[ranks]
        self.memory.write(self.group_index, self.group.places(table, mine), words, ranks)

    def check_cached(self, cached: Sequence[Cached]) -> None:
        for shard, ranks in enumerate(self.group.shards()):
            places, words = [], []
            for block, demanded, end in cached:
                begin = (end - 1) // self.group.block_tokens * self.group.block_tokens
                tokens = self.group.tokens_of(shard, begin, self.determined(end))
                first = block * self.group.slots_per_block
                places.append(np.arange(first, first + len(tokens)))
                words.append(self.words(demanded)[tokens])
            found = self.memory.read(self.group_index, np.concatenate(places), ranks)
            self.compare(found, np.concatenate(words), ranks, f"{len(cached)} cached blocks")

    def words(self, demanded: Demanded) -> np.ndarray:
        """What a request demands, token by token."""
        return demanded.states

    def determined(self, end: int) -> int:
        """How many of ``end`` tokens are determined by the hash of their prefix."""
        return end

    def _complain(self, spans: Sequence[Span], shard: int, ranks: slice) -> None:
        for span in spans:
            tokens = self.group.tokens_of(shard, self.group.first_read(span.begin), span.kept)
            table = span.tables[self.group_index]
            found = self.memory.read(self.group_index, self.group.places(table, tokens), ranks)
            wrong = np.argwhere((found != span.demanded.states[tokens] ^ self.marks[ranks]).any((0, 1)))
            if len(wrong):
                token = int(tokens[wrong[0][0]])
                self.compare(
                    found,
                    span.demanded.states[tokens],
                    ranks,
                    f"{span.request_id}: token {token}, block {table[token // self.group.block_tokens]},"
                    f" computing {span.begin} to {span.end}",
                )


class RingContents(TokenContents):
    """A ring of tokens: those since the last multiple of what it collects, in one block."""

    def prepare(self, spans: Sequence[Span]) -> None:
        for span in spans:
            tokens = np.arange(self.group.first_read(span.begin), span.begin)
            found = self.memory.read(self.group_index, self._places(span, tokens))
            self.compare(found, span.demanded.states[tokens], slice(None), f"{span.request_id}: ring")

    def write(self, spans: Sequence[Span]) -> None:
        for span in spans:
            tokens = np.arange(max(span.begin, span.end - self.group.tokens_per_block), span.end)
            words = span.demanded.states[tokens]
            words = np.where(tokens < span.kept, words, words ^ WRONG)
            self.memory.write(self.group_index, self._places(span, tokens), words ^ self.marks)

    def read(self, spans: Sequence[Span]) -> None:
        for span in spans:
            tokens = np.arange(self.group.first_read(span.kept), span.kept)
            found = self.memory.read(self.group_index, self._places(span, tokens))
            self.compare(found, span.demanded.states[tokens], slice(None), f"{span.request_id}: ring")

    def check_loaded(self, rank: int, request: str, demanded: Demanded, table: np.ndarray, end: int) -> int:
        return 0

    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        """Do nothing: what is brought ends where a ring is empty."""

    def check_cached(self, cached: Sequence[Cached]) -> None:
        raise WrongBytesError(f"blocks {[one.block for one in cached]} of a ring are offered to others")

    def _places(self, span: Span, tokens: np.ndarray) -> np.ndarray:
        (block,) = span.tables[self.group_index]
        places: np.ndarray = block * self.group.slots_per_block + tokens % self.group.tokens_per_block
        return places


class DraftContents(TokenContents):
    """Attention of a drafter, which is fed the token after each: written when that is known.

    The last token of a block is not determined by the block's hash. What the engine's own cache serves of it
    may be of another continuation; that costs guesses, and is none of ours.
    """

    def __init__(self, memory: DeviceMemory, group_index: int, marks: np.ndarray) -> None:
        super().__init__(memory, group_index, marks)
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

    def check_loaded(self, rank: int, request: str, demanded: Demanded, table: np.ndarray, end: int) -> int:
        tokens = self.group.tokens_of(self.group.shard_of(rank), self.group.first_read(end), end)
        ranks = slice(rank, rank + 1)
        found = self.memory.read(self.group_index, self.group.places(table, tokens), ranks)
        right = found ^ self.marks[ranks] == demanded.drafted[tokens]
        known = np.isin(found[0, 0] ^ self.marks[rank, 0], list(self._of_others))
        if not (right | known).all():
            self.compare(found, demanded.drafted[tokens], ranks, f"{request}: loaded {end} tokens of a drafter")
        return found.size

    def words(self, demanded: Demanded) -> np.ndarray:
        return demanded.drafted

    def determined(self, end: int) -> int:
        return end - 1

    def _check(self, request: str, demanded: Demanded, table: np.ndarray, begin: int, end: int) -> None:
        for shard, ranks in enumerate(self.group.shards()):
            tokens = self.group.tokens_of(shard, self.group.first_read(begin), end)
            found = self.memory.read(self.group_index, self.group.places(table, tokens), ranks)
            words = found ^ self.marks[ranks]
            wrong = words != demanded.drafted[tokens]
            if not wrong.any():
                continue
            last = (tokens + 1) % self.group.block_tokens == 0
            other = last & (tokens < begin) & follows_some_token(words, demanded.states[tokens]) & (words == words[:1, :1])
            if (wrong & ~other).any():
                self.compare(found, demanded.drafted[tokens], ranks, f"{request}: drafting from {begin} to {end}")
            self._of_others.update(words[0, 0][wrong.any((0, 1))].tolist())


class StateContents(Contents):
    """Recurrent layers: a block holds the state after a token, moved along as vLLM's runners do ("align").

    The state after the last token of a step is left in the block in which that token is; with guesses, the
    states after each of them in the blocks behind it, until it is known which were right.
    """

    def prepare(self, spans: Sequence[Span]) -> None:
        continued = [span for span in spans if span.begin]
        if not continued:
            return
        sources = np.array([self._source(span) for span in continued])
        targets = np.array([self._target(span) for span in continued])
        # All are read before the first is written, as in the runners.
        self.memory.write(self.group_index, targets, self.memory.read(self.group_index, sources))
        states = np.array([span.demanded.states[span.begin - 1] for span in continued])
        self._check(continued, targets, states, "state continued")

    def write(self, spans: Sequence[Span]) -> None:
        blocks, states, right = self._left(spans)
        words = np.where(right, states, states ^ WRONG)
        self.memory.write(self.group_index, blocks, words ^ self.marks)

    def read(self, spans: Sequence[Span]) -> None:
        blocks, states, right = self._left(spans)
        found = self.memory.read(self.group_index, blocks[right])
        names = ", ".join(span.request_id for span in spans)
        self.compare(found, states[right], slice(None), f"{names}: states left")

    def settle(self, spans: Sequence[Span]) -> None:
        for span in spans:
            # Of several guesses a boundary may have been passed: its state goes where it is looked for.
            boundary = span.kept - span.kept % self.group.tokens_per_block
            certain = span.end - span.guesses
            if span.guesses and boundary >= certain:
                table = span.tables[self.group_index]
                source = self.group.column(span.end) + boundary - certain
                state = self.memory.read(self.group_index, table[source : source + 1])
                target = self.group.column(boundary)
                self.memory.write(self.group_index, table[target : target + 1], state)

    def check_loaded(self, rank: int, request: str, demanded: Demanded, table: np.ndarray, end: int) -> int:
        at = self.group.column(end)
        ranks = slice(rank, rank + 1)
        found = self.memory.read(self.group_index, table[at : at + 1], ranks)
        self.compare(found, demanded.states[end - 1 : end], ranks, f"{request}: loaded {end} tokens")
        return found.size

    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        at = self.group.column(tokens.stop)
        ranks = slice(rank, rank + 1)
        words = demanded.states[tokens.stop - 1 : tokens.stop] ^ self.marks[ranks]
        self.memory.write(self.group_index, table[at : at + 1], words, ranks)

    def check_cached(self, cached: Sequence[Cached]) -> None:
        blocks = np.array([one.block for one in cached])
        states = np.array([one.demanded.states[one.end - 1] for one in cached])
        what = f"cached states in blocks {blocks} after {[one.end for one in cached]} tokens"
        self.compare(self.memory.read(self.group_index, blocks), states, slice(None), what)

    def _source(self, span: Span) -> int:
        """Name the block in which the state after the tokens before this step was left."""
        column = span.state_column if span.state_column is not None else self.group.column(span.begin)
        return int(span.tables[self.group_index][column + span.state_offset])

    def _target(self, span: Span) -> int:
        """Name the block in which this step continues it: where it is, within one block."""
        column = span.state_column if span.state_column is not None else self.group.column(span.begin)
        last = self.group.column(span.end)
        return self._source(span) if last == column else int(span.tables[self.group_index][last])

    def _left(self, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """List blocks that this step leaves states in, those states, and which of them are right."""
        blocks, states, right = [], [], []
        for span in spans:
            first, certain = self.group.column(span.end), span.end - span.guesses
            blocks.append(span.tables[self.group_index][first : first + span.guesses + 1])
            states.append(span.demanded.states[certain - 1 : span.end])
            right.append(np.arange(certain, span.end + 1) <= span.kept)
        return np.concatenate(blocks), np.concatenate(states), np.concatenate(right)

    def _check(self, spans: Sequence[Span], blocks: np.ndarray, states: np.ndarray, what: str) -> None:
        found = self.memory.read(self.group_index, blocks)
        if np.array_equal(found, states ^ self.marks):
            return
        for index, span in enumerate(spans):
            named = f"{span.request_id}: {what} after {span.begin} of {span.end}, block {blocks[index]}"
            self.compare(found[..., index : index + 1], states[index : index + 1], slice(None), named)
