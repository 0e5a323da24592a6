"""A lane in virtual time: the calls to a real tier are late, fail or never return, as a seeded plan has it.

Fulfils the contract of ``Lane`` without a thread. What a call does to the medium happens when it returns, and
a read leaves something else in its buffer before: who uses a slot that is the lane's finds out. Knows when a
call begins and ends; which tier it is, and what the bytes are, it does not know.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.jobs import JobId, PartFate
from kvtide.keys import OffloadKey
from kvtide.testing.clock import VirtualClock
from kvtide.testing.lane_faults import CallFate, LanePlan
from kvtide.testing.shared_memory_tier import SharedMemoryTier
from kvtide.tiers.base import PrivateTier, Tier
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.records import RecordHeader
from kvtide.transfer.lane import (
    CANCELLED,
    LATE,
    OUT,
    Lane,
    TierDirection,
    TierOutcome,
    TierPart,
    TierState,
)
from kvtide.transfer.lane_calls import Call, CallEnd, Kind, made
from kvtide.transfer.lane_jobs import JobBooks, WaitingPart
from kvtide.transfer.tier_lane import FULL, FULL_REST_S, RETRY_S, LaneSettings

DISCARDS_AT_ONCE = 16
"""Few, so that writes have to wait for several calls."""

RUBBISH = 0xEE

UNAVAILABLE = TierUnavailableError.__name__


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that is under way."""

    call: Call
    fate: CallFate
    ends_s: float
    resets: int  # generations that had been begun when it began


@dataclass(slots=True)
class _Listing:
    """What a tier holds, and when that is known."""

    known_s: float
    headers: Iterator[RecordHeader] | None = field(default=None)


