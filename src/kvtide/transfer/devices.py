"""Who copies: the interface of a copier, and the one for the CPU backend.

A copier owns one direction. It takes plans, says later how they ended, and never blocks its caller.
After the first byte of a copy it states an end only when no byte will follow.
"""

import contextlib
import heapq
import itertools
import os
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


_YIELD, _CANCEL = 1, 2
"""Why a copy that is under way is asked to stop."""


@dataclass(eq=False, slots=True)
class _Copy:
    job_id: JobId
    plan: CopyPlan
    submitted_s: float
    begin_by_s: float
    total_bytes: int
    claimed: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    stop: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.uint8))
    end: np.ndarray | None = None  # bytes up to the end of each piece
    copied_bytes: int = 0
    threads: int = 0  # inside
    queued: bool = False  # one more may come
    begun: bool = False
    busy_since_s: float = 0.0
    copy_s: float = 0.0

    @property
    def cancelled(self) -> bool:
        return bool(self.stop[0] == _CANCEL)

    @property
    def is_claimed(self) -> bool:
        return bool(self.claimed[0] >= self.total_bytes)


class CPUCopier:
    """Copies by threads that never call torch, for the CPU backend.

    Short copies go before long ones: a long one under way gives up its threads when a shorter one has none,
    and goes on later. Whoever has waited for ``PATIENCE_S`` goes first, and is not interrupted any more.

    Args:
        name: Of the threads.
        thread_count: Threads that share the copies, and among them those of ``2 * SHARE_BYTES`` or more.
        cores: On which they run. The thread that makes this object may be bound to a single one, and what it
            starts would be, too. None: wherever that thread may run.
    """

    SHARE_BYTES = 2 << 20
    PATIENCE_S = 1.0

    def __init__(self, name: str, thread_count: int = 1, cores: Collection[int] | None = None) -> None:
        # Not at the top: vLLM 0.32 looks through every module there is while a CPU worker starts
        # (triton_utils/dispatcher.py) and stumbles over those of numba's llvmlite.
        from kvtide.transfer.kernels import copy_share

        self._copy_share = copy_share
        self._cores = cores
        lock = threading.Lock()
        self._wanted = threading.Condition(lock)  # threads wait for work
        self._changed = threading.Condition(lock)  # others wait for ends
        self._heap: list[tuple[int, int, _Copy]] = []
        self._order = itertools.count()
        self._open: dict[JobId, _Copy] = {}  # in the order of submission
        self._under_way: set[_Copy] = set()
        self._ended: list[CopyOutcome] = []
        self._idle = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtide-{name}-{index}", daemon=True)
            for index in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def forward_ended(self) -> None:
        """Do nothing: on this backend a forward has ended when its call returns."""

    def submit(self, job_id: JobId, plan: CopyPlan, deadline_s: float) -> None:
        now_s = time.monotonic()
        copy = _Copy(job_id, plan, now_s, now_s + deadline_s, plan.byte_count)
        with self._changed:
            self._open[job_id] = copy
            if self._closing:
                self._end(copy)
                return
            self._queue(copy)
            self._make_way()

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
                    self._stop(copy)

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(job_id in self._open for job_id in job_ids), timeout_s
            )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            for copy in list(self._open.values()):
                self._stop(copy)
            self._wanted.notify_all()
        for thread in self._threads:
            thread.join()

    # -- inside; with the lock, but for the copying -------------------------------------------------

    def _queue(self, copy: _Copy) -> None:
        copy.queued = True
        heapq.heappush(self._heap, (copy.total_bytes, next(self._order), copy))
        self._wanted.notify(self._most_threads(copy))

    def _most_threads(self, copy: _Copy) -> int:
        return max(1, copy.total_bytes // self.SHARE_BYTES)

    def _first(self) -> _Copy | None:
        """Find who is next."""
        while self._heap and not self._heap[0][2].queued:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        oldest = next(copy for copy in self._open.values() if copy.queued)
        return oldest if self._is_impatient(oldest) else self._heap[0][2]

    def _is_impatient(self, copy: _Copy) -> bool:
        return time.monotonic() - copy.submitted_s > self.PATIENCE_S

    def _make_way(self) -> None:
        """Let the longest copy under way give up its threads, if a shorter one has none."""
        first = self._first()
        if first is None or first.threads or self._idle:
            return
        longest = max(self._under_way, key=lambda copy: copy.total_bytes, default=None)
        if longest is None or longest.stop[0] or self._is_impatient(longest):
            return
        if longest.total_bytes > first.total_bytes or self._is_impatient(first):
            longest.stop[0] = _YIELD

    def _take(self) -> _Copy | None:
        """Enter the next copy."""
        while (copy := self._first()) is not None:
            now_s = time.monotonic()
            if not copy.begun and now_s > copy.begin_by_s:
                self._end(copy)
                continue
            if copy.stop[0] == _YIELD:  # whom it made way for has been taken before it
                copy.stop[0] = 0
            if copy.threads == 0:
                copy.busy_since_s = now_s
                self._under_way.add(copy)
            copy.begun = True
            copy.threads += 1
            copy.queued = copy.threads < self._most_threads(copy)
            self._make_way()
            return copy
        return None

    def _work(self) -> None:
        if self._cores:
            with contextlib.suppress(OSError):  # they were taken from this process since
                os.sched_setaffinity(0, self._cores)
        while True:
            with self._wanted:
                while (copy := self._take()) is None:
                    if self._closing:
                        return
                    self._idle += 1
                    self._wanted.wait()
                    self._idle -= 1
            self._leave(copy, self._copied(copy))

    def _copied(self, copy: _Copy) -> int:
        """Copy what nobody else does, without the lock; returns bytes."""
        source, target, size = copy.plan.columns
        if (end := copy.end) is None:
            end = copy.end = np.cumsum(size)
        return int(self._copy_share(source, target, end, copy.claimed, copy.stop))

    def _leave(self, copy: _Copy, byte_count: int) -> None:
        with self._changed:
            copy.copied_bytes += byte_count
            copy.threads -= 1
            if copy.threads == 0:
                self._under_way.remove(copy)
                copy.copy_s += time.monotonic() - copy.busy_since_s
            if copy.is_claimed or copy.cancelled:
                copy.queued = False
                if copy.threads == 0:
                    self._end(copy)
            elif not copy.queued:
                self._queue(copy)

    def _stop(self, copy: _Copy) -> None:
        copy.stop[0] = _CANCEL
        copy.queued = False
        if copy.threads == 0:
            self._end(copy)

    def _end(self, copy: _Copy) -> None:
        """Note the end: nobody is inside, and nobody will be."""
        copy.queued = False
        del self._open[copy.job_id]
        self._ended.append(
            CopyOutcome(
                copy.job_id,
                copy.begun and copy.copied_bytes == copy.total_bytes,
                copy.copied_bytes,
                copy.copy_s,
                time.monotonic() - copy.submitted_s,
            )
        )
        self._changed.notify_all()
