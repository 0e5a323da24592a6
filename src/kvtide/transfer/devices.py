"""Who copies: the interface of a copier, and the one for the CPU backend.

A copier owns one direction. It takes plans, says later how they ended, and never blocks its caller.
After the first byte of a copy it states an end only when no byte will follow.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvtide.jobs import JobId
from kvtide.transfer.plans import CopyPlan


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a copy ended.

    Attributes:
        job_id: Of the copy.
        success: Every byte was copied.
        byte_count: Bytes copied.
        copy_s: Time spent copying.
        latency_s: From submission to the end.
    """

    job_id: JobId
    success: bool
    byte_count: int
    copy_s: float
    latency_s: float


class DeviceCopier(Protocol):
    """One direction of copies between a device and the host pool."""

    def forward_ended(self) -> None:
        """Note that the engine has submitted a step; copies submitted from now on come after it."""

    def submit(self, job_id: JobId, plan: CopyPlan, deadline_s: float) -> None:
        """Take a copy; it fails if it has not begun ``deadline_s`` seconds from now."""

    def poll(self) -> list[CopyOutcome]:
        """Hand out the copies that ended since the last call."""

    def cancel(self, job_ids: Collection[JobId]) -> None:
        """Ask copies to end; they end as failed unless the last byte is written already."""

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        """Wait until these copies have ended; ids that are not open count as ended.

        Returns:
            False when ``timeout_s`` seconds were not enough.
        """

    def close(self) -> None:
        """Cancel everything and end; no byte is written after it returns."""


@dataclass(slots=True)
class _Copy:
    job_id: JobId
    plan: CopyPlan
    submitted_s: float
    begin_by_s: float
    left_bytes: int
    position: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    cancelled: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.uint8))
    copy_s: float = 0.0

    @property
    def begun(self) -> bool:
        return bool(self.copy_s)


class CPUCopier:
    """Copies by one thread that never calls torch, for the CPU backend.

    Short copies go before long ones, in slices, so that a short load does not queue behind a long one;
    whoever has waited for ``PATIENCE_S`` goes first.
    """

    SLICE_BYTES = 8 << 20
    PATIENCE_S = 1.0

    def __init__(self, name: str) -> None:
        # Not at the top: vLLM 0.32 looks through every module there is while a CPU worker starts
        # (triton_utils/dispatcher.py) and stumbles over those of numba's llvmlite.
        from kvtide.transfer.kernels import copy_pieces

        self._copy_pieces = copy_pieces
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, _Copy]] = []
        self._order = itertools.count()
        self._open: dict[JobId, _Copy] = {}
        self._ended: list[CopyOutcome] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"kvtide-{name}", daemon=True)
        self._thread.start()

    def forward_ended(self) -> None:
        """Do nothing: on this backend a forward has ended when its call returns."""

    def submit(self, job_id: JobId, plan: CopyPlan, deadline_s: float) -> None:
        now_s = time.monotonic()
        copy = _Copy(job_id, plan, now_s, now_s + deadline_s, plan.byte_count)
        with self._changed:
            self._open[job_id] = copy
            self._push(copy)
            self._changed.notify_all()

    def poll(self) -> list[CopyOutcome]:
        if not self._ended:  # an empty list is seen without the lock; a late one comes with the next step
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_ids: Collection[JobId]) -> None:
        with self._changed:
            for job_id in job_ids:
                if (copy := self._open.get(job_id)) is not None:
                    copy.cancelled[0] = 1

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(job_id in self._open for job_id in job_ids), timeout_s
            )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            for copy in self._open.values():
                copy.cancelled[0] = 1
            self._changed.notify_all()
        self._thread.join()

    def _push(self, copy: _Copy) -> None:
        impatient = time.monotonic() - copy.submitted_s > self.PATIENCE_S
        heapq.heappush(self._queue, (0 if impatient else copy.left_bytes, next(self._order), copy))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                copy = heapq.heappop(self._queue)[2]
            ended = self._copy_slice(copy)
            with self._changed:
                if ended:
                    self._end(copy)
                else:
                    self._push(copy)

    def _copy_slice(self, copy: _Copy) -> bool:
        """Copy some more; True when no byte will follow."""
        began_s = time.monotonic()
        if copy.cancelled[0] or (not copy.begun and began_s > copy.begin_by_s):
            return True
        plan = copy.plan
        copy.left_bytes -= self._copy_pieces(
            plan.source, plan.target, plan.size, copy.position, self.SLICE_BYTES, copy.cancelled
        )
        copy.copy_s += time.monotonic() - began_s
        return copy.left_bytes == 0 or bool(copy.cancelled[0])

    def _end(self, copy: _Copy) -> None:
        del self._open[copy.job_id]
        self._ended.append(
            CopyOutcome(
                copy.job_id,
                copy.left_bytes == 0,
                copy.plan.byte_count - copy.left_bytes,
                copy.copy_s,
                time.monotonic() - copy.submitted_s,
            )
        )
        self._changed.notify_all()
