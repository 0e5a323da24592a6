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

from kvtide.policies.listed import ListedRuns
from kvtide.policies.lru import ALL
from kvtide.policies.recency import SCAN_LIMIT

_PASSED, _ONE, _OTHER = 0, 1, 2


class SievePolicy(ListedRuns):
    """SIEVE over runs, in amortised constant time; logarithmic for what was passed over."""

    list_count = 3
    remembers = False

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._ahead = _ONE  # which part the hand is about to meet
        self._used = self._columns.ints("B")
        self._arriving = self._columns.ints("B")  # nobody but the visitor has used it

    def resize(self, capacity: int) -> None:
        """The hand knows no capacity."""

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._columns.cover(run)
        self._put(run, count, self._ahead)
        self._used[run], self._arriving[run], self._visitors[run] = 0, 1, visit

    def joins(self, run: int, visit: int) -> bool:
        return self._arriving[run] == 1 and self._visitors[run] == visit

    def touched(self, run: int, visit: int) -> None:
        if visit <= self._visitors[run]:
            if self._arriving[run] and visit == self._visitors[run]:
                self._move(run, self._ahead)
            return
        self._visitors[run], self._arriving[run], self._used[run] = visit, 0, 1
        if self._where[run] == _PASSED:
            self._move(run, self._behind)

    def split(self, run: int, head: int, head_count: int) -> None:
        super().split(run, head, head_count)
        self._used[head], self._arriving[head] = self._used[run], self._arriving[run]

    def victim(self) -> tuple[int, int] | None:
        passed, offered = self._lists[_PASSED], self._links.offered
        if (ripe := passed.ripe()) is not None:
            return ripe, ALL
        for _ in range(SCAN_LIMIT):
            run = self._lists[self._ahead].last
            if run is None:
                if self._lists[self._behind].last is None:
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
