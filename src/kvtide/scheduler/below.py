"""Open hops between host memory and the tiers below it: who still owes an answer, and for which chunks.

Knows jobs and ranks; does not know what an end changes: whoever planned a hop is handed it when it has
ended. Such hops touch no device block: nothing is fenced, and no step waits for them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvtide.jobs import (
    Direction,
    Hop,
    HopKey,
    HopResult,
    JobId,
    PartFate,
    StorageLoadStoreSpec,
    TransferJob,
)
from kvtide.manager.ladder import PreparedWrite
from kvtide.scheduler.open_jobs import HeldChunks, OpenJobs
from kvtide.scheduler.state import RequestOffloadState


@dataclass(slots=True, eq=False)
class Promotion:
    """Chunks that are being brought back to host memory.

    Attributes:
        tier: From where.
        chunks: In host memory.
        owner: The request that asked first.
    """

    tier: int
    chunks: HeldChunks
    owner: RequestOffloadState


@dataclass(slots=True, eq=False)
class OpenHop:
    """One hop.

    Attributes:
        key: Its job and its index there.
        what: What is written or brought back.
        chunk_count: Chunks of it.
        owing: Ranks that have not answered.
        fates: Per chunk the worst that any rank has said, None while all is well.
        late: A rank has said that it takes too long.
    """

    key: HopKey
    what: PreparedWrite | Promotion
    chunk_count: int
    owing: set[int]
    fates: bytearray | None = None
    late: bool = False

    def answer(self, results: Mapping[int, HopResult], fates: Mapping[int, bytes]) -> bool:
        """Take in what ranks say; a rank's second answer changes nothing.

        Returns:
            True when all have answered.
        """
        for rank, result in results.items():
            if rank not in self.owing:
                continue
            if result is HopResult.LATE:
                self.late = True
                continue
            self.owing.discard(rank)
            if result is HopResult.FAILED:
                self._note(fates.get(rank, bytes(self.chunk_count)))
        return not self.owing

    def all_fates(self) -> bytes:
        """What became of each chunk, on all ranks."""
        return bytes([PartFate.DONE]) * self.chunk_count if self.fates is None else bytes(self.fates)

    def _note(self, said: bytes) -> None:
        if self.fates is None:
            self.fates = bytearray(said.ljust(self.chunk_count, b"\0")[: self.chunk_count])
            return
        for at, (one, other) in enumerate(zip(self.fates, said, strict=False)):
            if one != PartFate.GONE and other != PartFate.DONE:
                self.fates[at] = other


@dataclass(slots=True)
class BelowJobs:
    """All open hops, and the jobs of such hops alone that the next step tells the workers.

    Attributes:
        jobs: Gives numbers to jobs.
        rank_count: Ranks that answer each hop.
        deadline_s: Given to each job.
        led: Tiers that are told the hashes before the chunks as well.
    """

    jobs: OpenJobs
    rank_count: int
    deadline_s: float
    led: frozenset[int] = frozenset()
    _open: dict[HopKey, OpenHop] = field(default_factory=dict)
    _unsent: list[TransferJob] = field(default_factory=list)

    def behind(self, job_id: JobId, first: int, writes: list[PreparedWrite]) -> None:
        """Enter hops that follow a store's own copy; ``first`` is the index of the first of them."""
        for index, write in enumerate(writes, first):
            self._enter((job_id, index), write, len(write.run))

    def demote(self, generation: int, writes: list[PreparedWrite]) -> None:
        """Enter jobs that write what is in host memory."""
        for write in writes:
            job = self._job(generation, Direction.DEMOTE, "", self.hop_of(write))
            self._enter((job.job_id, 0), write, len(write.run))

    def promote(self, generation: int, promotion: Promotion) -> JobId:
        """Enter a job that brings chunks back to host memory."""
        run, spec = promotion.chunks.run, promotion.chunks.spec
        hop = Hop(StorageLoadStoreSpec.of(promotion.tier, run, promotion.tier in self.led), spec)
        request_id = promotion.owner.request.request_id
        job = self._job(generation, Direction.PROMOTE, request_id, hop)
        self._enter((job.job_id, 0), promotion, len(run))
        return job.job_id

    def hop_of(self, write: PreparedWrite) -> Hop:
        """Say what is copied from where to where."""
        storage = StorageLoadStoreSpec.of(write.tier, write.run, write.tier in self.led)
        return Hop(write.slots, storage)

    def send(self) -> tuple[TransferJob, ...]:
        """Hand out the jobs that were planned since the last step."""
        jobs, self._unsent = tuple(self._unsent), []
        return jobs

    def answer(
        self, key: HopKey, results: Mapping[int, HopResult], fates: Mapping[int, bytes]
    ) -> OpenHop | None:
        """Take in answers; hands out the hop when it has ended by them, or has become late."""
        hop = self._open.get(key)
        if hop is None:
            return None
        was_late = hop.late
        if hop.answer(results, fates):
            del self._open[key]
            return hop
        return hop if hop.late and not was_late else None

    def __iter__(self) -> Iterator[OpenHop]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    # -- inside ---------------------------------------------------------------------------------

    def _job(self, generation: int, direction: Direction, request_id: str, hop: Hop) -> TransferJob:
        job = TransferJob(
            self.jobs.new_id(), generation, direction, request_id, (hop,), deadline_s=self.deadline_s
        )
        self._unsent.append(job)
        return job

    def _enter(self, key: HopKey, what: PreparedWrite | Promotion, chunk_count: int) -> None:
        self._open[key] = OpenHop(key, what, chunk_count, set(range(self.rank_count)))
