"""What the worker asks of a tier: jobs of several chunks, none of whose calls ever waits for the tier.

Values and a contract. Knows names of chunks and slots of memory; does not know threads, media or requests.
``TierLane`` fulfils it with threads, simulations do so in virtual time.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvtide.jobs import JobId, PartFate
from kvtide.keys import OffloadKey
from kvtide.tiers.breaker import BreakerState
from kvtide.tiers.records import ChunkName, RecordHeader

__all__ = [
    "CANCELLED",
    "LATE",
    "MISS",
    "OUT",
    "Lane",
    "PartFate",
    "TierDirection",
    "TierOutcome",
    "TierPart",
    "TierState",
]


class TierDirection(IntEnum):
    """Seen from the tier; what is read goes first."""

    READ = 0
    WRITE = 1


@dataclass(frozen=True, slots=True)
class TierPart:
    """One chunk: its name, and its slot in the pool as ``uint8[n]``.

    The slot is the lane's until the job's outcome has been polled, or ``submit`` took nothing.
    """

    name: ChunkName
    payload: memoryview


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """How a job ended.

    Attributes:
        job_id: Of the job.
        direction: Read or written.
        fates: A ``PartFate`` for each part, in the order in which they were submitted.
        byte_count: Bytes of what was done.
        busy_s: Seconds that threads spent in the tier.
        latency_s: From submission to the end.
        trouble: What happened to the others: names of errors, ``MISS``, ``LATE``, ``CANCELLED``, ``OUT``.
    """

    job_id: JobId
    direction: TierDirection
    fates: bytes
    byte_count: int
    busy_s: float
    latency_s: float
    trouble: Counter[str]


MISS = "miss"
"""A read that found nothing."""
LATE = "late"
"""A read whose turn did not come in time."""
CANCELLED = "cancelled"
"""Asked to end before it began, or of before a reset."""
OUT = "out"
"""The tier is left out for a while."""


@dataclass(frozen=True, slots=True)
class TierState:
    """How a tier is.

    Attributes:
        state: Of the breaker; ``OPEN`` also while too many calls are late.
        takes_writes: False while the medium is full.
        capacity_bytes: What it could hold as things are; 0 before it was opened, and where nobody knows.
        used_bytes: What of that is taken.
        late_count: Calls that are late and have not returned.
        opened: Whether it serves yet; what was submitted before waits.
        chunk_read_s: See ``TierReport``.
    """

    state: BreakerState
    takes_writes: bool
    capacity_bytes: int
    used_bytes: int
    late_count: int
    opened: bool
    chunk_read_s: float = 0.0


class Lane(ABC):
    """The way to one tier.

    Called by one thread, the worker's. What is waiting is done in the order generations, discards, reads,
    writes; of each, first come first served.

    Attributes:
        name: Of the tier.
    """

    name: str

    @abstractmethod
    def submit(
        self,
        job_id: JobId,
        direction: TierDirection,
        parts: Sequence[TierPart],
        lead: tuple[bytes, ...] = (),
    ) -> bool:
        """Take a job; False when its writes do not fit the queue, and nothing was taken.

        Args:
            job_id: Of the job.
            direction: Read or write.
            parts: Neighbouring chunks of one group, in prefix order.
            lead: See ``RecordRun``.
        """

    @abstractmethod
    def cancel(self, job_ids: Collection[JobId]) -> None:
        """Ask jobs to end: what has not begun does not begin. Unknown ones are ignored."""

    @abstractmethod
    def discard(self, keys: Collection[OffloadKey]) -> None:
        """Forget chunks, before any write that is waiting begins."""

    @abstractmethod
    def begin_generation(self, trusted: bool = False) -> None:
        """Serve nothing of before, from now on: open jobs fail, and what they wrote is not served either.

        Args:
            trusted: What is written from now on may be served after a restart. False when the weights in
                memory may not be those whose fingerprint the records carry.
        """

    @property
    @abstractmethod
    def generations_begun(self) -> int:
        """How many of them the tier has made durable: a restart does not undo them."""

    @abstractmethod
    def poll(self) -> list[TierOutcome]:
        """Hand out the jobs that ended since the last call, each once."""

    @abstractmethod
    def take_late(self) -> set[JobId]:
        """Name jobs one of whose calls has become late, each once.

        Their buffers stay with the calls; each outcome comes when the last call has returned, if ever.
        """

    @abstractmethod
    def take_inventory(self, limit: int) -> list[RecordHeader] | None:
        """Hand out what the tier holds, piece by piece, chunks near the beginning of prompts first.

        Args:
            limit: At most so many.

        Returns:
            Headers not told before; none when there is nothing to tell yet; None when all was told.
        """

    @abstractmethod
    def recount(self) -> None:
        """Begin the inventory anew."""

    @abstractmethod
    def state(self) -> TierState:
        """Say how the tier is, as of the last call that ended."""

    @abstractmethod
    def close(self, patience_s: float) -> bool:
        """End; False when calls did not return in time, whose buffers must stay."""
