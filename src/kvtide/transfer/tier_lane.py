"""The lane of one tier below host memory: its threads, its queue, its deadlines.

Takes jobs of several chunks, hands each chunk to a thread, and says later how each ended. No call here waits
for the tier. Blocking I/O cannot be interrupted: a call that is late keeps its thread and its buffer until it
returns; another thread takes its place, so many times, and then the tier is out. Knows slots of memory and
names of chunks; does not know requests or what is stored where.
"""

import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtide.errors import CorruptRecordError, TierError, TierFullError
from kvtide.jobs import JobId
from kvtide.tiers.base import Tier
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.records import ChunkName

logger = logging.getLogger(__name__)

MISS = "miss"
"""Beside the names of errors: a read that found nothing."""


class TierDirection(IntEnum):
    """Seen from the tier; what is read goes first."""

    READ = 0
    WRITE = 1


@dataclass(frozen=True, slots=True)
class TierPart:
    """One chunk: its name, and its slot in the pool as ``uint8[n]``."""

    name: ChunkName
    payload: memoryview


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """How a job ended.

    Attributes:
        job_id: Of the job.
        direction: Read or written.
        done: Per part, whether its bytes are where they should be.
        byte_count: Bytes of those.
        busy_s: Seconds that threads spent in the tier.
        latency_s: From submission to the end.
        trouble: What happened to the others: names of errors, ``MISS``, "late", "cancelled", "out".
    """

    job_id: JobId
    direction: TierDirection
    done: tuple[bool, ...]
    byte_count: int
    busy_s: float
    latency_s: float
    trouble: Counter[str]


@dataclass(slots=True)
class _Job:
    job_id: JobId
    direction: TierDirection
    parts: Sequence[TierPart]
    submitted_s: float
    deadline_s: float
    done: list[bool]
    left: int
    busy_s: float = 0.0
    cancelled: bool = False
    trouble: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Call:
    """One call that is under way, and since when."""

    began_s: float
    until_s: float
    late: bool = False