class VirtualLane(Lane):
    """See ``Lane``.

    Args:
        tier: Owned from now on.
        name: Of the tier.
        settings: How it is driven.
        plan: Decides over each call.
        clock: When things happen.
    """

    def __init__(
        self, tier: Tier, name: str, settings: LaneSettings, plan: LanePlan, clock: VirtualClock
    ) -> None:
        self.name = name
        self.tier = tier
        self._settings = settings
        self._plan = plan
        self._clock = clock
        self._breaker = Breaker()
        self.books = JobBooks(settings.queue_bytes, clock.monotonic)
        self._under_way: list[_Pending] = []
        self._discards: deque[OffloadKey] = deque()
        self._generations: deque[bool] = deque()
        self._begun = 0
        self._again_s = -math.inf
        self._late_jobs: set[JobId] = set()
        self._full_until_s = -math.inf
        self.closed = False
        chance, now_s = plan.chance, clock.monotonic()
        self._opens_s = now_s + chance.choice((0.0, 0.0, 0.0, chance.expovariate(50.0), chance.random()))
        self.opened = False
        self._listing = _Listing(self._opens_s + chance.choice((0.0, chance.expovariate(200.0))))

    # -- what is asked ------------------------------------------------------------------------------

    def submit(
        self,
        job_id: JobId,
        direction: TierDirection,
        parts: Sequence[TierPart],
        lead: tuple[bytes, ...] = (),
    ) -> bool:
        taken = self.books.take(job_id, direction, parts, lead)
        self._plan.happened["lane: queue full"] += not taken
        self.progress()
        return taken

    def cancel(self, job_ids: Collection[JobId]) -> None:
        for job_id in job_ids:
            if (job := self.books.job(job_id)) is not None:
                job.cancelled = True
                self._plan.happened[f"lane: {job.direction.name.lower()} cancelled"] += 1
        self.books.fail_waiting(CANCELLED, lambda job: job.cancelled)

    def discard(self, keys: Collection[OffloadKey]) -> None:
        self._discards.extend(keys)

    def begin_generation(self, trusted: bool = False) -> None:
        self._generations.append(trusted)
        self._again_s = -math.inf
        for job in self.books.open_jobs():
            job.voided = True
            self._plan.happened[f"lane: {job.direction.name.lower()} voided by a reset"] += 1
        self.books.fail_waiting(CANCELLED)
        self._listing = _Listing(-math.inf, iter(()))

    @property
    def generations_begun(self) -> int:
        return self._begun

    def poll(self) -> list[TierOutcome]:
        self.progress()
        ended = self.books.take_ended()
        for one in ended:
            in_part = 0 < one.fates.count(PartFate.DONE) < len(one.fates)
            self._plan.happened[f"lane: {one.direction.name.lower()} in part"] += in_part
        return ended

    def take_late(self) -> set[JobId]:
        late, self._late_jobs = self._late_jobs, set()
        return late

    def take_inventory(self, limit: int) -> list[RecordHeader] | None:
        if self._listing.headers is None:
            return []
        most = min(limit, self._plan.chance.randrange(1, 40))
        taken = [header for _, header in zip(range(most), self._listing.headers, strict=False)]
        return taken or None

    def recount(self) -> None:
        # What waits to be forgotten may be listed still.
        self._excused.update(self._discards)
        for pending in self._under_way:
            self._excused.update(pending.call.keys)
        self._listing = _Listing(self._clock.monotonic() + self._plan.chance.expovariate(200.0))

    def state(self) -> TierState:
        capacity_bytes = used_bytes = 0
        if self.opened and isinstance(self.tier, PrivateTier):
            capacity_bytes, used_bytes = self.tier.capacity_bytes, self.tier.used_bytes
        now_s = self._clock.monotonic()
        out = self._late_count > self._settings.late_limit
        state = BreakerState.OPEN if out else self._breaker.state(now_s)
        self._plan.happened[f"lane: {state.value}"] += self.opened
        return TierState(
            state, now_s >= self._full_until_s, capacity_bytes, used_bytes, self._late_count, self.opened
        )

    def close(self, patience_s: float = 5.0) -> bool:
        """Do what is due and returns in time; what does not is left to itself, and its thread with it."""
        if self.closed:
            return True
        self.books.fail_waiting(CANCELLED)
        until_s = self._clock.monotonic() + patience_s
        while self.opened and self._step(until_s):
            pass
        returned = not self._under_way
        self.kill()
        return returned

    # -- what a simulation asks ---------------------------------------------------------------------

    def kill(self) -> None:
        """End as a process that is killed does: of what is under way some has happened, no call returns."""
        if self.closed:
            return
        self.closed = True
        for pending in self._under_way:
            if pending.call.kind in (Kind.WRITE, Kind.DISCARD) and self._plan.chance.random() < 0.5:
                self._make(pending)
        self._under_way.clear()
        self.tier.close()

    def release(self) -> None:
        """Let calls that would never return do so, now."""
        for pending in self._under_way:
            if pending.ends_s == math.inf:
                self._plan.happened["call released"] += 1
                pending.ends_s = self._clock.monotonic()

    def progress(self) -> None:
        """Do what is due by now."""
        if not self.closed:
            while self._step(self._clock.monotonic()):
                pass

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done, and nobody waits to be told."""
        return self.opened and not (
            self._under_way or self._discards or self._generations or any(self.books.waiting.values())
        )

    @property
    def only_stuck(self) -> bool:
        """Whether no call is under way but such as never return."""
        return all(pending.ends_s == math.inf for pending in self._under_way)

    def describe(self) -> str:
        """What it is about."""
        calls = [(one.call.kind.name, one.fate.kind, one.call.late) for one in self._under_way]
        waiting = {direction.name: len(queue) for direction, queue in self.books.waiting.items()}
        return (
            f"{self.name}: opened {self.opened}, calls {calls}, waiting {waiting}, {len(self._discards)}"
            f" discards, {len(self._generations)} generations, {self._breaker.state(self._clock.monotonic())}"
        )

    # -- time ---------------------------------------------------------------------------------------

    def _step(self, now_s: float) -> bool:
        """End one call, or begin one; False when there is neither to do."""
        if not self.opened:
            if now_s < self._opens_s:
                self._refuse_late(now_s)
                return False
            self.tier.open()
            self.opened = True
        self._list(now_s)
        ended = min(self._under_way, key=lambda pending: pending.ends_s, default=None)
        if ended is not None and ended.ends_s <= now_s:
            self._end(ended, now_s)
            return True
        for pending in self._under_way:
            self._note_if_late(pending, now_s)
        self._refuse_late(now_s)
        call = self._next(now_s)
        if call is None:
            return False
        fate = self._plan.draw(call.kind, self._settings.deadline_s)
        self._under_way.append(_Pending(call, fate, now_s + fate.lasts_s, self._begun))
        for waiting in call.waiting if call.kind is Kind.READ else ():
            waiting.part.payload[:] = bytes([RUBBISH]) * waiting.part.payload.nbytes
        return True

    def _list(self, now_s: float) -> None:
        if self._listing.headers is None and now_s >= self._listing.known_s:
            headers = list(self.tier.inventory()) if isinstance(self.tier, PrivateTier) else []
            headers.sort(key=lambda header: (header.name.chunk_index, header.written_at_s))
            self._listing.headers = iter(headers)

    def _refuse_late(self, now_s: float) -> None:
        limit_s = self._settings.deadline_s
        self.books.fail_first(LATE, TierDirection.READ, lambda job: now_s > job.submitted_s + limit_s)
        if self._late_count > self._settings.late_limit:
            self._plan.happened["lane: out for late calls"] += 1
            self.books.fail_waiting(OUT)

    def _note_if_late(self, pending: _Pending, now_s: float) -> None:
        call = pending.call
        if call.late or now_s <= call.began_s + self._settings.deadline_s:
            return
        call.late = True
        self._breaker.failed(now_s)
        # Writes do not wait for it any longer: it may take what is written anew.
        self._excused.update(call.keys)
        if call.waiting and not call.waiting[0].job.told_late:
            call.waiting[0].job.told_late = True
            self._late_jobs.add(call.waiting[0].job.job_id)
            self._plan.happened[f"lane: {call.kind.name.lower()} told late"] += 1

    # -- which call is next -------------------------------------------------------------------------

    def _next(self, now_s: float) -> Call | None:
        late_count = self._late_count
        if late_count > self._settings.late_limit:
            return None
        if len(self._under_way) - late_count >= self._settings.thread_count:
            return None
        if self._generations:
            if now_s < self._again_s or self._doing(Kind.WRITE) or self._doing(Kind.GENERATION):
                return None
            return Call(Kind.GENERATION, now_s, trusted=self._generations[0])
        if self._discards and self._breaker.state(now_s) is not BreakerState.OPEN:
            keys = [self._discards.popleft() for _ in range(min(DISCARDS_AT_ONCE, len(self._discards)))]
            return Call(Kind.DISCARD, now_s, keys=keys)
        for direction, kind in ((TierDirection.READ, Kind.READ), (TierDirection.WRITE, Kind.WRITE)):
            if kind is Kind.WRITE and self._doing(Kind.DISCARD):
                continue
            queue = self.books.waiting[direction]
            while queue:
                waiting = queue.popleft()
                refusal = self._refusal(kind, now_s)
                if refusal is None:
                    most = self.tier.run_chunks(waiting.part.payload.nbytes)
                    return Call(kind, now_s, self.books.neighbours(waiting, most))
                self.books.note(waiting, PartFate.FAILED, refusal)
        return None

    def _refusal(self, kind: Kind, now_s: float) -> str | None:
        if kind is Kind.WRITE and now_s < self._full_until_s:
            return FULL
        return None if self._breaker.allows(now_s) else OUT

    def _doing(self, kind: Kind) -> bool:
        # Of generations no second one is begun before the first has returned, however late that is.
        return any(
            one.call.kind is kind and (not one.call.late or kind is Kind.GENERATION)
            for one in self._under_way
        )

    @property
    def _excused(self) -> set[OffloadKey]:
        """What books may say of this tier although it is not so: nobody has told them yet."""
        return self.tier.store.gone if isinstance(self.tier, SharedMemoryTier) else self._plan.harmed

    @property
    def _late_count(self) -> int:
        return sum(pending.call.late for pending in self._under_way)

    # -- how calls end ------------------------------------------------------------------------------

    def _end(self, pending: _Pending, now_s: float) -> None:
        self._note_if_late(pending, pending.ends_s)
        end = self._make(pending)
        self._under_way.remove(pending)
        call = pending.call
        self._judge(call, end, now_s)
        if call.kind is Kind.GENERATION:
            if end.fate is PartFate.DONE:
                self._generations.popleft()
                self._begun += 1
            else:
                self._again_s = now_s + RETRY_S
        elif call.kind is Kind.DISCARD:
            self._full_until_s = -math.inf
        for waiting, (fate, trouble) in zip(call.waiting, end.parts, strict=True):
            self._note(call, waiting, fate, trouble)

    def _note(self, call: Call, waiting: WaitingPart, fate: PartFate, trouble: str | None) -> None:
        if waiting.job.voided:
            if call.kind is Kind.WRITE and call.late:
                # It may have been written anew since: then a record goes that the books know of.
                self._discards.append(waiting.part.name.key)
                self._excused.add(waiting.part.name.key)
            fate, trouble = PartFate.FAILED, CANCELLED
        if fate is PartFate.GONE:
            # Now it is told: whoever keeps books has no excuse.
            self._excused.discard(waiting.part.name.key)
        self.books.note(waiting, fate, trouble)

    def _make(self, pending: _Pending) -> CallEnd:
        """Have a call do to the medium what it does."""
        call, kind = pending.call, pending.fate.kind
        if kind in ("is damaged", "is gone") and call.waiting:
            at = self._plan.chance.randrange(len(call.waiting)) if len(call.waiting) > 1 else 0
            self._plan.harm(self.tier, call.waiting[at].part.name.key, kind)
        if kind == "fails":
            return _end_of(call, PartFate.FAILED, UNAVAILABLE)
        if kind == "is full":
            return _end_of(call, PartFate.FAILED, TierFullError.__name__)
        if call.kind is Kind.WRITE and pending.resets < self._begun:
            # What is being written when a generation begins is of before: no tier serves it.
            return _end_of(call, PartFate.DONE, None)
        made_so = made(self.tier, call, self.name, self._settings.deadline_s)
        return _end_of(call, PartFate.FAILED, UNAVAILABLE) if kind == "fails, and is kept" else made_so

    def _judge(self, call: Call, end: CallEnd, now_s: float) -> None:
        if end.trouble == FULL:
            self._plan.happened["lane: full"] += 1
            self._full_until_s = now_s + FULL_REST_S
            self.books.fail_waiting(FULL, directions=[TierDirection.WRITE])
        elif end.fate is PartFate.FAILED:
            self._breaker.failed(now_s)
        elif not call.late and call.kind is not Kind.DISCARD:
            self._breaker.succeeded()


def _end_of(call: Call, fate: PartFate, trouble: str | None) -> CallEnd:
    """The end of a call all of whose parts end alike."""
    return CallEnd.of_parts([(fate, trouble)] * len(call.waiting)) if call.waiting else CallEnd(fate, trouble)
