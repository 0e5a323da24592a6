"""Copies in virtual time: when each job's hops have ended, and what the ranks would answer.

A medium has a bandwidth that all share, and so many calls at once, each of which takes a while beside its
bytes. Knows jobs and bytes; does not know chunks by name, nor what an end changes.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.jobs import (
    CPULoadStoreSpec,
    Direction,
    HopResult,
    JobId,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StorageLoadStoreSpec,
    TransferJob,
)
from kvtide.sim.serving_rates import EngineRates


@dataclass(frozen=True, slots=True)
class MediumRates:
    """Of one tier below host memory.

    Attributes:
        bytes_per_s: All its calls together, reads and writes.
        call_s: What each call takes beside its bytes.
        threads: Calls at once.
        deadline_s: A read that has not begun by then is given up.
    """

    bytes_per_s: float
    call_s: float = 0.0002
    threads: int = 4
    deadline_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ConfigError("bytes_per_s", self.bytes_per_s, "give a number above 0")
        if not 0 <= self.call_s < math.inf:
            raise ConfigError("call_s", self.call_s, "give seconds from 0")
        if self.threads < 1:
            raise ConfigError("threads", self.threads, "give 1 or more")

    def chunk_s(self, chunk_bytes: int) -> float:
        """Seconds for one more chunk, calls side by side."""
        return max(chunk_bytes / self.bytes_per_s, self.call_s / self.threads)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A hop that waits for its tier."""

    job_id: JobId
    hop_index: int
    chunk_count: int
    asked_s: float
    cancelled: bool = False