class TierLane:
    """Threads before a tier.

    Args:
        tier: Owned from now on.
        name: Of the tier, for threads and logs.
        thread_count: Calls at once.
        queue_bytes: Of writes that may wait or be under way; a write beyond that is not taken.
        late_limit: Calls that may be late at once before the tier is out.
        breaker: Leaves the tier out after trouble.
    """

    def __init__(
        self,
        tier: Tier,
        name: str,
        thread_count: int,
        queue_bytes: int,
        late_limit: int = 4,
        breaker: Breaker | None = None,
    ) -> None:
        self._tier = tier
        self._name = name
        self._queue_bytes = queue_bytes
        self._late_limit = late_limit
        self._breaker = breaker or Breaker()
        self._changed = threading.Condition()
        self._queue: list[tuple[TierDirection, int, _Job, int]] = []
        self._order = itertools.count()
        self._open: dict[JobId, _Job] = {}
        self._ended: list[TierOutcome] = []
        self._calls: dict[int, _Call] = {}
        self._written_bytes = 0  # of writes that have not ended
        self._full = False
        self._closing = False
        self._surplus = 0  # threads that end when their late call has returned
        self._thread_numbers = itertools.count()
        for _ in range(thread_count):
            self._start_thread()

    # -- what is asked ------------------------------------------------------------------------------

    def submit(
        self, job_id: JobId, direction: TierDirection, parts: Sequence[TierPart], deadline_s: float
    ) -> bool:
        """Take a job; False when its bytes do not fit the queue, and nothing was taken."""
        now_s = time.monotonic()
        byte_count = sum(part.payload.nbytes for part in parts)
        with self._changed:
            if direction is TierDirection.WRITE:
                if self._written_bytes + byte_count > self._queue_bytes:
                    return False
                self._written_bytes += byte_count
            job = _Job(job_id, direction, parts, now_s, deadline_s, [False] * len(parts), len(parts))
            self._open[job_id] = job
            for index in range(len(parts)):
                heapq.heappush(self._queue, (direction, next(self._order), job, index))
            if not parts:
                self._end(job)
            self._changed.notify_all()
        return True

    def poll(self) -> list[TierOutcome]:
        """Hand out the jobs that ended since the last call, and look for calls that are late."""
        now_s = time.monotonic()
        with self._changed:
            for call in self._calls.values():
                if not call.late and now_s > call.until_s:
                    self._note_late(call, now_s)
            if self._is_out:
                self._fail_waiting("out")
            ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_ids: Collection[JobId]) -> None:
        """Ask jobs to end: what has not begun does not begin."""
        with self._changed:
            for job_id in job_ids:
                if (job := self._open.get(job_id)) is not None:
                    job.cancelled = True
            self._fail_waiting("cancelled", only_cancelled=True)

    @property
    def state(self) -> BreakerState:
        """Of the breaker; a tier whose calls do not return is out."""
        with self._changed:
            return BreakerState.OPEN if self._is_out else self._breaker.state(time.monotonic())

    @property
    def takes_writes(self) -> bool:
        """False while the medium is full."""
        return not self._full

    @property
    def late_count(self) -> int:
        """Calls that are late and have not returned."""
        with self._changed:
            return sum(call.late for call in self._calls.values())

    @property
    def queued_bytes(self) -> int:
        """Bytes of writes that have not ended."""
        with self._changed:
            return self._written_bytes

    def room_was_made(self) -> None:
        """Note that something was discarded: a full medium may take writes again."""
        self._full = False

    def close(self, patience_s: float = 5.0) -> bool:
        """End; False when calls did not return in time, whose buffers must stay."""
        with self._changed:
            self._closing = True
            self._fail_waiting("cancelled")
            self._changed.notify_all()
            returned = self._changed.wait_for(lambda: not self._calls, patience_s)
        if returned:
            self._tier.close()
        return returned

    # -- threads --------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        number = next(self._thread_numbers)
        thread = threading.Thread(
            target=self._work, args=(number,), name=f"kvtide-{self._name}-{number}", daemon=True
        )
        thread.start()

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                _, _, job, index = heapq.heappop(self._queue)
                refusal = self._refusal_of(job)
                if refusal is not None:
                    self._note(job, index, False, refusal)
                    continue
                now_s = time.monotonic()
                self._calls[number] = _Call(now_s, now_s + job.deadline_s)
            done, trouble = self._call(job, job.parts[index])
            with self._changed:
                call = self._calls.pop(number)
                job.busy_s += time.monotonic() - call.began_s
                self._judge(call, done, trouble)
                self._note(job, index, done, trouble)
                self._changed.notify_all()
                if call.late and self._surplus:
                    self._surplus -= 1
                    return

    def _refusal_of(self, job: _Job) -> str | None:
        now_s = time.monotonic()
        if job.cancelled:
            return "cancelled"
        if now_s > job.submitted_s + job.deadline_s:
            return "late"
        if self._is_out or not self._breaker.allows(now_s):
            return "out"
        if job.direction is TierDirection.WRITE and self._full:
            return TierFullError.__name__
        return None

    def _call(self, job: _Job, part: TierPart) -> tuple[bool, str | None]:
        try:
            if job.direction is TierDirection.WRITE:
                self._tier.write(part.name, part.payload, job.deadline_s)
                return True, None
            found = self._tier.read_into(part.name.key, part.payload, job.deadline_s)
            return found, None if found else MISS
        except TierError as error:
            logger.debug("%s: %s", self._name, error)
            return False, type(error).__name__
        except Exception:  # of a tier that others wrote: the thread and the other chunks go on
            logger.exception("%s: a call failed in a way that no tier may", self._name)
            return False, "Exception"

    # -- books; the lock is held ------------------------------------------------------------------------

    @property
    def _is_out(self) -> bool:
        return sum(call.late for call in self._calls.values()) > self._late_limit

    def _judge(self, call: _Call, done: bool, trouble: str | None) -> None:
        """Tell the breaker; a miss or a damaged record is no trouble of the medium."""
        if trouble == TierFullError.__name__:
            if not self._full:
                logger.warning("%s is full: writes are skipped until there is room", self._name)
            self._full = True
        elif done or trouble in (MISS, CorruptRecordError.__name__):
            if not call.late:
                self._breaker.succeeded()
        elif self._breaker.failed(time.monotonic()):
            logger.warning("%s is left out for a while: %s", self._name, trouble)

    def _note_late(self, call: _Call, now_s: float) -> None:
        call.late = True
        if self._breaker.failed(now_s):
            logger.warning("%s is left out for a while: calls do not return in time", self._name)
        if not self._is_out:
            self._surplus += 1
            self._start_thread()

    def _fail_waiting(self, reason: str, only_cancelled: bool = False) -> None:
        waiting = self._queue
        self._queue = []
        for entry in waiting:
            _, _, job, index = entry
            if only_cancelled and not job.cancelled:
                self._queue.append(entry)
            else:
                self._note(job, index, False, reason)
        heapq.heapify(self._queue)

    def _note(self, job: _Job, index: int, done: bool, trouble: str | None) -> None:
        job.done[index] = done
        if trouble is not None:
            job.trouble[trouble] += 1
        if job.direction is TierDirection.WRITE:
            self._written_bytes -= job.parts[index].payload.nbytes
        job.left -= 1
        if not job.left:
            self._end(job)

    def _end(self, job: _Job) -> None:
        del self._open[job.job_id]
        byte_count = sum(part.payload.nbytes for part, done in zip(job.parts, job.done, strict=True) if done)
        self._ended.append(
            TierOutcome(
                job.job_id,
                job.direction,
                tuple(job.done),
                byte_count,
                job.busy_s,
                time.monotonic() - job.submitted_s,
                job.trouble,
            )
        )
