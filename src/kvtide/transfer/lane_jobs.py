"""What waits before a tier, and the books of the jobs it belongs to.

Knows parts of jobs, bytes and order. Does not know threads or tiers; whoever calls holds the lane's lock.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtide.jobs import JobId
from kvtide.transfer.lane import PartFate, TierDirection, TierOutcome, TierPart


@dataclass(slots=True, eq=False)
class LaneJob:
    """A job, and how many of its parts have not ended."""

    job_id: JobId
    direction: TierDirection
    parts: Sequence[TierPart]
    submitted_s: float
    lead: tuple[bytes, ...] = ()
    fates: bytearray = field(default_factory=bytearray)
    left: int = 0
    busy_s: float = 0.0
    cancelled: bool = False  # what has not begun does not begin
    voided: bool = False  # of before a reset: nor does it count how its calls end
    told_late: bool = False
    trouble: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.left = len(self.parts)
        self.fates = bytearray(len(self.parts))

    def outcome(self, now_s: float) -> TierOutcome:
        """Say how it ended."""
        done_bytes = sum(
            part.payload.nbytes
            for part, fate in zip(self.parts, self.fates, strict=True)
            if fate == PartFate.DONE
        )
        return TierOutcome(
            self.job_id,
            self.direction,
            bytes(self.fates),
            done_bytes,
            self.busy_s,
            now_s - self.submitted_s,
            self.trouble,
        )


@dataclass(frozen=True, slots=True)
class WaitingPart:
    """A part whose call has not begun."""

    job: LaneJob
    index: int

    @property
    def part(self) -> TierPart:
        return self.job.parts[self.index]


class JobBooks:
    """Open jobs, what of them waits, and how they ended.

    Args:
        queue_bytes: Of writes that may wait or be under way.
        clock: Seconds.
    """

    def __init__(self, queue_bytes: int, clock: Callable[[], float]) -> None:
        self._queue_bytes = queue_bytes
        self._clock = clock
        self._jobs: dict[JobId, LaneJob] = {}
        self._ended: list[TierOutcome] = []
        self.waiting: dict[TierDirection, deque[WaitingPart]] = {one: deque() for one in TierDirection}
        self.write_bytes = 0  # of writes that have not ended

    def take(
        self,
        job_id: JobId,
        direction: TierDirection,
        parts: Sequence[TierPart],
        lead: tuple[bytes, ...] = (),
    ) -> bool:
        """Open a job; False when its writes do not fit."""
        if direction is TierDirection.WRITE:
            byte_count = sum(part.payload.nbytes for part in parts)
            if self.write_bytes + byte_count > self._queue_bytes:
                return False
            self.write_bytes += byte_count
        job = LaneJob(job_id, direction, parts, self._clock(), lead)
        self._jobs[job_id] = job
        self.waiting[direction].extend(WaitingPart(job, index) for index in range(len(parts)))
        if not parts:
            self._end(job)
        return True

    def neighbours(self, first: WaitingPart, most: int) -> list[WaitingPart]:
        """Take from what waits the parts that follow one of the same job, ``most`` in all, with it."""
        queue, taken = self.waiting[first.job.direction], [first]
        while queue and len(taken) < most:
            after = queue[0]
            in_a_row = after.job is first.job and after.index == taken[-1].index + 1
            if not in_a_row or after.part.payload.nbytes != first.part.payload.nbytes:
                break
            taken.append(queue.popleft())
        return taken

    def note(self, waiting: WaitingPart, fate: PartFate, trouble: str | None) -> None:
        """Note how a part ended."""
        job, index = waiting.job, waiting.index
        job.fates[index] = fate
        if trouble is not None:
            job.trouble[trouble] += 1
        if job.direction is TierDirection.WRITE:
            self.write_bytes -= job.parts[index].payload.nbytes
        job.left -= 1
        if not job.left:
            self._end(job)

    def fail_waiting(
        self,
        trouble: str,
        which: Callable[[LaneJob], bool] = lambda job: True,
        directions: Sequence[TierDirection] = tuple(TierDirection),
    ) -> None:
        """End what waits of some jobs."""
        for direction in directions:
            queue, kept = self.waiting[direction], deque[WaitingPart]()
            self.waiting[direction] = kept
            for waiting in queue:
                if which(waiting.job):
                    self.note(waiting, PartFate.FAILED, trouble)
                else:
                    kept.append(waiting)

    def fail_first(self, trouble: str, direction: TierDirection, which: Callable[[LaneJob], bool]) -> None:
        """End what waits at the front for as long as it is of such jobs."""
        queue = self.waiting[direction]
        while queue and which(queue[0].job):
            self.note(queue.popleft(), PartFate.FAILED, trouble)

    def open_jobs(self) -> Iterator[LaneJob]:
        """List the jobs that have not ended."""
        return iter(self._jobs.values())

    def job(self, job_id: JobId) -> LaneJob | None:
        """Find an open job."""
        return self._jobs.get(job_id)

    def take_ended(self) -> list[TierOutcome]:
        """Hand out how jobs ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, job: LaneJob) -> None:
        del self._jobs[job.job_id]
        self._ended.append(job.outcome(self._clock()))
