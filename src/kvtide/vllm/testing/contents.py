"""What the layers of each kind of group read and write in a forward, and what their blocks have to hold.

Judges bytes against what requests demand; knows neither the connector nor its books.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.vllm.testing.demands import Demanded, Span
from kvtide.vllm.testing.groups import LATENT, GroupShape
from kvtide.vllm.testing.memory import DeviceMemory
from kvtide.vllm.testing.promises import WrongBytesError

WRONG = np.uint64(0xBAD)
"""What a guess that was wrong leaves behind differs from what is right by this."""


class Cached(NamedTuple):
    """A block that the engine's own cache offers.

    Attributes:
        block: Its id.
        demanded: A request of whose prefix it is the end.
        end: Tokens of that prefix.
        beyond: Tokens after them that are certain as well.
    """

    block: int
    demanded: Demanded
    end: int
    beyond: int = 0


class Loaded(NamedTuple):
    """What a rank says to have brought.

    Attributes:
        rank: Which rank.
        request_id: For whom.
        demanded: The request.
        table: ``int64[blocks]``: ids of its blocks.
        end: Tokens it has now; what a query there sees has to be right.
        local_tokens: So many of them the engine had itself.
    """

    rank: int
    request_id: str
    demanded: Demanded
    table: np.ndarray
    end: int
    local_tokens: int


class Contents(ABC):
    """What one group holds.

    Args:
        memory: The device, all ranks.
        group_index: Which group.

    Attributes:
        marks: ``uint64[ranks, lanes, 1]``, the weights: different in every layer, and on every rank where
            each has a shard of its own.
    """

    marks: np.ndarray

    def __init__(self, memory: DeviceMemory, group_index: int) -> None:
        self.memory = memory
        self.group_index = group_index
        self.group: GroupShape = memory.groups[group_index]

    def draw_weights(self, draw: np.random.Generator) -> None:
        """Compute with other weights from now on; what was before is wrong."""
        ranks = 1 if self.group.kind in LATENT else self.memory.rank_count
        lanes = self.memory.lane_count(self.group_index)
        marks = draw.integers(1, 1 << 62, (ranks, lanes, 1), dtype=np.uint64)
        self.marks = np.broadcast_to(marks, (self.memory.rank_count, lanes, 1))

    @abstractmethod
    def prepare(self, spans: Sequence[Span]) -> None:
        """Bring to its place what this step continues, and check it."""

    @abstractmethod
    def write(self, spans: Sequence[Span]) -> None:
        """Compute: every rank and layer writes the tokens of these spans."""

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> None:
        """Check what queries of these spans see, on every rank and in every layer."""

    @abstractmethod
    def settle(self, spans: Sequence[Span]) -> None:
        """Do what follows once it is known which guesses were right."""

    @abstractmethod
    def check_loaded(self, loaded: Loaded) -> int:
        """Check what a rank says to have brought; returns the words looked at."""

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

    def prepare(self, spans: Sequence[Span]) -> None:
        """Do nothing: what is there stays where it is."""

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

    def settle(self, spans: Sequence[Span]) -> None:
        """Do nothing: what a wrong guess left is written again."""

    def check_loaded(self, loaded: Loaded) -> int:
        tokens, ranks, found = self.brought(loaded)
        what = f"{loaded.request_id}: loaded {loaded.end} tokens"
        self.compare(found, loaded.demanded.states[tokens], ranks, what)
        return found.size

    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        mine = self.group.tokens_of(self.group.shard_of(rank), tokens.start, tokens.stop)
        ranks = slice(rank, rank + 1)
        words = self.words(demanded)[mine] ^ self.marks[ranks]
        self.memory.write(self.group_index, self.group.places(table, mine), words, ranks)

    def check_cached(self, cached: Sequence[Cached]) -> None:
        for shard, ranks in enumerate(self.group.shards()):
            places, words = [], []
            for one in cached:
                begin = (one.end - 1) // self.group.block_tokens * self.group.block_tokens
                tokens = self.group.tokens_of(shard, begin, self.determined(one))
                first = one.block * self.group.slots_per_block
                places.append(np.arange(first, first + len(tokens)))
                words.append(self.words(one.demanded)[tokens])
            found = self.memory.read(self.group_index, np.concatenate(places), ranks)
            self.compare(found, np.concatenate(words), ranks, f"{len(cached)} cached blocks")

    def brought(self, loaded: Loaded) -> tuple[np.ndarray, slice, np.ndarray]:
        """Look at tokens of which a rank says that they are there: those tokens, the rank, their words."""
        first = self.group.first_read(loaded.end)
        tokens = self.group.tokens_of(self.group.shard_of(loaded.rank), first, loaded.end)
        ranks = slice(loaded.rank, loaded.rank + 1)
        places = self.group.places(loaded.table, tokens)
        return tokens, ranks, self.memory.read(self.group_index, places, ranks)

    def words(self, demanded: Demanded) -> np.ndarray:
        """What a request demands, token by token."""
        return demanded.states

    def determined(self, cached: Cached) -> int:
        """How many tokens of a prefix leave something that is certain."""
        return cached.end

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

    def check_loaded(self, loaded: Loaded) -> int:
        return 0

    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        """Do nothing: what is brought ends where a ring is empty."""

    def check_cached(self, cached: Sequence[Cached]) -> None:
        raise WrongBytesError(f"blocks {[one.block for one in cached]} of a ring are offered to others")

    def _places(self, span: Span, tokens: np.ndarray) -> np.ndarray:
        (block,) = span.tables[self.group_index]
        places: np.ndarray = block * self.group.slots_per_block + tokens % self.group.tokens_per_block
        return places


class ReplayContents(TokenContents):
    """A window that nobody keeps: computed again from a window before the end of a hit on."""

    def __init__(self, memory: DeviceMemory, group_index: int) -> None:
        super().__init__(memory, group_index)
        self._loaded: dict[tuple[str, int], set[int]] = {}  # request and tokens: the ranks that brought them

    def read(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._demand_replay(span)
            first = max(self.group.first_read(span.begin), span.admitted)
            tokens = np.arange(first, span.kept)
            places = self.group.places(span.tables[self.group_index], tokens)
            found = self.memory.read(self.group_index, places)
            what = f"{span.request_id}: computing {span.begin} to {span.end}"
            self.compare(found, span.demanded.states[tokens], slice(None), what)

    def check_loaded(self, loaded: Loaded) -> int:
        self._loaded.setdefault((loaded.request_id, loaded.end), set()).add(loaded.rank)
        return 0

    def _demand_replay(self, span: Span) -> None:
        """Demand that who was loaded, by all ranks, goes on a window earlier."""
        for end in [end for name, end in self._loaded if name == span.request_id]:
            brought_by = self._loaded.pop((span.request_id, end))
            window = self.group.window_tokens or 0
            if len(brought_by) == self.memory.rank_count and span.admitted > end - window:
                raise WrongBytesError(f"{span.request_id}: goes on at {span.admitted} without its window")

    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        """Do nothing: nobody brings it."""

    def check_cached(self, cached: Sequence[Cached]) -> None:
        raise WrongBytesError(f"blocks {[one.block for one in cached]} of a replayed window are offered")
