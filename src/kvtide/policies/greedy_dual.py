"""Runs by what they are worth, over a floor that rises with whoever leaves: what is GreedyDual's.

P. Cao, S. Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997. A chunk's key is the floor L of the
moment it was used, and what it is worth on top. The lowest leaves, and L becomes its key: what was worth
much long ago is no better in the end than what has just come. Knows no formula: a policy says what a chunk
is worth.

What a prefix cache makes of it: a run's key is that of its last chunk, which alone may leave. Runs that must
stay are in no queue. A request counts once, however often it comes back to a prefix while it grows, and
each time it is a use from the floor of that moment.
"""

from heapq import heapify, heappop, heappush, heapreplace

from kvtide.policies.columns import Columns
from kvtide.policies.lru import ALL
from kvtide.policies.recency import SCAN_LIMIT

RAISE_LIMIT = SCAN_LIMIT // 4
"""Entries raised or dropped in one search at most: each takes a few times what passing over a run does."""

Entry = tuple[int, int, int]
"""Key, when it was last used, run."""


class GreedyDual:
    """Keys over runs: constant time a use, logarithmic for a victim."""

    remembers = False

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._floor = 0
        self._touches = 0
        self._columns = columns = Columns()
        self._offered = columns.ints("B")
        self._counts, self._depths, self._uses = columns.ints(), columns.ints(), columns.ints()
        self._visitors = columns.ints("q")
        self._floors = columns.ints("q")  # when it was last used
        self._stamps = columns.ints("q")
        # A heap in which each run that may leave has one entry that counts, no higher than its key.
        self._heap: list[Entry] = []
        self._queued: dict[int, Entry] = {}

    def worth(self, uses: int, chunks: int) -> int:
        """Say what a chunk is worth that was used so often, the last of so many in its prompt."""
        raise NotImplementedError

    def resize(self, capacity: int) -> None:
        """Keys know no capacity."""

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._columns.cover(run)
        self._offered[run] = 0
        self._counts[run], self._depths[run] = count, depth
        self._uses[run], self._visitors[run] = 1, visit
        self._refresh(run)

    def joins(self, run: int, visit: int) -> bool:
        return self._uses[run] == 1 and self._visitors[run] == visit

    def grown(self, run: int, count: int) -> None:
        self._counts[run] += count

    def touched(self, run: int, visit: int) -> None:
        if visit > self._visitors[run]:
            self._visitors[run] = visit
            self._uses[run] += 1
        self._refresh(run)

    def split(self, run: int, head: int, head_count: int) -> None:
        self._columns.cover(head)
        self._offered[head] = 0
        self._counts[head], self._depths[head] = head_count, self._depths[run]
        self._counts[run] -= head_count
        self._depths[run] += head_count
        for states in (self._uses, self._visitors, self._floors, self._stamps):
            states[head] = states[run]

    def offer(self, run: int) -> None:
        if not self._offered[run]:
            self._offered[run] = 1
            self._queue(run)

    def withdraw(self, run: int) -> None:
        self._offered[run] = 0

    def victim(self) -> tuple[int, int] | None:
        heap = self._heap
        for _ in range(RAISE_LIMIT):
            if not heap:
                return None
            entry = heap[0]
            run = entry[2]
            if self._queued.get(run) is not entry:
                heappop(heap)
            elif not self._offered[run]:
                heappop(heap)
                del self._queued[run]
            elif (now := self._entry(run)) != entry:
                self._queued[run] = now
                heapreplace(heap, now)
            else:
                self._floor = max(self._floor, entry[0])
                return run, ALL
        return None

    def shrunk(self, run: int, count: int) -> None:
        self._counts[run] -= count
        if self._offered[run]:
            self._queue(run)

    def removed(self, run: int) -> None:
        self._offered[run] = 0
        self._queued.pop(run, None)

    def remember(self, run: int) -> bool:
        self.removed(run)
        return False

    def forgotten(self) -> tuple[int, int] | None:
        return None

    def recalled(self, run: int) -> None:
        """Nothing is remembered."""

    # -- inside ---------------------------------------------------------------------------------

    def _refresh(self, run: int) -> None:
        self._touches += 1
        self._floors[run], self._stamps[run] = self._floor, self._touches

    def _entry(self, run: int) -> Entry:
        key = self._floors[run] + self.worth(self._uses[run], self._depths[run] + self._counts[run])
        return key, self._stamps[run], run

    def _queue(self, run: int) -> None:
        """Have an entry that is no higher than the run's key; one that is lower is raised when it is met."""
        now = self._entry(run)
        before = self._queued.get(run)
        if before is not None and before <= now:
            return
        self._queued[run] = now
        heappush(self._heap, now)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = list(self._queued.values())
            heapify(self._heap)
