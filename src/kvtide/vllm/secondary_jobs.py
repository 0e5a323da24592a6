"""vLLM's jobs that a lane has: which rows each has lent, and what vLLM is told of its end.

A job ends for vLLM once: when the lane says so, or before, when it is given up and its rows are taken back.
Knows keys, rows and fates; does not know tiers or threads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtide.jobs import JobId
from kvtide.keys import OffloadKey
from kvtide.transfer.lane import PartFate, TierDirection, TierOutcome
from kvtide.vllm.secondary_rows import LentRow


@dataclass(slots=True)
class OpenJob:
    """One job.

    Attributes:
        job_id: vLLM's.
        direction: Read or written.
        keys: Of its chunks.
        rows: Of each.
        request_id: Whose.
        given_up: vLLM has been told that it has ended.
    """

    job_id: int
    direction: TierDirection
    keys: Sequence[OffloadKey]
    rows: Sequence[LentRow]
    request_id: str
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended, for vLLM.

    Attributes:
        job_id: vLLM's.
        done: All chunks.
        done_keys: Of a job that reads, those whose rows hold what was asked for.
        byte_count: Copied.
        seconds: From submission to the end; None when nobody knows.
    """

    job_id: int
    done: bool
    done_keys: Sequence[OffloadKey] = ()
    byte_count: int = 0
    seconds: float | None = None


class OpenJobs:
    """Jobs that the lane has not ended.

    Args:
        take_back: Ends the loan of rows.
    """

    def __init__(self, take_back: Callable[[Sequence[LentRow]], None]) -> None:
        self._take_back = take_back
        self._open: dict[JobId, OpenJob] = {}
        self._ends: list[JobEnd] = []

    def open(self, job: OpenJob) -> None:
        """Note a job that the lane has taken."""
        self._open[JobId(job.job_id)] = job

    def refuse(self, job_id: int, done: bool = False) -> None:
        """End a job that the lane has not been given; ``done`` when there was nothing to do."""
        self._ends.append(JobEnd(job_id, done))

    def waiting_for(self) -> Iterator[OpenJob]:
        """List the jobs that vLLM waits for."""
        return (job for job in self._open.values() if not job.given_up)

    def give_up(self, job_id: JobId) -> OpenJob | None:
        """End a job for vLLM while the lane still has it; None when that has been done.

        Rows that were filled by now count.
        """
        job = self._open.get(job_id)
        if job is None or job.given_up:
            return None
        job.given_up = True
        self._take_back(job.rows)
        self._ends.append(_end_of(job, None))
        return job

    def end(self, outcome: TierOutcome) -> tuple[OpenJob, dict[OffloadKey, PartFate]]:
        """Close what the lane has ended: the job, and the fate of each chunk."""
        job = self._open.pop(outcome.job_id)
        if not job.given_up:
            self._take_back(job.rows)
            self._ends.append(_end_of(job, outcome))
        return job, {key: PartFate(fate) for key, fate in zip(job.keys, outcome.fates, strict=True)}

    def take_ends(self) -> list[JobEnd]:
        """Hand out how jobs ended, each once."""
        ends, self._ends = self._ends, []
        return ends


def _end_of(job: OpenJob, outcome: TierOutcome | None) -> JobEnd:
    done_bytes = outcome.byte_count if outcome is not None else 0
    seconds = outcome.latency_s if outcome is not None else None
    if job.direction is TierDirection.READ:
        # What a row says of itself is what counts: not the call that has ended, the bytes that are there.
        done = [key for key, row in zip(job.keys, job.rows, strict=True) if row.filled]
        return JobEnd(job.job_id, len(done) == len(job.keys), done, done_bytes, seconds)
    done_all = outcome is not None and all(fate == PartFate.DONE for fate in outcome.fates)
    return JobEnd(job.job_id, done_all, (), done_bytes, seconds)
