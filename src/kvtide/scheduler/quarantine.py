"""Copies that began and do not end: nobody waits for them, and nobody gets what they still touch.

A copy that has not begun by its deadline is given up by the worker. One that has begun ends only when the
copier says that no byte will follow: until then its slots stay taken, its device blocks fenced, and those
of a load, which the engine frees when it is told that the load has failed, are held in the engine's own pool.
"""

import logging

from kvtide.jobs import Direction, JobId
from kvtide.manager.base import OffloadingManager
from kvtide.scheduler.holds import BlockHolds
from kvtide.scheduler.loads import LoadPlanner
from kvtide.scheduler.open_jobs import OpenJobs

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""A copy that has not begun by its deadline is given up by the worker; its answer gets so long to come."""


class Quarantine:
    """Open jobs that are overdue.

    Args:
        deadline_s: Of a copy, from its planning to its beginning.
        manager: Which chunk is where.
        jobs: All open jobs.
        loads: Who waits for them.
        holds: Through which blocks are held; where none can be, no load can be given up.
    """

    def __init__(
        self,
        deadline_s: float,
        manager: OffloadingManager,
        jobs: OpenJobs,
        loads: LoadPlanner,
        holds: BlockHolds,
    ) -> None:
        self._deadline_s = deadline_s
        self._manager = manager
        self._jobs = jobs
        self._loads = loads
        self._holds = holds
        self._given_up: set[JobId] = set()

    def note(self, now_s: float) -> None:
        """Let nobody wait any longer for what is overdue by now."""
        for status in self._jobs.overdue(now_s - self._deadline_s - GRACE_S):
            logger.warning(
                "%s %d of request %s has not ended after %.0f s",
                status.job.direction.value,
                status.job.job_id,
                status.job.request_id,
                now_s - status.planned_at_s,
            )
            if status.job.direction is Direction.STORE:
                for chunks in status.held:
                    self._manager.abandon_store(chunks.run, chunks.spec)
            elif self._holds.take(status):
                self._loads.give_up(status)
                self._given_up.add(status.job.job_id)

    def take(self) -> frozenset[JobId]:
        """Hand out the loads that were given up since the last step."""
        given_up, self._given_up = frozenset(self._given_up), set()
        return given_up
