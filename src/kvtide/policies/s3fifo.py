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

from array import array

from kvtide.policies.recency import SCAN_LIMIT, Links, RecencyList

SMALL_SHARE = 10
"""One chunk in so many is S's."""

MOST_USES = 3
"""More are not told apart: two bits a chunk, in the paper."""

USES_TO_STAY = 2
"""Uses after which a chunk goes from S to M: "freq > 1" in algorithm 1. The one that brought it is none."""

_S, _M, _G = 1, 2, 3


class S3FIFOPolicy:
    """S3-FIFO over runs, in amortised constant time."""

    remembers = True

    def __init__(self) -> None:
        self._capacity = 0
        self.clear()

    def clear(self) -> None:
        self._links = Links()
        self._queues = [RecencyList(self._links) for _ in range(4)]
        self._where = bytearray()
        self._uses = bytearray()
        self._arriving = bytearray()  # nobody but the visitor has used it
        self._counts = array("i")
        self._visitors = array("q")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Chunks of S, M and G."""
        small, main, ghosts = (one.size for one in self._queues[1:])
        return small, main, ghosts

    def resize(self, capacity: int) -> None:
        self._capacity = capacity

    @property
    def _small_size(self) -> int:
        return max(1, self._capacity // SMALL_SHARE)

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._cover(run)
        if self._where[run] == _G:
            self._move(run, _M)
        else:
            self._where[run], self._counts[run] = _S, count
            self._links.offered[run] = 0
            self._queues[_S].push(run)
            self._queues[_S].size += count
        self._uses[run], self._arriving[run], self._visitors[run] = 0, 1, visit

    def joins(self, run: int, visit: int) -> bool:
        return self._where[run] == _S and self._arriving[run] == 1 and self._visitors[run] == visit

    def grown(self, run: int, count: int) -> None:
        self._counts[run] += count
        self._queues[self._where[run]].size += count

    def touched(self, run: int, visit: int) -> None:
        queue = self._queues[self._where[run]]
        if visit <= self._visitors[run]:
            if self._arriving[run] and visit == self._visitors[run]:
                queue.use(run)
            return
        self._visitors[run], self._arriving[run] = visit, 0
        self._uses[run] = min(MOST_USES, self._uses[run] + 1)
        if queue.is_parked(run) and self._has_merit(run):
            self._rescue(run)

    def split(self, run: int, head: int, head_count: int) -> None:
        self._cover(head)
        for states in (self._where, self._uses, self._arriving):
            states[head] = states[run]
        self._visitors[head] = self._visitors[run]
        self._counts[head] = head_count
        self._counts[run] -= head_count
        self._links.offered[head] = 0
        self._queues[self._where[run]].split(run, head)

    def offer(self, run: int) -> None:
        if not self._links.offered[run]:
            self._links.offered[run] = 1
            self._queues[self._where[run]].offered(run)

    def withdraw(self, run: int) -> None:
        self._links.offered[run] = 0

    def victim(self) -> tuple[int, int] | None:
        small, main = self._queues[_S], self._queues[_M]
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

    def shrunk(self, run: int, count: int) -> None:
        self._counts[run] -= count
        self._queues[self._where[run]].size -= count

    def removed(self, run: int) -> None:
        queue = self._queues[self._where[run]]
        queue.discard(run)
        queue.size -= self._counts[run]
        self._where[run] = self._links.offered[run] = 0

    def remember(self, run: int) -> bool:
        if self._where[run] == _M:
            self.removed(run)
            return False
        self._move(run, _G)
        self._links.offered[run] = 0
        return True

    def forgotten(self) -> tuple[int, int] | None:
        ghosts = self._queues[_G]
        excess = ghosts.size - (self._capacity - self._small_size)
        if excess <= 0 or (run := ghosts.oldest()) is None:
            return None
        return run, min(excess, self._counts[run])

    def recalled(self, run: int) -> None:
        self._queues[_G].use(run)

    # -- inside ---------------------------------------------------------------------------------

    def _leaving(self, where: int) -> int | None:
        """Name who leaves S or M next; those that were used are moved on the way."""
        queue, offered = self._queues[where], self._links.offered
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

    def _move(self, run: int, to: int) -> None:
        here, count = self._queues[self._where[run]], self._counts[run]
        here.discard(run)
        here.size -= count
        self._where[run] = to
        self._queues[to].push(run)
        self._queues[to].size += count

    def _cover(self, run: int) -> None:
        self._links.cover(run)
        missing = run + 1 - len(self._where)
        if missing > 0:
            for states in (self._where, self._uses, self._arriving):
                states.extend(bytes(missing))
            self._counts.extend([0] * missing)
            self._visitors.extend([0] * missing)
