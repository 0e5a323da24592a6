"""Least recently used: the run whose last use is longest ago leaves first."""

from kvtide.policies.columns import Columns
from kvtide.policies.recency import Links, RecencyList

ALL = 1 << 31
"""More chunks than any run has."""


class LRUPolicy:
    """LRU over runs, in constant time a use and a victim."""

    remembers = False

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._columns = Columns()
        self._links = Links(self._columns)
        self._runs = RecencyList(self._links)

    def resize(self, capacity: int) -> None:
        """Recency knows no capacity."""

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._columns.cover(run)
        self._links.offered[run] = 0
        self._runs.push(run)

    def joins(self, run: int, visit: int) -> bool:
        return True

    def grown(self, run: int, count: int) -> None:
        """Recency does not count chunks."""

    def touched(self, run: int, visit: int) -> None:
        self._runs.use(run)

    def split(self, run: int, head: int, head_count: int) -> None:
        self._columns.cover(head)
        self._links.offered[head] = 0
        self._runs.split(run, head)

    def offer(self, run: int) -> None:
        if not self._links.offered[run]:
            self._links.offered[run] = 1
            self._runs.offered(run)

    def withdraw(self, run: int) -> None:
        self._links.offered[run] = 0

    def victim(self) -> tuple[int, int] | None:
        run = self._runs.oldest()
        return None if run is None else (run, ALL)

    def shrunk(self, run: int, count: int) -> None:
        """Recency does not count chunks."""

    def removed(self, run: int) -> None:
        self._links.offered[run] = 0
        self._runs.discard(run)

    def remember(self, run: int) -> bool:
        self.removed(run)
        return False

    def forgotten(self) -> tuple[int, int] | None:
        return None

    def recalled(self, run: int) -> None:
        """Nothing is remembered."""
