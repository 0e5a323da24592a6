"""The lane of one tier below host memory, with threads: its queue, its deadlines.

No call here waits for the tier. Blocking I/O cannot be interrupted: a call that is late keeps its thread and
its buffer until it returns; another thread takes its place, so many times, and then the tier is out. Knows
when which call begins and what its end means; the books of jobs are ``JobBooks``.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtide.errors import TierFullError
from kvtide.jobs import JobId
from kvtide.keys import OffloadKey
from kvtide.tiers.base import Tier
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.records import RecordHeader
from kvtide.transfer.lane import (
    CANCELLED,
    LATE,
    OUT,
    Lane,
    PartFate,
    TierDirection,
    TierOutcome,
    TierPart,
    TierState,
)
from kvtide.transfer.lane_calls import NODE, Call, CallEnd, Kind, made, run_chunks_of, sizes_of
from kvtide.transfer.lane_jobs import JobBooks, LaneJob
from kvtide.transfer.lane_survey import Survey
from kvtide.transfer.read_pace import ReadPace

logger = logging.getLogger(__name__)

FULL_REST_S = 30.0
"""After which a full medium is tried again though nothing was discarded: others may have made room."""

ROOM_TOLD_S = 30.0
"""So long it has not been full when that is told: a tier at its limit is full now and then."""

DISCARDS_AT_ONCE = 256

SIZES_REST_S = 5.0
"""After which a tier is asked how full it is though nothing was written: others may have made room."""

RETRY_S = 1.0
"""Between attempts at what has to happen: a generation, discards of a tier that was left out."""

FULL = TierFullError.__name__


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How a tier is driven.

    Attributes:
        thread_count: Calls at once.
        queue_bytes: Of writes that may wait or be under way; a job that goes beyond that is not taken.
        deadline_s: For each call.
        wait_limit_s: For how long a read may wait for its turn.
        late_limit: Calls that may be late at once before the tier is out.
    """

    thread_count: int = 4
    queue_bytes: int = 256 << 20
    deadline_s: float = 2.0
    wait_limit_s: float = 30.0
    late_limit: int = 4


