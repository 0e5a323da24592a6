"""A copier that is told when to finish."""

import ctypes
from collections.abc import Collection
from dataclasses import dataclass

from kvtide.jobs import Direction, JobId
from kvtide.transfer.devices import CopyOutcome
from kvtide.transfer.plans import CopyPlan


@dataclass(slots=True)
class _Held:
    plan: CopyPlan
    cancelled: bool = False


class HeldDevice:
    """Copies nothing until it is told to, and then what is there at that moment.

    A copy that touches blocks which belong to somebody else by then shows up as wrong bytes, in host
    memory or on the device.

    Attributes:
        waited: Jobs that a step had to wait for, in order; they are finished by it.
        wedged: Jobs that end neither when waited for nor when cancelled.
    """

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.waited: list[JobId] = []
        self.wedged: set[JobId] = set()
        self.auto_finish = False
        self._open: dict[JobId, _Held] = {}
        self._ended: list[CopyOutcome] = []

    @property
    def held(self) -> list[JobId]:
        """Jobs submitted and not ended, in order of submission."""
        return list(self._open)

    def finish(self, job_id: JobId | None = None) -> None:
        """Copy now, all jobs or one."""
        for ended in list(self._open) if job_id is None else [job_id]:
            held = self._open.pop(ended)
            if not held.cancelled:
                _move(held.plan)
            self._note(ended, held.plan.byte_count, success=not held.cancelled)

    def fail(self, job_id: JobId | None = None) -> None:
        """End without copying a byte, all jobs or one."""
        for ended in list(self._open) if job_id is None else [job_id]:
            del self._open[ended]
            self._note(ended, 0, success=False)

    # -- DeviceCopier -----------------------------------------------------------------------------

    def forward_ended(self) -> None:
        """Do nothing: the model of a forward has ended when its call returns."""

    def submit(self, job_id: JobId, plan: CopyPlan, deadline_s: float) -> None:
        self._open[job_id] = _Held(plan)
        if self.auto_finish:
            self.finish(job_id)

    def poll(self) -> list[CopyOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_ids: Collection[JobId]) -> None:
        for job_id in job_ids:
            if (held := self._open.get(job_id)) is not None:
                held.cancelled = True

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        ended = True
        for job_id in job_ids:
            if job_id not in self._open:
                continue
            if job_id in self.wedged:
                ended = False
                continue
            self.waited.append(job_id)
            self.finish(job_id)
        return ended

    def close(self) -> None:
        self._open.clear()

    def _note(self, job_id: JobId, byte_count: int, success: bool) -> None:
        self._ended.append(CopyOutcome(job_id, success, byte_count if success else 0, 0.0, 0.0))


def _move(plan: CopyPlan) -> None:
    for source, target, size in zip(plan.source, plan.target, plan.size, strict=True):
        ctypes.memmove(int(target), int(source), int(size))
