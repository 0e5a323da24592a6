"""ARC: recency and frequency share the room, and what was let go too early says how.

N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4: T1 holds what
was used once, T2 what was used again, B1 and B2 the names of what has left them; a name of B1 that is
asked for again makes the target ``p`` of T1 larger, one of B2 smaller, and either comes back into T2.

What a prefix cache makes of it, here and nowhere else:

* Lists are of runs, sizes are of chunks. Chunks that are asked for together adapt ``p`` by the sizes of B1
  and B2 at that moment.
* A chunk never leaves before what extends it, nor is its name forgotten before theirs. Where the list whose
  turn it is holds nothing that may leave, the other one gives.
* A request that comes back to its own chunks, to extend them, has not used them again.
* ``p`` moves by whole chunks: |B2| / |B1| is rounded down. A name that is asked for moves it once, however
  often it is offered before it is back.
* The victim is named before it is known how many chunks come, so the paper's tie rule (x in B2 and
  |T1| = p) does not apply: a tie takes from T2.
"""

from kvtide.policies.listed import ListedRuns

_T1, _T2, _B1, _B2 = 1, 2, 3, 4


class ARCPolicy(ListedRuns):
    """ARC over runs, in constant time a use, a victim and a name that is forgotten."""

    list_count = 5
    remembers = True

    def __init__(self) -> None:
        self._capacity = 0
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._recalled: set[int] = set()
        self._target = 0

    @property
    def target(self) -> int:
        """The paper's p: chunks that T1 should hold."""
        return self._target

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Chunks of T1, T2, B1 and B2."""
        t1, t2, b1, b2 = (one.size for one in self._lists[1:])
        return t1, t2, b1, b2

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = min(self._target, capacity)

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._columns.cover(run)
        if self._where[run] in (_B1, _B2):
            self._recalled.discard(run)
            self._move(run, _T2)
        else:
            self._put(run, count, _T1)
        self._visitors[run] = visit

    def joins(self, run: int, visit: int) -> bool:
        return self._where[run] == _T1 and self._visitors[run] == visit

    def touched(self, run: int, visit: int) -> None:
        if self._where[run] == _T1 and self._visitors[run] != visit:
            self._move(run, _T2)
        else:
            self._lists[self._where[run]].use(run)
        self._visitors[run] = visit

    def split(self, run: int, head: int, head_count: int) -> None:
        super().split(run, head, head_count)
        if run in self._recalled:
            self._recalled.add(head)

    def victim(self) -> tuple[int, int] | None:
        recent, frequent = self._lists[_T1], self._lists[_T2]
        excess = recent.size - self._target
        if excess > 0 and (run := recent.oldest()) is not None:
            return run, min(excess, self._counts[run])
        if (run := frequent.oldest()) is None and excess <= 0:
            run = recent.oldest()
        return None if run is None else (run, self._counts[run])

    def removed(self, run: int) -> None:
        super().removed(run)
        self._recalled.discard(run)

    def remember(self, run: int) -> bool:
        self._move(run, _B1 if self._where[run] == _T1 else _B2)
        self._links.offered[run] = 0
        return True

    def forgotten(self) -> tuple[int, int] | None:
        t1, t2, b1, b2 = self.sizes
        first, other = self._lists[_B1], self._lists[_B2]
        excess = min(b1, t1 + b1 - self._capacity)
        if excess <= 0:
            first, other = other, first
            excess = min(b1 + b2, t1 + t2 + b1 + b2 - 2 * self._capacity)
        if excess <= 0:
            return None
        run = first.oldest()
        run = other.oldest() if run is None else run
        return None if run is None else (run, min(excess, self._counts[run]))

    def recalled(self, run: int) -> None:
        # What is asked for again is the last name to forget until it is back.
        self._lists[self._where[run]].use(run)
        if run in self._recalled:
            return
        self._recalled.add(run)
        _, _, b1, b2 = self.sizes
        if self._where[run] == _B1:
            step = max(1, b2 // b1)
            self._target = min(self._capacity, self._target + step * self._counts[run])
        else:
            step = max(1, b1 // b2)
            self._target = max(0, self._target - step * self._counts[run])
