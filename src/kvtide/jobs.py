"""What the scheduler side asks of the worker side, and what comes back.

Frozen, picklable values: the two sides share these and nothing else. A job is a path over one set of
slots (device -> host -> tier, host -> device, tier -> host), a hop is one step of it and a result
answers a hop.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple, NewType, TypeAlias

from kvtide.errors import IllegalTransitionError
from kvtide.keys import LEAD_ALIGNMENT, ChunkRun, Medium, OffloadKey

JobId = NewType("JobId", int)


Ids: TypeAlias = "array[int]"
"""Block ids or slots: compact on the way to the workers, and readable as ``int32[n]`` without a copy."""


def ids(numbers: Iterable[int]) -> Ids:
    """Pack numbers."""
    return array("i", numbers)


class Direction(Enum):
    """Where a job's path begins and leads."""

    STORE = "store"
    """From the device, and possibly on to a tier below host memory."""
    LOAD = "load"
    """To the device."""
    DEMOTE = "demote"
    """From host memory to a tier below it."""
    PROMOTE = "promote"
    """From there to host memory."""


COPIES = (Direction.STORE, Direction.LOAD)
"""Directions that begin or end on the device."""


class LoadStoreSpec(ABC):
    """Where the bytes of a hop's one end are."""

    @staticmethod
    @abstractmethod
    def medium() -> Medium:
        """Name the medium."""


@dataclass(frozen=True, slots=True)
class GPULoadStoreSpec(LoadStoreSpec):
    """Blocks of the device.

    Attributes:
        block_ids: ``int32``, engine block ids, the groups one after another, prefix order within a group.
        group_sizes: How many of ``block_ids`` each group owns.
        block_indices: Each group's first block, counted from the request's beginning: a first or last
            chunk may be partial, and this says which of its blocks are meant.
    """

    block_ids: Ids
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.block_ids, array):
            object.__setattr__(self, "block_ids", ids(self.block_ids))

    @staticmethod
    def medium() -> Medium:
        return Medium.DEVICE


@dataclass(frozen=True, slots=True)
class CPULoadStoreSpec(LoadStoreSpec):
    """Slots of the host pool.

    Attributes:
        slots: ``int32``, one per chunk, the groups one after another, prefix order within a group.
        group_sizes: How many of ``slots`` each group owns.
    """

    slots: Ids
    group_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.slots, array):
            object.__setattr__(self, "slots", ids(self.slots))

    @staticmethod
    def medium() -> Medium:
        return Medium.HOST


@dataclass(frozen=True, slots=True)
class StorageLoadStoreSpec(LoadStoreSpec):
    """Neighbouring chunks of one group in a tier below host memory.

    Attributes:
        tier: From 1, the one nearest to host memory.
        group_index: Of the group.
        start: First chunk, counted from the beginning of the prompt.
        hashes: One per chunk, in prefix order.
        parent_hash: Of the chunk before the first, None at the beginning of a prompt.
        lead: Hashes of the chunks before the first, back to a multiple of ``LEAD_ALIGNMENT``; none for a tier
            that has no use for them.
    """

    tier: int
    group_index: int
    start: int
    hashes: tuple[bytes, ...] = field(repr=False)
    parent_hash: bytes | None = None
    lead: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, tier: int, run: ChunkRun, with_lead: bool = False) -> "StorageLoadStoreSpec":
        """Name the chunks of a run."""
        lead: tuple[bytes, ...] = ()
        if with_lead:
            lead = tuple(run.between(run.start - run.start % LEAD_ALIGNMENT, run.start).hashes())
        return cls(tier, run.group_index, run.start, tuple(run.hashes()), run.parent_hash(), lead)

    @staticmethod
    def medium() -> Medium:
        return Medium.STORAGE


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a job's path."""

    source: LoadStoreSpec
    target: LoadStoreSpec


