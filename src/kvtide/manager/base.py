"""The six primitives: the life of a chunk as a transaction.

Whoever implements ``OffloadingManager`` decides which chunk is where. It moves no bytes, reads no clock
and raises nothing for what a medium did; the scheduler calls it in prefix order, one group at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvtide.events import ChunkContent, OffloadingEvent
from kvtide.jobs import CPULoadStoreSpec, ReqContext
from kvtide.keys import ChunkRun, OffloadKey


class LookupResult(NamedTuple):
    """Answer of ``lookup``.

    Attributes:
        ready_count: Leading chunks that can be read now.
        later: The chunk after them is on its way: ask again.
    """

    ready_count: int
    later: bool


class Refusal(Enum):
    """Why fewer chunks are stored than were missing; values are labels of a metric."""

    POOL_FULL = "pool_full"
    POOL_NOT_READY = "pool_not_ready"
    BELOW_THRESHOLD = "below_threshold"
    QUEUE_FULL = "queue_full"
    BYPASSED = "bypassed"

    @property
    def is_verdict(self) -> bool:
        """Whether the chunks were judged, and are not offered again for want of anything."""
        return self in (Refusal.BELOW_THRESHOLD, Refusal.BYPASSED)


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """Answer of ``prepare_store``.

    Attributes:
        keys_to_store: The chunks to copy: neighbours, possibly none. Fewer than offered is normal.
        store_spec: Their slots, in the same order.
        evicted_keys: Chunks that left to make room.
        refused_count: Missing chunks that are not stored.
        refusal: Why, None when ``refused_count`` is 0.
    """

    keys_to_store: ChunkRun
    store_spec: CPULoadStoreSpec
    evicted_keys: Sequence[OffloadKey] = ()
    refused_count: int = 0
    refusal: Refusal | None = None


class OffloadingManager(ABC):
    """Which chunk is where, and for how long it must stay.

    Attributes:
        generation: Number of resets so far.
        residency_epoch: Changes whenever an answer of ``lookup`` may have changed.
        room_epoch: Changes whenever ``prepare_store`` may find room it did not find before.
    """

    generation: int = 0
    residency_epoch: int = 0
    room_epoch: int = 0

    @abstractmethod
    def lookup(self, run: ChunkRun, ctx: ReqContext) -> LookupResult:
        """Count the leading chunks that are ready. No pin, no recency, no other effect."""

    @abstractmethod
    def known_count(self, run: ChunkRun) -> int:
        """Count the leading chunks of a prompt that are ready or on their way. No effect.

        Args:
            run: From the beginning of the prompt, of a group that needs all chunks before a point.
        """

    @abstractmethod
    def restore_point(self, run: ChunkRun) -> int:
        """Find the deepest chunk of ``run`` up to which every group has what a reader needs.

        Args:
            run: Of a group, from the beginning of the prompt.

        Returns:
            Chunks of that group; 0 when there is none. No effect.
        """

    @abstractmethod
    def prepare_load(self, run: ChunkRun, ctx: ReqContext) -> CPULoadStoreSpec:
        """Pin each chunk once more and say where it is.

        Raises:
            MissingChunkError: A chunk is not ready; names it; nothing is pinned.
        """

    def visited(self, run: ChunkRun, ctx: ReqContext, now_s: float) -> None:  # noqa: B027
        """Note that a request has come with a prompt, before anything is done for it: policies may learn.

        Args:
            run: All of the prompt that has hashes, from its beginning.
            ctx: Who has come; told again under the same visit, only the time goes on.
            now_s: Now, by a clock that never goes back.
        """

    @abstractmethod
    def touch(self, run: ChunkRun, ctx: ReqContext) -> None:
        """Refresh the recency of a prefix; unknown chunks are ignored."""

    @abstractmethod
    def complete_load(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext) -> None:
        """Take one pin off each slot of ``spec``, also of a generation that was reset.

        Raises:
            IllegalTransitionError: Not pinned: our bug; state unchanged.
        """

    @abstractmethod
    def prepare_store(self, run: ChunkRun, ctx: ReqContext, limit: int | None = None) -> PrepareStoreOutput:
        """Give slots to the missing chunks of a prefix, evicting others. Offering a prefix is a use of it.

        The chunks stay invisible to ``lookup`` until ``complete_store``. No room means fewer chunks: the
        longest prefix that fits, possibly none.

        Args:
            run: From the beginning of the prefix, or from a chunk whose parent is known.
            ctx: For whom.
            limit: Chunks that the queue has room for.
        """

    @abstractmethod
    def complete_store(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext, success: bool) -> None:
        """End what ``prepare_store`` began; repeated, it has no effect.

        ``run`` and ``spec`` are the very objects that ``prepare_store`` returned.

        Success makes the chunks ready. Failure frees the slots and forgets the chunks and everything
        that is pending on them; their slots are freed when their own copies end.
        """

    @abstractmethod
    def abandon_store(self, run: ChunkRun, spec: CPULoadStoreSpec) -> None:
        """Stop waiting for a store whose copy does not end.

        Its chunks and everything pending on them are forgotten, as after a failure. Its slots stay taken
        until ``complete_store``, which then frees them whatever it says.
        """

    def describe(self, run: ChunkRun, spec: CPULoadStoreSpec, content: ChunkContent) -> None:  # noqa: B027
        """Remember what a prepared store holds, for the event of its completion."""

    def keep_room(self) -> None:  # noqa: B027
        """Free a little ahead of need. Called once a step: what a step may evict is counted from here."""

    @abstractmethod
    def take_events(self) -> list[OffloadingEvent]:
        """Hand out what happened since the last call."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every chunk and begin a new generation; what copies still touch is freed at their end."""

    @abstractmethod
    def check_invariants(self, idle: bool) -> None:
        """Check the books.

        Args:
            idle: No job is open: nothing may be pinned or pending.

        Raises:
            AssertionError: They do not balance; says which.
        """
