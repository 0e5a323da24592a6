"""A copier that begins late, dawdles, overtakes, fails half way or never ends, as a seeded plan has it.

Its bytes really move, piece by piece, when their time has come: a copy that runs late writes late, into
whatever is there by then. Knows plans of copies and a clock; does not know what is copied or why.
"""

import ctypes
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvtide.jobs import JobId
from kvtide.testing.clock import VirtualClock
from kvtide.transfer.devices import CopyOutcome
from kvtide.transfer.plans import CopyPlan

PIECE_BYTES = 32
"""What a slow copy moves at once: less than a block, so that it can stop within one."""

ENDLESS_WAIT_S = 30.0
"""Who has waited so long, in one wait after another and without doing anything else, waits for ever."""


class EndlessWaitError(AssertionError):
    """Somebody waits for a copy that will not end. On a virtual clock that would take no time at all."""


class Ending(Enum):
    """How a copy ends once it has begun."""

    DONE = "done"
    FAILED = "failed"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Fate:
    """What will happen to one copy.

    Attributes:
        kind: Its name, for counting.
        begin_after_s: From submission to the first byte.
        piece_s: From one piece to the next.
        ending: How it ends.
        share: Of its pieces, those that are copied before it fails or stalls.
        deaf: Once begun, it does not look at its cancel flag.
        lasts_s: All its pieces together; None: ``piece_s`` says how long each takes.
    """

    kind: str
    begin_after_s: float = 0.0
    piece_s: float = 0.0
    ending: Ending = Ending.DONE
    share: float = 1.0
    deaf: bool = False
    lasts_s: float | None = None


INSTANT = Fate("instant")

KINDS = (
    "instant",
    "quick",
    "slow",
    "late",
    "deaf",
    "outlasts",
    "fails unbegun",
    "fails half way",
    "never begins",
    "never ends",
)


class FaultPlan:
    """Draws the fate of each copy.

    Args:
        chance: The only source of choice.
        weights: Of the kinds of fate; a kind that is left out does not happen.
        flush_limit_s: What a copy of kind "outlasts" takes two to ten times as long as.

    Attributes:
        weights: May be replaced while copies are under way.
        happened: How often each kind was drawn, and what became of copies.
    """

    def __init__(
        self, chance: random.Random, weights: Mapping[str, float], flush_limit_s: float = 0.25
    ) -> None:
        self._chance = chance
        self._flush_limit_s = flush_limit_s
        self.weights = dict(weights)
        self.happened: Counter[str] = Counter()

    def draw(self) -> Fate:
        """Decide over one copy."""
        chance = self._chance
        (kind,) = chance.choices(list(self.weights), list(self.weights.values()))
        self.happened[f"copy: {kind}"] += 1
        begin_s, piece_s, share = chance.expovariate(250.0), chance.expovariate(4000.0), chance.random()
        match kind:
            case "quick":
                return Fate(kind, begin_s)
            case "slow":
                return Fate(kind, begin_s, piece_s)
            case "late":
                return Fate(kind, chance.expovariate(5.0), piece_s)
            case "deaf":
                return Fate(kind, begin_s, piece_s, deaf=True)
            case "outlasts":
                lasts_s = chance.uniform(2.0, 10.0) * self._flush_limit_s
                return Fate(kind, begin_s, deaf=True, lasts_s=lasts_s)
            case "fails unbegun":
                return Fate(kind, begin_s, ending=Ending.FAILED, share=0.0)
            case "fails half way":
                return Fate(kind, begin_s, piece_s, Ending.FAILED, share)
            case "never begins":
                return Fate(kind, math.inf)
            case "never ends":
                return Fate(kind, begin_s, piece_s, Ending.NEVER, share, deaf=True)
        return INSTANT


@dataclass(slots=True)
class _Copy:
    job_id: JobId
    pieces: list[tuple[int, int, int]]
    fate: Fate
    submitted_s: float
    begin_by_s: float
    next_s: float
    stop_at: int
    piece_s: float
    moved: int = 0
    begun: bool = False
    cancelled: bool = False
    byte_count: int = field(default=0)