class Tier:
    """One medium below host memory: reads before writes, each in the order in which they were asked for."""

    def __init__(self, rates: MediumRates, chunk_bytes: int) -> None:
        self.rates = rates
        self._chunk_bytes = chunk_bytes
        self._free_threads = rates.threads
        self._busy_until_s = 0.0
        self.reads: deque[_Waiting] = deque()
        self.writes: deque[_Waiting] = deque()
        self.read_bytes = self.written_bytes = 0

    def begin(self, now_s: float, ends: Callable[[float, _Waiting, bool], None]) -> None:
        """Begin what can be begun; ``ends`` is told when it will have ended, and whether well."""
        while self._free_threads and (self.reads or self.writes):
            queue = self.reads or self.writes
            hop = queue.popleft()
            late = queue is self.reads and now_s > hop.asked_s + self.rates.deadline_s
            self._free_threads -= 1
            if hop.cancelled or late:
                ends(now_s, hop, False)
                continue
            size = hop.chunk_count * self._chunk_bytes
            if queue is self.reads:
                self.read_bytes += size
            else:
                self.written_bytes += size
            calls = -(-hop.chunk_count // self.rates.threads)
            self._busy_until_s = (
                max(now_s + calls * self.rates.call_s, self._busy_until_s) + size / self.rates.bytes_per_s
            )
            ends(self._busy_until_s, hop, True)

    def ended(self) -> None:
        """Take note that a call has returned."""
        self._free_threads += 1


class Media:
    """Everything that copies.

    Args:
        rates: Of copies between the device and host memory.
        chunk_bytes: Of a chunk, all ranks together.
        tiers: Below host memory, the nearest first.

    Attributes:
        stored_bytes: Copied to host memory, and from there to the device: ``loaded_bytes``.
        ended_loads: Requests whose loads have ended since somebody looked, and whether well.
        brought: Promotions that have ended well since somebody looked.
    """

    def __init__(self, rates: EngineRates, chunk_bytes: int, tiers: Sequence[MediumRates]) -> None:
        self._rates = rates
        self._chunk_bytes = chunk_bytes
        self.tiers = [Tier(one, chunk_bytes) for one in tiers]
        self._free_s = {Direction.STORE: 0.0, Direction.LOAD: 0.0}
        self._order = 0
        self._ends: list[tuple[float, int, TransferJob, int, bool, Tier | None]] = []
        self._copy_ends: dict[JobId, float] = {}
        self._deferred: list[TransferJob] = []  # stores of what the last step has computed
        self._parked: list[tuple[TransferJob, float]] = []  # loads, and until when they may wait
        self._below: dict[tuple[JobId, int], TransferJob] = {}
        self.stored_bytes = self.loaded_bytes = 0
        self.ended_loads: list[tuple[str, bool]] = []
        self.brought: list[TransferJob] = []

    # -- what a step asks for, in the worker's order ------------------------------------------------

    def begin_step(self, told: OffloadingConnectorMetadata, now_s: float) -> float:
        """Before the forward: stores of the last step go out, and what must not be overwritten is waited for.

        Returns:
            When the forward may begin.
        """
        for job_id in told.jobs_to_cancel:
            for tier in self.tiers:
                for hop in tier.reads:
                    hop.cancelled = hop.cancelled or hop.job_id == job_id
        ready, self._deferred = self._deferred, []
        for job in told.jobs:
            if job.direction is Direction.STORE:
                # One that is to be flushed at once is of a request that has ended: its bytes are there.
                (ready if job.job_id in told.jobs_to_flush else self._deferred).append(job)
            elif job.direction is not Direction.LOAD:
                self._ask(job, 0, now_s)
        for job in ready:
            self._copy(job, now_s)
        self._begin(now_s)
        return max([now_s, *(self._copy_ends.get(job_id, now_s) for job_id in told.jobs_to_flush)])

    def start_loads(self, told: OffloadingConnectorMetadata, now_s: float) -> None:
        """Behind the forward: loads begin, but for those into blocks that a store still reads."""
        for job in told.jobs:
            if job.direction is Direction.LOAD:
                self._parked.append((job, now_s + job.deadline_s))
        self._unpark(now_s)

    def load_of(self, job_id: JobId) -> str | None:
        """Name the request that a load is for; None when it is not under way."""
        return next((one[2].request_id for one in self._ends if one[2].job_id == job_id), None)

    @property
    def needs_step(self) -> bool:
        """Whether a store waits for the next step to begin."""
        return bool(self._deferred)

    @property
    def next_end_s(self) -> float:
        """When the next hop ends; infinity when none is under way."""
        return self._ends[0][0] if self._ends else math.inf

    def progress(self, now_s: float) -> OffloadingWorkerMetadata | None:
        """End what has ended by now, begin what waited for it, and say so."""
        answers: OffloadingWorkerMetadata | None = None
        while self._ends and self._ends[0][0] <= now_s:
            end_s, _, job, index, well, tier = heapq.heappop(self._ends)
            if answers is None:
                answers = OffloadingWorkerMetadata()
            self._end(job, index, well, tier, now_s, answers)
            self._begin(end_s if tier is not None else now_s)
        self._unpark(now_s)
        return answers

    # -- inside -------------------------------------------------------------------------------------

    def _unpark(self, now_s: float) -> None:
        parked, self._parked = self._parked, []
        stores = {job.job_id for job in self._deferred} if parked else set()
        for job, until_s in parked:
            if not any(other in self._copy_ends or other in stores for other in job.after):
                self._copy(job, now_s)
            elif now_s > until_s:
                self._push(now_s, job, 0, False, None)
            else:
                self._parked.append((job, until_s))

    def _copy(self, job: TransferJob, now_s: float) -> None:
        """A copy between the device and host memory; when it ends is known at once."""
        if not job.hops:
            self._push(now_s, job, 0, False, None)
            return
        host = job.hops[0].target if job.direction is Direction.STORE else job.hops[0].source
        assert isinstance(host, CPULoadStoreSpec)
        size = len(host.slots) * self._chunk_bytes
        busy_s = self._free_s[job.direction]
        if busy_s > now_s + job.deadline_s:
            self._push(now_s + job.deadline_s, job, 0, False, None)
            return
        if job.direction is Direction.STORE:
            self.stored_bytes += size
            pace = self._rates.store_bytes_per_s
        else:
            self.loaded_bytes += size
            pace = self._rates.load_bytes_per_s
        end_s = max(now_s + self._rates.copy_s, busy_s) + size / pace
        self._free_s[job.direction] = self._copy_ends[job.job_id] = end_s
        self._push(end_s, job, 0, True, None)

    def _ask(self, job: TransferJob, index: int, now_s: float) -> None:
        """Have a tier read or write."""
        hop = job.hops[index]
        below = hop.target if isinstance(hop.target, StorageLoadStoreSpec) else hop.source
        assert isinstance(below, StorageLoadStoreSpec)
        tier = self.tiers[below.tier - 1]
        waiting = _Waiting(job.job_id, index, len(below.hashes), now_s)
        (tier.writes if below is hop.target else tier.reads).append(waiting)
        self._below[job.job_id, index] = job

    def _begin(self, now_s: float) -> None:
        for tier in self.tiers:

            def ends(end_s: float, hop: _Waiting, well: bool, tier: Tier = tier) -> None:
                job = self._below.pop((hop.job_id, hop.hop_index))
                self._push(end_s, job, hop.hop_index, well, tier)

            tier.begin(now_s, ends)

    def _push(self, end_s: float, job: TransferJob, index: int, well: bool, tier: Tier | None) -> None:
        self._order += 1
        heapq.heappush(self._ends, (end_s, self._order, job, index, well, tier))

    def _end(
        self,
        job: TransferJob,
        index: int,
        well: bool,
        tier: Tier | None,
        end_s: float,
        answers: OffloadingWorkerMetadata,
    ) -> None:
        answers.results[job.job_id, index] = {0: HopResult.DONE if well else HopResult.FAILED}
        if tier is not None:
            tier.ended()
            if job.direction is Direction.PROMOTE and well:
                self.brought.append(job)
            return
        self._copy_ends.pop(job.job_id, None)
        if job.direction is Direction.LOAD:
            self.ended_loads.append((job.request_id, well))
        for later in range(1, len(job.hops)):
            if well:
                self._ask(job, later, end_s)
            else:
                answers.results[job.job_id, later] = {0: HopResult.FAILED}
