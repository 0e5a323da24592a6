"""S3-FIFO: most of what comes is never asked for again, so it has to prove itself in a small queue first.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023,
algorithm 1: S, a tenth of the room, takes what is new; what was used meanwhile goes from its end to M, the
rest leaves, and G keeps its name. Whoever is in G when it comes goes to M at once. At the end of M a use is
paid with another round.

What a prefix cache makes of it, here and nowhere else:

* Queues are of runs, sizes are of chunks. Whoever is used moves at the end of a queue, whether it may leave
  or not; who was not used and must stay is passed over once, and leaves first when it may. Used after
  that, it moves at once: its turn was up.
* A chunk never leaves before what extends it, nor is its name forgotten before theirs. Where the queue whose
  turn it is holds nothing that may leave, the other one gives.
* A request counts once, however often it comes back to a prefix while it grows. What it has stored itself
  is still arriving then, as long as nobody else used it, and takes its place in the queue anew.
* A name that is asked for is the last to be forgotten until it is back.
"""

from kvtide.policies.listed import ListedRuns
from kvtide.policies.recency import SCAN_LIMIT

SMALL_SHARE = 10
"""One chunk in so many is S's."""

MOST_USES = 3
"""More are not told apart: two bits a chunk, in the paper."""

USES_TO_STAY = 2
"""Uses after which a chunk goes from S to M: "freq > 1" in algorithm 1. The one that brought it is none."""

_S, _M, _G = 1, 2, 3


class S3FIFOPolicy(ListedRuns):
    """S3-FIFO over runs, in amortised constant time."""

    list_count = 4
    remembers = True

    def __init__(self) -> None:
        self._capacity = 0
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._uses = self._columns.ints("B")
        self._arriving = self._columns.ints("B")  # nobody but the visitor has used it

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Chunks of S, M and G."""
        small, main, ghosts = (one.size for one in self._lists[1:])
        return small, main, ghosts

    def resize(self, capacity: int) -> None:
        self._capacity = capacity

    @property
    def _small_size(self) -> int:
        return max(1, self._capacity // SMALL_SHARE)

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._columns.cover(run)
        if self._where[run] == _G:
            self._move(run, _M)
        else:
            self._put(run, count, _S)
        self._uses[run], self._arriving[run], self._visitors[run] = 0, 1, visit

    def joins(self, run: int, visit: int) -> bool:
        return self._where[run] == _S and self._arriving[run] == 1 and self._visitors[run] == visit

    def touched(self, run: int, visit: int) -> None:
        queue = self._lists[self._where[run]]
        if visit <= self._visitors[run]:
            if self._arriving[run] and visit == self._visitors[run]:
                queue.use(run)
            return
        self._visitors[run], self._arriving[run] = visit, 0
        self._uses[run] = min(MOST_USES, self._uses[run] + 1)
        if queue.is_parked(run) and self._has_merit(run):
            self._rescue(run)

    def split(self, run: int, head: int, head_count: int) -> None:
        super().split(run, head, head_count)
        self._uses[head], self._arriving[head] = self._uses[run], self._arriving[run]

    def victim(self) -> tuple[int, int] | None:
        small, main = self._lists[_S], self._lists[_M]
        if small.size >= self._small_size:
            if (run := self._leaving(_S)) is not None:
                return run, min(max(1, small.size - self._small_size + 1), self._counts[run])
            run = self._leaving(_M)
        elif (run := self._leaving(_M)) is None:
            before = main.size
            run = self._leaving(_S)
            if main.size > before:  # M has something now, and it is M's turn still
                if run is not None:
                    return run, 1
                run = self._leaving(_M)
        return None if run is None else (run, self._counts[run])

    def remember(self, run: int) -> bool:
        if self._where[run] == _M:
            self.removed(run)
            return False
        self._move(run, _G)
        self._links.offered[run] = 0
        return True

    def forgotten(self) -> tuple[int, int] | None:
        ghosts = self._lists[_G]
        excess = ghosts.size - (self._capacity - self._small_size)
        if excess <= 0 or (run := ghosts.oldest()) is None:
            return None
        return run, min(excess, self._counts[run])

    def recalled(self, run: int) -> None:
        self._lists[_G].use(run)

    # -- inside ---------------------------------------------------------------------------------

    def _leaving(self, where: int) -> int | None:
        """Name who leaves S or M next; those that were used are moved on the way."""
        queue, offered = self._lists[where], self._links.offered
        if (run := queue.ripe()) is not None:
            return run
        for _ in range(SCAN_LIMIT):
            run = queue.last
            if run is None:
                return None
            if self._has_merit(run):
                self._rescue(run)
            elif offered[run]:
                return run
            else:
                queue.pass_over(run)
        return None

    def _has_merit(self, run: int) -> bool:
        return self._uses[run] >= (USES_TO_STAY if self._where[run] == _S else 1)

    def _rescue(self, run: int) -> None:
        """Put a run that was used, and would leave, in front of M."""
        self._uses[run] = 0 if self._where[run] == _S else self._uses[run] - 1
        self._move(run, _M)