class TierLane(Lane):
    """Threads before a tier.

    Args:
        tier: Owned from now on; opened in the background.
        name: Of the tier, for threads and logs.
        settings: How it is driven.
        breaker: Leaves the tier out after trouble.
    """

    def __init__(
        self, tier: Tier, name: str, settings: LaneSettings | None = None, breaker: Breaker | None = None
    ) -> None:
        self.name = name
        self._tier = tier
        self._settings = settings or LaneSettings()
        self._breaker = breaker or Breaker()
        self._changed = threading.Condition()
        self._books = JobBooks(self._settings.queue_bytes, time.monotonic)
        self._calls: dict[int, Call] = {}
        self._pace = ReadPace(self._settings.thread_count)
        self._discards: deque[OffloadKey] = deque()
        self._generations: deque[bool] = deque()  # asked for, and whether trusted
        self._generations_begun = 0
        self._again_s = 0.0  # when what failed and has to happen is tried again
        self._late_jobs: set[JobId] = set()
        self._full_s = 0.0
        self._full_until_s: float | None = None
        self._full_told = self._out_told = False
        self._sizes = (0, 0)  # capacity and use, as a thread last saw them
        self._sizes_due_s = 0.0
        self._closing = False
        self._surplus = 0  # threads that end when their late call has returned
        self._thread_count = 0
        self._survey = Survey(tier, name, self._changed, self._note_opened)
        for _ in range(self._settings.thread_count):
            self._start_thread()

    # -- what is asked ------------------------------------------------------------------------------

    def submit(
        self,
        job_id: JobId,
        direction: TierDirection,
        parts: Sequence[TierPart],
        lead: tuple[bytes, ...] = (),
    ) -> bool:
        with self._changed:
            taken = self._books.take(job_id, direction, parts, lead)
            self._changed.notify(len(parts))
        return taken

    def cancel(self, job_ids: Collection[JobId]) -> None:
        with self._changed:
            for job_id in job_ids:
                if (job := self._books.job(job_id)) is not None:
                    job.cancelled = True
            self._books.fail_waiting(CANCELLED, lambda job: job.cancelled)

    def discard(self, keys: Collection[OffloadKey]) -> None:
        with self._changed:
            self._discards.extend(keys)
            self._changed.notify_all()

    def begin_generation(self, trusted: bool = False) -> None:
        with self._changed:
            self._generations.append(trusted)
            self._again_s = 0.0
            for job in self._books.open_jobs():
                job.voided = True
            self._books.fail_waiting(CANCELLED)
            self._survey.forget()
            self._changed.notify_all()

    @property
    def generations_begun(self) -> int:
        return self._generations_begun

    def poll(self) -> list[TierOutcome]:
        with self._changed:
            self._look()
            return self._books.take_ended()

    def take_late(self) -> set[JobId]:
        with self._changed:
            self._look()
            late, self._late_jobs = self._late_jobs, set()
        return late

    def take_inventory(self, limit: int) -> list[RecordHeader] | None:
        with self._changed:
            return self._survey.take(limit)

    def recount(self) -> None:
        with self._changed:
            self._survey.begin()

    def state(self) -> TierState:
        now_s = time.monotonic()
        with self._changed:
            self._look()
            capacity_bytes, used_bytes = self._sizes
            return TierState(
                BreakerState.OPEN if self._is_out else self._breaker.state(now_s),
                not self._is_full(now_s),
                capacity_bytes,
                used_bytes,
                self._late_count,
                self._survey.opened,
                self._pace.chunk_s(now_s),
            )

    @property
    def queued_bytes(self) -> int:
        """Bytes of writes that have not ended."""
        with self._changed:
            return self._books.write_bytes

    def close(self, patience_s: float = 5.0) -> bool:
        with self._changed:
            self._closing = True
            self._survey.close()
            self._books.fail_waiting(CANCELLED)
            self._changed.notify_all()
            ended = self._changed.wait_for(
                lambda: not self._thread_count and not self._survey.is_under_way, patience_s
            )
        if ended:
            self._tier.close()
        return ended

    # -- threads --------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._thread_count += 1
        threading.Thread(target=self._work, name=f"kvtide-{self.name}", daemon=True).start()

    def _work(self) -> None:
        while (call := self._begun()) is not None:
            end = made(self._tier, call, self.name, self._settings.deadline_s)
            # Reads leave it as it is, and asking costs as much as the lane's own part of one.
            is_plain_read = call.kind is Kind.READ and end.fate is PartFate.DONE
            sizes = None if is_plain_read else sizes_of(self._tier, self.name)
            with self._changed:
                del self._calls[id(call)]
                if not is_plain_read:
                    self._note_sizes(sizes)
                self._judge(call, end)
                self._settle(call, end)
                self._tell()
                if self._frees_others(call):
                    self._changed.notify_all()
                if call.late and self._surplus:
                    self._surplus -= 1
                    self._thread_count -= 1
                    return

    def _begun(self) -> Call | None:
        """Wait for the next call to make; None when there will be none."""
        with self._changed:
            while (call := self._next()) is None:
                if self._closing and not self._has_duties:
                    self._thread_count -= 1
                    self._changed.notify_all()
                    return None
                self._changed.wait(RETRY_S if self._discards or self._generations else None)
            self._calls[id(call)] = call
            return call

    def _note_opened(self) -> None:
        """Hear of it from the survey's thread, which does not hold the lock."""
        sizes = sizes_of(self._tier, self.name)
        with self._changed:
            self._note_sizes(sizes)

    def _note_sizes(self, sizes: tuple[int, int] | None) -> None:
        self._sizes, self._sizes_due_s = sizes or self._sizes, time.monotonic() + SIZES_REST_S

    # -- which call is next; the lock is held ---------------------------------------------------------

    @property
    def _has_duties(self) -> bool:
        """Whether something waits that has to happen even at the end, and can."""
        now_s = time.monotonic()
        if not self._survey.may_be_opened:
            return False
        if self._generations:
            return now_s >= self._again_s or not self._closing
        return bool(self._discards) and self._breaker.state(now_s) is not BreakerState.OPEN

    def _next(self) -> Call | None:
        now_s = time.monotonic()
        if not self._survey.opened or self._is_out:
            return None
        if self._generations:
            return self._generation_call(now_s)
        if self._discards and self._breaker.state(now_s) is not BreakerState.OPEN:
            keys = [self._discards.popleft() for _ in range(min(DISCARDS_AT_ONCE, len(self._discards)))]
            return Call(Kind.DISCARD, now_s, keys=keys)
        for direction, kind in ((TierDirection.READ, Kind.READ), (TierDirection.WRITE, Kind.WRITE)):
            # A chunk that is forgotten and written anew: in this order.
            if kind is Kind.WRITE and self._under_way(Kind.DISCARD):
                continue
            queue = self._books.waiting[direction]
            while queue:
                waiting = queue.popleft()
                refusal = self._refusal_of(waiting.job, now_s)
                if refusal is None:
                    most = run_chunks_of(self._tier, waiting.part.payload.nbytes, self.name)
                    return Call(kind, now_s, self._books.neighbours(waiting, most))
                self._books.note(waiting, PartFate.FAILED, refusal)
        if now_s >= self._sizes_due_s and not self._under_way(Kind.SIZES):
            return Call(Kind.SIZES, now_s)
        return None

    def _generation_call(self, now_s: float) -> Call | None:
        """What is being written belongs to before, and nothing else begins until that is settled."""
        if now_s < self._again_s or self._under_way(Kind.WRITE) or self._under_way(Kind.GENERATION):
            return None
        return Call(Kind.GENERATION, now_s, trusted=self._generations[0])

    def _frees_others(self, call: Call) -> bool:
        """Whether with the end of a call others may begin that were held up by it."""
        settles = call.kind in (Kind.DISCARD, Kind.GENERATION)
        return settles or call.late or bool(self._generations) or self._closing

    def _under_way(self, kind: Kind) -> bool:
        return any(call.kind is kind and not call.late for call in self._calls.values())

    def _refusal_of(self, job: LaneJob, now_s: float) -> str | None:
        if job.direction is TierDirection.READ and self._waited_too_long(job, now_s):
            return LATE
        if job.direction is TierDirection.WRITE and self._is_full(now_s):
            return FULL
        return None if self._breaker.allows(now_s) else OUT

    def _waited_too_long(self, job: LaneJob, now_s: float) -> bool:
        return now_s > job.submitted_s + self._settings.wait_limit_s

    # -- what an end means; the lock is held ------------------------------------------------------------

    def _settle(self, call: Call, end: CallEnd) -> None:
        if call.kind is Kind.GENERATION:
            if end.fate is PartFate.DONE:
                self._generations.popleft()
                self._generations_begun += 1
            else:
                self._again_s = time.monotonic() + RETRY_S
        elif call.kind is Kind.DISCARD:
            self._full_until_s = None
        elif call.waiting:
            job = call.waiting[0].job
            job.busy_s += time.monotonic() - call.began_s
            for waiting, (fate, trouble) in zip(call.waiting, end.parts, strict=True):
                if not job.voided:
                    self._books.note(waiting, fate, trouble)
                    continue
                # A write that was so late that the reset did not wait for it may have come after it.
                if call.kind is Kind.WRITE and call.late:
                    self._discards.append(waiting.part.name.key)
                self._books.note(waiting, PartFate.FAILED, CANCELLED)

    def _judge(self, call: Call, end: CallEnd) -> None:
        """Tell the breaker; a miss, a damaged record or one of many nodes is no trouble of the medium."""
        now_s = time.monotonic()
        if call.kind is Kind.READ and end.trouble != NODE:
            self._pace.note(now_s - call.began_s, len(call.waiting), now_s)
        if end.trouble == FULL:
            self._full_s, self._full_until_s = now_s, now_s + FULL_REST_S
            self._books.fail_waiting(FULL, directions=[TierDirection.WRITE])
            if not self._full_told:
                logger.warning("%s is full: writes are skipped until there is room", self.name)
            self._full_told = True
        elif end.fate is PartFate.FAILED:
            self._breaker.failed(now_s)
        elif (
            end.trouble != NODE and not call.late and call.kind not in (Kind.DISCARD, Kind.SIZES)
        ):  # whose trouble is not told
            self._breaker.succeeded()
            if call.kind is Kind.WRITE and self._full_told and call.began_s >= self._full_s + ROOM_TOLD_S:
                logger.warning("%s has room again", self.name)
                self._full_told = False

    def _look(self) -> None:
        """Find calls that are late, and what has waited too long."""
        now_s = time.monotonic()
        for call in self._calls.values():
            if not call.late and now_s > call.began_s + self._settings.deadline_s:
                self._note_late(call, now_s)
        self._books.fail_first(LATE, TierDirection.READ, lambda job: self._waited_too_long(job, now_s))
        if self._is_out:
            self._books.fail_waiting(OUT)
        if now_s >= self._sizes_due_s:
            self._changed.notify()
        self._tell()

    def _note_late(self, call: Call, now_s: float) -> None:
        call.late = True
        self._breaker.failed(now_s)
        if call.waiting and not call.waiting[0].job.told_late:
            call.waiting[0].job.told_late = True
            self._late_jobs.add(call.waiting[0].job.job_id)
        if not self._is_out:
            self._surplus += 1
            self._start_thread()

    def _tell(self) -> None:
        """One line when the tier is left out, one when it is back."""
        out = self._is_out or self._breaker.state(time.monotonic()) is not BreakerState.CLOSED
        if out and not self._out_told:
            logger.warning("%s is left out for a while: it fails or does not answer in time", self.name)
        elif self._out_told and not out:
            logger.warning("%s is back", self.name)
        self._out_told = out

    @property
    def _late_count(self) -> int:
        return sum(call.late for call in self._calls.values())

    @property
    def _is_out(self) -> bool:
        return self._late_count > self._settings.late_limit

    def _is_full(self, now_s: float) -> bool:
        return self._full_until_s is not None and now_s < self._full_until_s