@dataclass(frozen=True, slots=True)
class TransferJob:
    """What was asked for.

    Attributes:
        job_id: Unique for the life of the scheduler side.
        generation: Of the catalog when the job was planned; a reset begins a new one.
        direction: Store or load.
        request_id: For whom; a load's end is reported to the engine under this id.
        hops: In order; the worker starts the next one itself.
        after: Jobs that still touch this job's target and must have ended before it begins.
        deadline_s: Seconds from submission after which a hop that has not begun is given up.
    """

    job_id: JobId
    generation: int
    direction: Direction
    request_id: str
    hops: tuple[Hop, ...]
    after: frozenset[JobId] = frozenset()
    deadline_s: float = 60.0

    def device_spec(self) -> GPULoadStoreSpec | None:
        """Name the end of the path on the device, if it has one."""
        if not self.hops:
            return None
        end = self.hops[0].source if self.direction is Direction.STORE else self.hops[-1].target
        return end if isinstance(end, GPULoadStoreSpec) else None


class JobState(Enum):
    """Of a job, in the scheduler's books."""

    PLANNED = auto()
    SENT = auto()
    DONE = auto()
    FAILED = auto()


class JobEvent(Enum):
    """What may happen to a job."""

    SEND = auto()
    SUCCEED = auto()
    FAIL = auto()


TRANSITIONS: dict[JobState, dict[JobEvent, JobState]] = {
    # A planned job is never dropped: its slots are pinned and its blocks fenced; it is sent and answered.
    JobState.PLANNED: {JobEvent.SEND: JobState.SENT},
    JobState.SENT: {JobEvent.SUCCEED: JobState.DONE, JobEvent.FAIL: JobState.FAILED},
    JobState.DONE: {},
    JobState.FAILED: {},
}


def next_state(state: JobState, event: JobEvent) -> JobState:
    """Look up the table.

    Raises:
        IllegalTransitionError: The table has no such entry.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransitionError(f"a job that is {state.name} cannot {event.name}") from None


class HopResult(Enum):
    """A rank's answer for one hop of one job."""

    DONE = "done"
    FAILED = "failed"
    LATE = "late"
    """Not to be waited for; its memory stays in use until another answer comes."""


class PartFate(IntEnum):
    """What became of one chunk in a hop to or from a tier."""

    FAILED = 0
    """Not there now; a read may find it another time."""
    DONE = 1
    GONE = 2
    """The tier has not got it, or had something else and has forgotten it."""


def leading_done(fates: Sequence[int]) -> int:
    """Count the chunks at the beginning that are done: what follows one that is not is of no use."""
    return next((at for at, fate in enumerate(fates) if fate != PartFate.DONE), len(fates))