class FaultyDevice:
    """A ``DeviceCopier`` of one direction of one rank.

    Args:
        plan: Decides over each copy.
        clock: When things happen; a wait moves it on.
    """

    def __init__(self, plan: FaultPlan, clock: VirtualClock) -> None:
        self._plan = plan
        self._clock = clock
        self._open: dict[JobId, _Copy] = {}
        self._ended: list[CopyOutcome] = []
        self._waited_s = 0.0  # since somebody did something else

    @property
    def open_ids(self) -> list[JobId]:
        """Copies submitted and not ended, in order of submission."""
        return list(self._open)

    @property
    def stuck_ids(self) -> list[JobId]:
        """Copies that have moved all they will ever move without ending."""
        return [
            copy.job_id
            for copy in self._open.values()
            if copy.begun and copy.fate.ending is Ending.NEVER and copy.moved == copy.stop_at
        ]

    def progress(self) -> None:
        """Move what is due by now."""
        self._waited_s = 0.0
        self._progress()

    def _progress(self) -> None:
        if self._open:
            now_s = self._clock.monotonic()
            for copy in list(self._open.values()):
                self._move(copy, now_s)

    def release(self) -> None:
        """Let copies that would never end go on to their end, now."""
        for copy in self._open.values():
            if copy.fate.ending is Ending.NEVER:
                self._plan.happened["released"] += 1
                copy.fate, copy.stop_at = Fate("released", deaf=True), len(copy.pieces)
                copy.next_s = min(copy.next_s, self._clock.monotonic())
        self.progress()

    # -- DeviceCopier -----------------------------------------------------------------------------

    def forward_ended(self) -> None:
        """Do nothing: the model of a forward has ended when its call returns."""

    def submit(self, job_id: JobId, plan: CopyPlan, deadline_s: float) -> None:
        fate = INSTANT if job_id < 0 else self._plan.draw()  # a negative one is of the self-test
        self._waited_s = 0.0
        now_s = self._clock.monotonic()
        at_once = not fate.piece_s and fate.lasts_s is None and fate.share == 1
        pieces = _pieces(plan, 1 << 30 if at_once else PIECE_BYTES)
        piece_s = fate.piece_s if fate.lasts_s is None else fate.lasts_s / max(1, len(pieces))
        begin_s = now_s + fate.begin_after_s
        stop_at = len(pieces) if fate.ending is Ending.DONE else int(fate.share * len(pieces))
        copy = _Copy(job_id, pieces, fate, now_s, now_s + deadline_s, begin_s, stop_at, piece_s)
        self._open[job_id] = copy
        self._move(copy, now_s)

    def poll(self) -> list[CopyOutcome]:
        self._progress()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_ids: Collection[JobId]) -> None:
        for job_id in job_ids:
            if (copy := self._open.get(job_id)) is not None and not copy.cancelled:
                copy.cancelled = True
                self._plan.happened["cancelled begun" if copy.begun else "cancelled unbegun"] += 1

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        """See ``DeviceCopier``.

        Raises:
            EndlessWaitError: Nothing but waiting has happened for ``ENDLESS_WAIT_S``.
        """
        until_s = self._clock.monotonic() + timeout_s
        while True:
            self._progress()
            left = [copy for job_id in job_ids if (copy := self._open.get(job_id)) is not None]
            if not left:
                return True
            if self._clock.monotonic() >= until_s:
                self._plan.happened["wait timed out"] += 1
                return False
            self._plan.happened["waited"] += 1
            before_s = self._clock.monotonic()
            self._clock.advance_to(min(until_s, *(self._next_change_s(copy) for copy in left)))
            self._waited_s += self._clock.monotonic() - before_s
            if self._waited_s > ENDLESS_WAIT_S:
                waited = [copy.job_id for copy in left]
                raise EndlessWaitError(f"copies {waited} were waited for {self._waited_s:.0f} s on end")

    def close(self) -> None:
        self._open.clear()

    # -- inside -----------------------------------------------------------------------------------

    @staticmethod
    def _next_change_s(copy: _Copy) -> float:
        if not copy.begun:
            # Just past the deadline: a copy may begin at the very moment.
            return min(copy.next_s, math.nextafter(copy.begin_by_s, math.inf))
        return copy.next_s if copy.moved < copy.stop_at else math.inf

    def _move(self, copy: _Copy, now_s: float) -> None:
        if not copy.begun:
            if copy.cancelled or min(now_s, copy.next_s) > copy.begin_by_s:
                if not copy.cancelled:
                    self._plan.happened["past its deadline"] += 1
                self._end(copy, success=False)
                return
            if now_s < copy.next_s:
                return
            copy.begun = copy.stop_at > 0
        while copy.moved < copy.stop_at and copy.next_s <= now_s:
            if copy.cancelled and not copy.fate.deaf:
                self._end(copy, success=False)
                return
            target, source, size = copy.pieces[copy.moved]
            ctypes.memmove(target, source, size)
            copy.byte_count += size
            copy.moved += 1
            copy.next_s += copy.piece_s
        if copy.moved < copy.stop_at:
            if copy.cancelled and not copy.fate.deaf:
                self._end(copy, success=False)
        elif copy.fate.ending is Ending.DONE:
            self._end(copy, success=True)
        elif copy.fate.ending is Ending.FAILED:
            self._end(copy, success=False)
        else:
            copy.begun = True

    def _end(self, copy: _Copy, success: bool) -> None:
        del self._open[copy.job_id]
        if success and copy.cancelled and copy.fate.lasts_s is not None:
            self._plan.happened["ended well long after it was cancelled"] += 1
        latency_s = self._clock.monotonic() - copy.submitted_s
        self._ended.append(CopyOutcome(copy.job_id, success, copy.byte_count, latency_s, latency_s))


def _pieces(plan: CopyPlan, limit: int) -> list[tuple[int, int, int]]:
    """Cut a plan into ``(target, source, size)`` of at most ``limit`` bytes."""
    pieces = []
    columns = zip(plan.target.tolist(), plan.source.tolist(), plan.size.tolist(), strict=True)
    for target, source, size in columns:
        for begin in range(0, size, limit):
            pieces.append((target + begin, source + begin, min(limit, size - begin)))
    return pieces
