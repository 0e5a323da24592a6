"""The worker half of a step: jobs in, copies under way, results out.

Knows jobs, the order in which they may begin, and time. Does not know keys or requests beyond the id
under which a load is reported. Never raises for what a copy did: a failure is a result.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtide.jobs import (
    COPIES,
    Direction,
    HopKey,
    HopResult,
    JobId,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    PoolReport,
    TransferJob,
)
from kvtide.metrics import MetricsDelta
from kvtide.transfer.devices import CopyOutcome
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.pool import HostPool
from kvtide.transfer.tier_hops import HopAnswers, TierHops

logger = logging.getLogger(__name__)

NO_NEWS = OffloadingWorkerMetadata()

CLOSE_PATIENCE_S = 5.0
"""So long an orderly end waits for calls to tiers."""

PATIENCE = 0.75
"""Share of the flush limit after which a copy is cancelled; the rest is for it to notice."""


@dataclass(slots=True)
class LoadResults:
    """Requests whose load has ended, and those among them whose load has failed."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class OffloadingWorker:
    """One rank's lanes.

    Args:
        rank: For its answers.
        pool: The rank's host pool.
        store: Device to host.
        load: Host to device.
        metrics: Where to count.
        flush_limit_s: How long a step may wait for a store before it is cancelled.
        hops: Tiers below the pool; None without any.
    """

    def __init__(
        self,
        rank: int,
        pool: HostPool,
        store: SingleDirectionOffloadingHandler,
        load: SingleDirectionOffloadingHandler,
        metrics: MetricsDelta,
        flush_limit_s: float,
        hops: TierHops | None = None,
    ) -> None:
        self._rank = rank
        self._pool = pool
        self._handlers = {Direction.STORE: store, Direction.LOAD: load}
        self._metrics = metrics
        self._flush_limit_s = flush_limit_s
        self._hops = hops
        self._open: dict[JobId, TransferJob] = {}
        self._deferred: list[TransferJob] = []  # stores whose forward has not ended yet
        # Loads behind a copy that still touches their blocks, and until when they wait.
        self._parked: list[tuple[TransferJob, float]] = []
        self._void: set[JobId] = set()  # end as failed, whatever their copy did
        self._given_up: set[JobId] = set()  # loads whose requests were told so before the copy has ended
        self._answers: dict[HopKey, HopResult] = {}
        self._loads = LoadResults()
        self._generation = 0
        self._unacknowledged: int | None = None  # a generation that has begun and was not told
        self._reported_slots: int | None = None
        self._begun: OffloadingConnectorMetadata | None = None

    # -- a step, in the engine's order ------------------------------------------------------------

    def begin_step(self, step: OffloadingConnectorMetadata) -> None:
        """Before the forward: stores of the last step go out, and what must not be overwritten is waited for.

        Called again with the same step, it has no effect.
        """
        if self._begun is step:
            return
        self._begun = step
        self._note_generation(step.generation, step.keeps_tiers)
        if self._hops is not None:
            self._hops.discard(step.discards)
            self._hops.cancel(step.jobs_to_cancel)
        for job_id in step.jobs_to_give_up & self._open.keys():
            self._give_up(self._open[job_id])
        ready, self._deferred = self._deferred, []
        for job in step.jobs:
            if job.direction not in COPIES:
                self._begin_below(job, 0)
                continue
            self._open[job.job_id] = job
            if job.direction is Direction.STORE:
                # A store that is to be flushed at once was planned when its request finished: the
                # forward that wrote its blocks is over.
                (ready if job.job_id in step.jobs_to_flush else self._deferred).append(job)
        for job in ready:
            self._submit(job)
        if step.jobs_to_flush:
            self._flush(step.jobs_to_flush)

    def start_loads(self, step: OffloadingConnectorMetadata) -> None:
        """Begin the loads of this step; one whose blocks are still read waits for that copy alone."""
        self.begin_step(step)
        for job in step.jobs:
            if job.direction is Direction.LOAD and job.job_id in self._open:
                self._parked.append((job, time.monotonic() + job.deadline_s))
        self._unpark()

    def forward_ended(self) -> None:
        """After the forward of a step, target and draft."""
        for handler in self._handlers.values():
            handler.forward_ended()

    def take_results(self) -> LoadResults:
        """Collect what ended, and begin what waited for it."""
        for direction, handler in self._handlers.items():
            for outcome in handler.get_finished():
                self._note_outcome(direction, outcome)
        self._unpark()
        if self._hops is not None:
            self._hops.poll()
        results, self._loads = self._loads, LoadResults()
        return results

    def take_answers(self) -> OffloadingWorkerMetadata | None:
        """Hand out what the scheduler side has to know; None when there is no news."""
        ready_slots = self._pool.ready_slots
        pools = {}
        if ready_slots != self._reported_slots:
            pools[self._rank] = PoolReport(ready_slots, self._pool.slot_count, self._pool.slot_bytes)
            self._reported_slots = ready_slots
        elif not self._answers and self._hops is None and self._unacknowledged is None:
            return None  # most steps
        answers = OffloadingWorkerMetadata(
            {key: {self._rank: result} for key, result in self._answers.items()}, pools
        )
        self._answers = {}
        if self._hops is not None:
            self._add_below(answers, self._hops.take_answers())
        if self._unacknowledged is not None and (self._hops is None or self._hops.generation_is_durable):
            answers.generations[self._rank] = self._unacknowledged
            self._unacknowledged = None
        return None if answers == NO_NEWS else answers

    def close(self) -> None:
        """End every copy; no byte is written after it returns."""
        for handler in self._handlers.values():
            handler.close()
        if self._hops is not None:
            self._hops.close(CLOSE_PATIENCE_S)
        self._pool.close()

    # -- inside -----------------------------------------------------------------------------------

    def _begin_below(self, job: TransferJob, first: int, success: bool = True) -> None:
        """Begin the hops of a job that lie below the pool, or answer for those that never will."""
        if len(job.hops) <= first:
            return
        if self._hops is None:
            logger.error("job %d leads to a tier that this rank has not got", job.job_id)
        elif success and job.generation == self._generation:
            self._hops.begin(job, first)
        else:
            self._hops.refuse(job, first)

    def _add_below(self, answers: OffloadingWorkerMetadata, below: HopAnswers) -> None:
        answers.results.update((key, {self._rank: result}) for key, result in below.results.items())
        answers.fates.update((key, {self._rank: fates}) for key, fates in below.fates.items())
        answers.tiers.update(((self._rank, tier), report) for tier, report in below.reports.items())
        answers.inventory = below.inventory

    def _note_generation(self, generation: int, keeps_tiers: bool) -> None:
        if generation == self._generation:
            return
        self._generation = self._unacknowledged = generation
        if self._hops is not None:
            self._hops.begin_generation(generation, keeps_tiers)
        # What an open load brings is of before the reset: the request has to compute instead.
        for job in self._open.values():
            if job.direction is Direction.LOAD:
                self._void.add(job.job_id)
        self._handlers[Direction.LOAD].cancel(self._void)

    def _give_up(self, job: TransferJob) -> None:
        """Let a request go on whose load does not end; nobody else gets its blocks before it has."""
        if any(parked.job_id == job.job_id for parked, _ in self._parked):
            self._parked = [parked for parked in self._parked if parked[0].job_id != job.job_id]
            self._end(job, success=False)
            return
        logger.error("load %d of request %s does not end; it is computed", job.job_id, job.request_id)
        self._void.add(job.job_id)
        self._given_up.add(job.job_id)
        self._handlers[Direction.LOAD].cancel({job.job_id})
        self._loads.finished.add(job.request_id)
        self._loads.failed.add(job.request_id)

    def _submit(self, job: TransferJob) -> None:
        if not job.hops or job.job_id in self._void:
            self._end(job, success=False)
            return
        try:
            self._handlers[job.direction].transfer_async(job.job_id, job.hops[0], job.deadline_s)
        except ValueError:
            logger.exception("job %d cannot be copied; it is answered as failed", job.job_id)
            self._end(job, success=False)

    def _unpark(self) -> None:
        if not self._parked:
            return
        now_s = time.monotonic()
        parked, self._parked = self._parked, []
        for job, until_s in parked:
            behind = any(other in self._open for other in job.after)
            if behind and now_s > until_s:
                self._end(job, success=False)
            elif behind and job.job_id not in self._void:
                self._parked.append((job, until_s))
            else:
                self._submit(job)

    def _flush(self, job_ids: Iterable[JobId]) -> None:
        """Wait for copies whose blocks the coming forward reuses; cancel those that take too long."""
        began_s = time.monotonic()
        flushed = [job_id for job_id in job_ids if job_id in self._open]
        # A load that has not begun must not begin in blocks that belong to somebody else now.
        for parked in [parked for parked in self._parked if parked[0].job_id in flushed]:
            self._parked.remove(parked)
            flushed.remove(parked[0].job_id)
            self._end(parked[0], success=False)
        self._metrics.add("flushed_stores", len(flushed))
        for direction, handler in self._handlers.items():
            waited = {job_id for job_id in flushed if self._open[job_id].direction is direction}
            if direction is Direction.STORE:
                # What a void store still reads is void too: no step waits for it again.
                waited -= self._void
            if not waited or handler.wait(waited, PATIENCE * self._flush_limit_s):
                continue
            self._void |= waited
            handler.cancel(waited)
            while not handler.wait(waited, (1 - PATIENCE) * self._flush_limit_s):
                if direction is Direction.STORE:
                    # It only reads: what it has read is void, and its slots stay taken until it ends.
                    logger.error(
                        "stores %s do not end when cancelled; their slots stay taken", sorted(waited)
                    )
                    break
                # It writes: nobody else may have these blocks before it has stopped.
                logger.error("loads %s do not end when cancelled; the step waits", sorted(waited))
        self._metrics.add("flush_seconds", time.monotonic() - began_s)

    def _note_outcome(self, direction: Direction, outcome: CopyOutcome) -> None:
        job = self._open.get(outcome.job_id)
        if job is None:
            return
        self._metrics.add("transfer_bytes", outcome.byte_count, direction.value)
        self._metrics.add("transfer_seconds", outcome.copy_s, direction.value)
        self._metrics.observe("transfer_latency_seconds", outcome.latency_s, direction.value)
        self._end(job, outcome.success and job.job_id not in self._void)

    def _end(self, job: TransferJob, success: bool) -> None:
        del self._open[job.job_id]
        self._void.discard(job.job_id)
        name = "transfers" if success else "transfer_failures"
        self._metrics.add(name, 1, job.direction.value)
        self._answers[job.job_id, 0] = HopResult.DONE if success else HopResult.FAILED
        self._begin_below(job, 1, success)
        told = job.job_id in self._given_up
        self._given_up.discard(job.job_id)
        if job.direction is Direction.LOAD and not told:
            self._loads.finished.add(job.request_id)
            if not success:
                self._loads.failed.add(job.request_id)
