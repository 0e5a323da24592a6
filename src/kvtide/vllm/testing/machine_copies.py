"""Copies, answers and a sibling's loads that go on when they are told to, each by its name.

Knows copies, ranks and virtual time; does not know who tells, or what is right.
"""

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvtide.jobs import JobId
from kvtide.testing.clock import VirtualClock
from kvtide.testing.faulty import INSTANT, Ending, Fate, FaultPlan, FaultyDevice
from kvtide.vllm.testing.promises import HangError
from kvtide.vllm.testing.sibling import SiblingConnector

HELD = Fate("held", begin_after_s=math.inf, piece_s=math.inf)
TOLD = Fate("told to end")
WEDGED = Fate("wedged", ending=Ending.NEVER, deaf=True)

WAITS = 100
"""Waits in a row that end nothing: a step that begins another one will wait for ever."""


class OneFate(FaultPlan):
    """The same fate for every copy, until somebody changes it.

    Attributes:
        fate: Of copies that are submitted from now on.
    """

    def __init__(self, fate: Fate) -> None:
        super().__init__(random.Random(0), {})
        self.fate = fate

    def draw(self) -> Fate:
        """Decide over one copy."""
        return self.fate


class SteeredDevice(FaultyDevice):
    """A copier whose copies neither begin nor end by themselves.

    Deadlines and cancelling are those of ``FaultyDevice``: a copy that has not begun ends by them, and one
    that has begun looks at its cancel flag unless it is wedged.

    Args:
        clock: When things happen; a wait moves it on.
        held: Copies wait to be told; else they are instant.
        obliging: A copy that a step waits for ends then, unless it is wedged.
    """

    def __init__(self, clock: VirtualClock, held: bool, obliging: bool) -> None:
        self._fates = OneFate(HELD if held else INSTANT)
        super().__init__(self._fates, clock)
        self._obliging = obliging
        self._vain = 0

    @property
    def unbegun_ids(self) -> list[JobId]:
        """Copies that have not moved a byte."""
        return [copy.job_id for copy in self._open.values() if not copy.begun]

    def finish(self, job_id: JobId) -> None:
        """Let one copy go on to its end, now."""
        copy = self._open[job_id]
        self._tell(job_id, Fate(TOLD.kind, deaf=copy.fate.deaf), len(copy.pieces))

    def fail(self, job_id: JobId) -> None:
        """End one copy where it is."""
        self._tell(job_id, Fate("told to fail", ending=Ending.FAILED), self._open[job_id].moved)

    def half(self, job_id: JobId) -> None:
        """Move the first half of one copy that has not begun; the rest waits to be told."""
        self.wedge(job_id)
        if (copy := self._open.get(job_id)) is not None:
            copy.fate, copy.stop_at, copy.next_s = HELD, len(copy.pieces), math.inf

    def wedge(self, job_id: JobId) -> None:
        """Move half of one copy; it does not end and is deaf until it is told to finish."""
        copy = self._open[job_id]
        self._tell(job_id, WEDGED, max(copy.moved, len(copy.pieces) // 2))

    def let_go(self) -> None:
        """Let everything but wedged copies go on to its end, and be instant from now on."""
        self._fates.fate = INSTANT
        for job_id in set(self.open_ids) - set(self.stuck_ids):
            self.finish(job_id)

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        if self._obliging:
            for job_id in set(job_ids) & set(self.open_ids) - set(self.stuck_ids):
                self.finish(job_id)
        ended = super().wait(job_ids, timeout_s)
        self._vain = 0 if ended else self._vain + 1
        if self._vain > WAITS:
            raise HangError(f"a step waits for copies {sorted(job_ids)} again and again")
        return ended

    def _tell(self, job_id: JobId, fate: Fate, stop_at: int) -> None:
        now_s = self._clock.monotonic()
        copy = self._open[job_id]
        copy.fate, copy.stop_at, copy.next_s, copy.piece_s = fate, stop_at, now_s, 0.0
        self._move(copy, now_s)


class LateRanks(random.Random):
    """Takes the place of chance in ``RankAnswers``, which asks once for each rank in turn.

    Attributes:
        late: Ranks whose answers come a step late, once.
    """

    SHARE = 0.5
    """For ``RankAnswers.late_share``."""

    def __init__(self, rank_count: int) -> None:
        super().__init__(0)
        self._rank_count = rank_count
        self._asked = 0
        self.late: set[int] = set()

    def random(self) -> float:
        """Say less than ``SHARE`` for a rank that is late."""
        rank = self._asked % self._rank_count
        self._asked += 1
        if rank not in self.late:
            return 1.0
        self.late.remove(rank)
        return 0.0


@dataclass(slots=True)
class SteeredSibling:
    """The sibling of one rank, whose loads end when they are told to.

    Takes the place of chance in it: how many steps a load takes, and whether it fails.

    Attributes:
        sibling: The sibling.
        held: Loads wait to be told; else they end well in the step that begins them.
    """

    sibling: SiblingConnector
    held: bool = True
    _fails: dict[str, bool] = field(default_factory=dict)

    def randrange(self, _: int) -> int:
        """Say how many steps a load takes that begins."""
        return 1 << 40 if self.held else 0

    def random(self) -> float:
        """Say whether the next load fails; those that end are asked for in the order of their beginning."""
        return 0.0 if self._fails and self._fails.pop(next(iter(self._fails))) else 1.0

    @property
    def open_ids(self) -> list[str]:
        """Requests whose load goes on."""
        return [name for name in self.sibling._open if name not in self._fails]

    def end(self, request_ids: Iterable[str], fails: bool = False) -> None:
        """Let loads end in the next step."""
        for request_id in request_ids:
            load, _ = self.sibling._open[request_id]
            self.sibling._open[request_id] = load, 0
            self._fails[request_id] = fails
        self._fails = {name: self._fails[name] for name in self.sibling._open if name in self._fails}
