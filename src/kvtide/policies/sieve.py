"""SIEVE: a hand goes over the queue from old to new; who was used since it last came stays where it is.

Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is simpler than LRU: an efficient turn-key
eviction algorithm for web caches", NSDI 2024, algorithm 1. The queue is kept in two parts, what the hand has
yet to meet in this round and what has survived it; what is new is met last.

What a prefix cache makes of it, here and nowhere else:

* The queue is of runs. Who was not used and must stay, because others extend or read it, is passed over
  once, and leaves first when it may. Used after that, it counts among the survivors of this round.
* A request counts once, however often it comes back to a prefix while it grows. What it has stored itself
  is still arriving then, as long as nobody else used it, and is new once more.
"""

from array import array

from kvtide.policies.lru import ALL
from kvtide.policies.recency import SCAN_LIMIT, Links, RecencyList

_PASSED, _ONE, _OTHER = 0, 1, 2


class SievePolicy:
    """SIEVE over runs, in amortised constant time; logarithmic for what was passed over."""

    remembers = False

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._links = Links()
        self._queues = [RecencyList(self._links) for _ in range(3)]
        self._ahead = _ONE  # which part the hand is about to meet
        self._where = bytearray()
        self._used = bytearray()
        self._arriving = bytearray()  # nobody but the visitor has used it
        self._visitors = array("q")

    def resize(self, capacity: int) -> None:
        """The hand knows no capacity."""

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._cover(run)
        self._where[run] = self._ahead
        self._links.offered[run] = self._used[run] = 0
        self._arriving[run], self._visitors[run] = 1, visit
        self._queues[self._ahead].push(run)

    def joins(self, run: int, visit: int) -> bool:
        return self._arriving[run] == 1 and self._visitors[run] == visit

    def grown(self, run: int, count: int) -> None:
        """The hand does not count chunks."""

    def touched(self, run: int, visit: int) -> None:
        if visit <= self._visitors[run]:
            if self._arriving[run] and visit == self._visitors[run]:
                self._move(run, self._ahead)
            return
        self._visitors[run], self._arriving[run], self._used[run] = visit, 0, 1
        if self._where[run] == _PASSED:
            self._move(run, self._behind)

    def split(self, run: int, head: int, head_count: int) -> None:
        self._cover(head)
        for states in (self._where, self._used, self._arriving):
            states[head] = states[run]
        self._visitors[head] = self._visitors[run]
        self._links.offered[head] = 0
        self._queues[self._where[run]].split(run, head)

    def offer(self, run: int) -> None:
        if not self._links.offered[run]:
            self._links.offered[run] = 1
            self._queues[self._where[run]].offered(run)

    def withdraw(self, run: int) -> None:
        self._links.offered[run] = 0

    def victim(self) -> tuple[int, int] | None:
        passed, offered = self._queues[_PASSED], self._links.offered
        if (ripe := passed.ripe()) is not None:
            return ripe, ALL
        for _ in range(SCAN_LIMIT):
            run = self._queues[self._ahead].last
            if run is None:
                if self._queues[self._behind].last is None:
                    return None
                self._ahead = self._behind
            elif self._used[run]:
                self._used[run] = 0
                self._move(run, self._behind)
            elif offered[run]:
                return run, ALL
            else:
                self._move(run, _PASSED)
                passed.pass_over(run)
        return None

    def shrunk(self, run: int, count: int) -> None:
        """The hand does not count chunks."""

    def removed(self, run: int) -> None:
        self._links.offered[run] = 0
        self._queues[self._where[run]].discard(run)

    def remember(self, run: int) -> bool:
        self.removed(run)
        return False

    def forgotten(self) -> tuple[int, int] | None:
        return None

    def recalled(self, run: int) -> None:
        """Nothing is remembered."""

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _behind(self) -> int:
        return _ONE + _OTHER - self._ahead

    def _move(self, run: int, to: int) -> None:
        self._queues[self._where[run]].discard(run)
        self._where[run] = to
        self._queues[to].push(run)

    def _cover(self, run: int) -> None:
        self._links.cover(run)
        missing = run + 1 - len(self._where)
        if missing > 0:
            for states in (self._where, self._used, self._arriving):
                states.extend(bytes(missing))
            self._visitors.extend([0] * missing)
