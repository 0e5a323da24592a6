"""Runs in the order of their last use, in flat arrays: what LRU and its descendants are made of."""

from heapq import heappop, heappush

from kvtide.policies.columns import Columns

SCAN_LIMIT = 2048
"""Runs that may be passed over in one search: no call of the scheduler may take milliseconds."""

_BITS = 32
_MASK = (1 << _BITS) - 1
_NIL = 0  # the root of the tree is in no list


class Links:
    """Neighbours of each run, and whether it may leave; shared by lists that never hold the same run.

    Args:
        columns: Where to keep them; whoever names a run covers it there first.
    """

    def __init__(self, columns: Columns) -> None:
        self.newer = columns.ints()
        self.older = columns.ints()
        self.offered = columns.ints("B")


class RecencyList:
    """A doubly linked list of runs, the least recently used at its end.

    ``oldest`` names the last run that may leave. A run that may not is passed over once: it is *parked*, off
    the list, and since everything on the list is newer, those that may leave later come before it, in the
    order in which they were parked. So a search costs what was used since the last one, no more.

    Attributes:
        size: Chunks of all its runs, kept by the owner.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._newest = _NIL
        self._oldest = _NIL
        self._parked: dict[int, int] = {}  # run -> when it was parked
        self._ripe: list[int] = []  # heap of parked runs that may leave: when << 32 | run
        self._parked_count = 0
        self.size = 0

    def push(self, run: int) -> None:
        """Put a run that is on no list in front."""
        links = self._links
        links.newer[run], links.older[run] = _NIL, self._newest
        if self._newest:
            links.newer[self._newest] = run
        else:
            self._oldest = run
        self._newest = run

    def discard(self, run: int) -> None:
        """Take a run off."""
        if self._parked and self._parked.pop(run, None) is not None:
            return
        links = self._links
        newer, older = links.newer[run], links.older[run]
        if newer:
            links.older[newer] = older
        else:
            self._newest = older
        if older:
            links.newer[older] = newer
        else:
            self._oldest = newer

    def use(self, run: int) -> None:
        """Move a run to the front."""
        if run != self._newest or run in self._parked:
            self.discard(run)
            self.push(run)

    def split(self, run: int, head: int) -> None:
        """Put ``head`` next to ``run``, on the newer side."""
        when = self._parked.get(run)
        if when is not None:
            self._parked[head] = when
            self.offered(head)
            return
        links = self._links
        newer = links.newer[run]
        links.newer[head], links.older[head] = newer, run
        links.newer[run] = head
        if newer:
            links.older[newer] = head
        else:
            self._newest = head

    def offered(self, run: int) -> None:
        """Note that a run on this list may leave."""
        when = self._parked.get(run) if self._parked else None
        if when is not None and self._links.offered[run]:
            heappush(self._ripe, when << _BITS | run)

    def oldest(self) -> int | None:
        """Name the least recently used run that may leave; None when there is none within reach."""
        offered, run = self._links.offered, self._oldest
        if not self._ripe:
            if run and offered[run]:
                return run
        elif (ripe := self.ripe()) is not None:
            return ripe
        for _ in range(SCAN_LIMIT):
            run = self._oldest
            if not run:
                return None
            if offered[run]:
                return run
            self.pass_over(run)
        return None

    # -- for those who judge at the end whom they meet there ------------------------------------

    @property
    def last(self) -> int | None:
        """The least recently used run that was not passed over, whether it may leave or not."""
        return self._oldest or None

    def ripe(self) -> int | None:
        """Name the first of those that were passed over and may leave now."""
        while self._ripe:
            run = self._ripe[0] & _MASK
            if self._links.offered[run] and self._parked.get(run) == self._ripe[0] >> _BITS:
                return run
            heappop(self._ripe)
        return None

    def pass_over(self, run: int) -> None:
        """Park the ``last`` one."""
        self._oldest = self._links.newer[run]
        if self._oldest:
            self._links.older[self._oldest] = _NIL
        else:
            self._newest = _NIL
        self._parked_count += 1
        self._parked[run] = self._parked_count

    def is_parked(self, run: int) -> bool:
        """Whether a run on this list was passed over and not used since."""
        return run in self._parked

    def runs(self) -> list[int]:
        """List every run, the one to leave first in front; for checks."""
        listed, run = [], self._oldest
        while run:
            listed.append(run)
            run = self._links.newer[run]
        return sorted(self._parked, key=lambda one: self._parked[one]) + listed
