"""Runs on one of several recency lists, counted in chunks: what ARC, S3-FIFO and SIEVE are made of.

Knows on which list a run is, how many chunks it has and whose visit was the last; does not know what a list
means, nor when a run goes from one to another: that is the algorithm.
"""

from kvtide.policies.columns import Columns
from kvtide.policies.recency import Links, RecencyList


class ListedRuns:
    """The part of a policy that its algorithm does not change.

    Whoever derives from it says in ``list_count`` how many lists there are, and numbers them. The list with
    number 0 is where nobody is put who was taken off; it may hold runs all the same.
    """

    list_count: int

    def clear(self) -> None:
        self._columns = Columns()
        self._links = Links(self._columns)
        self._lists = [RecencyList(self._links) for _ in range(self.list_count)]
        self._where = self._columns.ints("B")
        self._counts = self._columns.ints()
        self._visitors = self._columns.ints("q")

    def grown(self, run: int, count: int) -> None:
        self._counts[run] += count
        self._lists[self._where[run]].size += count

    def split(self, run: int, head: int, head_count: int) -> None:
        self._columns.cover(head)
        where = self._where[head] = self._where[run]
        self._visitors[head] = self._visitors[run]
        self._counts[head] = head_count
        self._counts[run] -= head_count
        self._links.offered[head] = 0
        self._lists[where].split(run, head)

    def offer(self, run: int) -> None:
        if not self._links.offered[run]:
            self._links.offered[run] = 1
            self._lists[self._where[run]].offered(run)

    def withdraw(self, run: int) -> None:
        self._links.offered[run] = 0

    def shrunk(self, run: int, count: int) -> None:
        self._counts[run] -= count
        self._lists[self._where[run]].size -= count

    def removed(self, run: int) -> None:
        here = self._lists[self._where[run]]
        here.discard(run)
        here.size -= self._counts[run]
        self._where[run] = self._links.offered[run] = 0

    # -- inside ---------------------------------------------------------------------------------

    def _put(self, run: int, count: int, to: int) -> None:
        """Put a run that is on no list in front of one; it may not leave yet."""
        self._where[run], self._counts[run] = to, count
        self._links.offered[run] = 0
        self._lists[to].push(run)
        self._lists[to].size += count

    def _move(self, run: int, to: int) -> None:
        """Put a run in front of another list."""
        here, count = self._lists[self._where[run]], self._counts[run]
        here.discard(run)
        here.size -= count
        self._where[run] = to
        self._lists[to].push(run)
        self._lists[to].size += count
