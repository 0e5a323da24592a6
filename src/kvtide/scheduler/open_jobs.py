"""Jobs that somebody still owes an answer for, each with the fence around its device blocks.

Knows jobs, ranks and what a job holds; does not know how its end changes the catalog: it only says that
the job has ended.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtide.jobs import (
    CPULoadStoreSpec,
    Direction,
    Hop,
    HopResult,
    JobEvent,
    JobId,
    JobState,
    TransferJob,
    ids,
    next_state,
)
from kvtide.keys import ChunkRun
from kvtide.scheduler.fences import Fences
from kvtide.scheduler.state import RequestOffloadState


@dataclass(frozen=True, slots=True)
class HeldChunks:
    """The chunks of one group that a job reads or writes in host memory."""

    run: ChunkRun
    spec: CPULoadStoreSpec


@dataclass(slots=True)
class TransferJobStatus:
    """One open job in the books.

    Attributes:
        job: What was asked for.
        owner: The request it is for, which may have finished.
        held: Per group, its chunks.
        token_count: Tokens a load brings; 0 for a store.
        owing: Ranks that have not answered, per hop to or from the device.
        failed: Any rank said so, for any such hop.
        state: In the table of ``kvtide.jobs``.
        planned_at_s: On the scheduler's clock.
        given_up: A load whose request was told that it failed, while its copy goes on.
    """

    job: TransferJob
    owner: RequestOffloadState
    held: tuple[HeldChunks, ...]
    token_count: int
    owing: list[set[int]]
    planned_at_s: float
    failed: bool = False
    state: JobState = JobState.PLANNED
    given_up: bool = False

    @property
    def pending_count(self) -> int:
        """Answers still owed."""
        return sum(len(ranks) for ranks in self.owing)

    @property
    def chunk_count(self) -> int:
        """Chunks the job reads or writes in host memory, all groups."""
        return sum(len(held.spec.slots) for held in self.held)

    def answer(self, hop_index: int, results: dict[int, HopResult]) -> bool:
        """Take in answers of some ranks for one hop; a rank's second answer changes nothing.

        Returns:
            True when the job has ended by them.
        """
        if hop_index >= len(self.owing):
            return False
        for rank, result in results.items():
            if rank not in self.owing[hop_index]:
                continue
            self.owing[hop_index].discard(rank)
            if result is HopResult.FAILED:
                self.failed = True
                # A rank whose hop has failed does not begin the hops after it.
                for later in self.owing[hop_index + 1 :]:
                    later.discard(rank)
        return not self.pending_count


class OpenJobs:
    """All open jobs, and those that the next step tells the workers.

    Args:
        rank_count: Ranks that answer each job.
        deadline_s: Given to each job.

    Attributes:
        fences: Of the open jobs.
        closed_count: Jobs closed so far.
    """

    def __init__(self, rank_count: int, deadline_s: float) -> None:
        self._rank_count = rank_count
        self._deadline_s = deadline_s
        self._next_id = 0
        self._open: dict[JobId, TransferJobStatus] = {}
        self._unsent: list[JobId] = []
        self._store_chunks = 0
        self._by_age: deque[tuple[JobId, float]] = deque()  # also closed ones, until they would be overdue
        self.fences = Fences()
        self.closed_count = 0

    def plan(
        self,
        owner: RequestOffloadState,
        generation: int,
        direction: Direction,
        hops: tuple[Hop, ...],
        held: Sequence[HeldChunks],
        now_s: float,
        after: frozenset[JobId] = frozenset(),
        token_count: int = 0,
    ) -> TransferJobStatus:
        """Enter a job for the next step and fence its device blocks. Ids are never used twice."""
        job_id = self.new_id()
        job = TransferJob(
            job_id, generation, direction, owner.request.request_id, hops, after, self._deadline_s
        )
        # A job without a hop is one that could not be planned; each rank answers that it has failed. Hops
        # below host memory, which come after the first, are in other books.
        owing = [set(range(self._rank_count))]
        status = TransferJobStatus(job, owner, tuple(held), token_count, owing, now_s)
        self._open[job_id] = status
        self._unsent.append(job_id)
        owner.transfer_jobs.add(job_id)
        device = job.device_spec()
        self.fences.open(job_id, device.block_ids if device is not None else ids(()))
        self._by_age.append((job_id, now_s))
        if direction is Direction.STORE:
            self._store_chunks += status.chunk_count
        return status

    def new_id(self) -> JobId:
        """Give a number that no other job has, here or below host memory."""
        self._next_id += 1
        return JobId(self._next_id - 1)

    def send(self) -> tuple[TransferJob, ...]:
        """Hand out what was planned since the last step."""
        jobs = []
        for job_id in self._unsent:
            status = self._open[job_id]
            status.state = next_state(status.state, JobEvent.SEND)
            jobs.append(status.job)
        self._unsent = []
        return tuple(jobs)

    def get(self, job_id: JobId) -> TransferJobStatus | None:
        """Find an open job; None for one that is closed or was never there."""
        return self._open.get(job_id)

    def overdue(self, planned_before_s: float) -> Iterator[TransferJobStatus]:
        """Name, once each, the open jobs that were planned before then: the oldest first."""
        while self._by_age:
            job_id, planned_at_s = self._by_age[0]
            if planned_at_s >= planned_before_s:
                return
            self._by_age.popleft()
            if (status := self._open.get(job_id)) is not None:
                yield status

    def close(self, status: TransferJobStatus) -> None:
        """Strike out a job that every rank concerned has answered."""
        job_id = status.job.job_id
        status.state = next_state(status.state, JobEvent.FAIL if status.failed else JobEvent.SUCCEED)
        del self._open[job_id]
        self.fences.close(job_id)
        status.owner.transfer_jobs.discard(job_id)
        self.closed_count += 1
        if status.job.direction is Direction.STORE:
            self._store_chunks -= status.chunk_count

    @property
    def store_chunk_count(self) -> int:
        """Chunks of open stores."""
        return self._store_chunks

    def check_invariants(self) -> None:
        """Check that every open job has its fence, and its owner, and no other has."""
        fenced = self.fences.job_ids()
        assert fenced == set(self._open), f"fences {fenced}, open jobs {set(self._open)}"
        for job_id, status in self._open.items():
            owned = job_id in status.owner.transfer_jobs
            assert owned is not status.given_up, f"job {job_id} has no owner, or one that gave it up"

    def __iter__(self) -> Iterator[TransferJobStatus]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)