@dataclass(frozen=True, slots=True)
class Discard:
    """Chunks that a tier is to forget.

    Attributes:
        tier: From 1.
        keys: Of the chunks.
    """

    tier: int
    keys: tuple[OffloadKey, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class OffloadingConnectorMetadata:
    """What one step tells the workers.

    Attributes:
        generation: Of the catalog; jobs of an older one end as failed on the worker.
        jobs: New jobs, in the order they were planned.
        jobs_to_flush: Open stores that must have left their device blocks before this step's forward.
        jobs_to_give_up: Open loads whose copies do not end. Their requests are reported as failed now; the
            jobs are answered when the copies have ended, if ever. Their blocks stay held meanwhile.
        jobs_to_cancel: Open promotions nobody waits for any more: what has not begun does not begin.
        discards: What left the books of tiers below host memory.
        keeps_tiers: With a new generation: what the tiers hold is still right.
    """

    generation: int = 0
    jobs: tuple[TransferJob, ...] = ()
    jobs_to_flush: frozenset[JobId] = frozenset()
    jobs_to_give_up: frozenset[JobId] = frozenset()
    jobs_to_cancel: frozenset[JobId] = frozenset()
    discards: tuple[Discard, ...] = ()
    keeps_tiers: bool = False


HopKey = tuple[JobId, int]
"""A job and the index of one of its hops."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a rank says of its pool.

    Attributes:
        ready_slots: Slots that can be used so far.
        slot_count: Slots there will be.
        slot_bytes: Bytes of one slot on this rank.
    """

    ready_slots: int
    slot_count: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a rank says of one of its tiers.

    Attributes:
        serves: Reads may be asked of it.
        takes_writes: There is room and it is not left out.
        capacity_bytes: What it could hold.
        record_bytes: Per group, what one chunk takes of that; 0 where another rank writes it.
        chunk_read_s: Seconds in which it has brought one more chunk lately, calls side by side; 0 when nobody
            knows.
    """

    serves: bool
    takes_writes: bool
    capacity_bytes: int
    record_bytes: tuple[int, ...]
    chunk_read_s: float = 0.0


@dataclass(frozen=True, slots=True)
class InventoryPiece:
    """Some of what a rank found in a tier when it was opened, parents before what extends them.

    Attributes:
        tier: From 1.
        generation: Of the catalog when it was found.
        shard_counts: Per group, how many ranks have to find a chunk for it to count.
        group_index: ``uint16[n]``.
        chunk_index: ``uint32[n]``.
        written_at_s: ``uint64[n]``, seconds since the epoch.
        hashes: Of the chunks, one after another.
        parent_hashes: Of the chunks before them; all zero at the beginning of a prompt.
        hash_bytes: Of each.
        last: Nothing comes after this.
    """

    tier: int
    generation: int
    shard_counts: tuple[int, ...]
    group_index: bytes = b""
    chunk_index: bytes = b""
    written_at_s: bytes = b""
    hashes: bytes = field(default=b"", repr=False)
    parent_hashes: bytes = field(default=b"", repr=False)
    hash_bytes: int = 1
    last: bool = False


@dataclass(slots=True)
class OffloadingWorkerMetadata:
    """What the ranks answered in one step.

    Attributes:
        results: Per hop, the result of each rank that answered.
        pools: Per rank, the state of its pool; only what has changed.
        generations: Per rank, the generation its worker has reached; only after a change.
        fates: Per hop to or from a tier, and rank, what became of each chunk (``PartFate``); only where not
            all of them are done.
        tiers: Per rank and tier, its state; only what has changed.
        inventory: What ranks found in their tiers.
    """

    results: dict[HopKey, dict[int, HopResult]] = field(default_factory=dict)
    pools: dict[int, PoolReport] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    fates: dict[HopKey, dict[int, bytes]] = field(default_factory=dict)
    tiers: dict[tuple[int, int], TierReport] = field(default_factory=dict)
    inventory: tuple[InventoryPiece, ...] = ()

    def combine(self, other: "OffloadingWorkerMetadata") -> "OffloadingWorkerMetadata":
        """Join what different ranks said, or a rank one step after the other; no operand is changed."""
        results = dict(self.results)
        for key, answers in other.results.items():
            results[key] = results.get(key, {}) | answers
        fates = dict(self.fates)
        for key, parts in other.fates.items():
            fates[key] = fates.get(key, {}) | parts
        return OffloadingWorkerMetadata(
            results,
            self.pools | other.pools,
            self.generations | other.generations,
            fates,
            self.tiers | other.tiers,
            self.inventory + other.inventory,
        )


class OffloadPolicy(Enum):
    """What of a request is stored; values are what a client writes."""

    CHUNK_LEVEL = "chunk"
    """What is new and asked for often enough, when the settings say so."""
    REQUEST_LEVEL = "request"
    """Everything as soon as it is there, hits included: somebody else reads the context as a whole."""


class ReqContext(NamedTuple):
    """Who asks: passed to the primitives.

    Attributes:
        request_id: Of the engine.
        kv_transfer_params: As the client sent them.
        visit: Number of the request; two uses by one request count as one.
        policy: What of it is stored.
    """

    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    visit: int = 0
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL
