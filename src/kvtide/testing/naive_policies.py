"""Eviction policies chunk by chunk: slow, and meant to be obviously right.

What ``PolicyTests`` holds a policy against. Knows names of chunks in plain lists, the one to leave first in
front; who extends whom and who must stay is asked of the caller each time. Knows no runs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

Chunk = bytes
"""The hash of a chunk's whole prefix."""


class NaivePolicy(Protocol):
    """What the naive host tells a policy, and what it asks. A use of a prefix comes deepest chunk first."""

    def clear(self) -> None:
        """Forget every chunk, and all that was learnt; the capacity stays."""

    def resize(self, capacity: int) -> None:
        """Note how many chunks there is room for."""

    def arrived(self, chunk: Chunk, visit: int, depth: int) -> None:
        """Note that a chunk is resident from now on, ``depth`` others before it; a use follows."""

    def used(self, chunk: Chunk, visit: int) -> None:
        """Note a use of a resident chunk."""

    def victim(self, may_leave: Callable[[Chunk], bool]) -> Chunk | None:
        """Name the chunk that should leave first."""

    def left(self, chunk: Chunk) -> None:
        """Note that a chunk is no longer resident."""

    def asked_again(self, chunks: Sequence[Chunk]) -> None:
        """Note that remembered chunks are being brought back, deepest first."""

    def forget(self, extended: Callable[[Chunk], bool]) -> list[Chunk]:
        """Drop names of chunks that have left, as long as there are too many; say which."""

    def remembered(self) -> set[Chunk]:
        """Chunks that have left and whose names are kept."""


def first_of(chunks: Iterable[Chunk], wanted: Callable[[Chunk], bool]) -> Chunk | None:
    """Name the first of these chunks that is wanted."""
    return next((chunk for chunk in chunks if wanted(chunk)), None)


class NaiveLRU:
    """The chunk whose last use is longest ago leaves first."""

    def __init__(self) -> None:
        self.resident: list[Chunk] = []

    def clear(self) -> None:
        self.resident = []

    def resize(self, capacity: int) -> None:
        """Recency knows no capacity."""

    def arrived(self, chunk: Chunk, visit: int, depth: int) -> None:
        self.resident.append(chunk)

    def used(self, chunk: Chunk, visit: int) -> None:
        self.resident.remove(chunk)
        self.resident.append(chunk)

    def victim(self, may_leave: Callable[[Chunk], bool]) -> Chunk | None:
        return first_of(self.resident, may_leave)

    def left(self, chunk: Chunk) -> None:
        self.resident.remove(chunk)

    def asked_again(self, chunks: Sequence[Chunk]) -> None:
        """Nothing is remembered."""

    def forget(self, extended: Callable[[Chunk], bool]) -> list[Chunk]:
        return []

    def remembered(self) -> set[Chunk]:
        return set()


class NaiveARC:
    """N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.

    The lists and ``p`` have the paper's names; the paper's LRU end is the front. What a prefix cache makes
    of it:

    * Nothing leaves, and no name is forgotten, before what extends it. Where the list whose turn it is
      holds nothing that may go, the other one gives.
    * Chunks that are asked for together adapt ``p`` by the sizes of B1 and B2 at that moment, whose ratio is
      rounded down. They come back when their copies have ended; until then they adapt ``p`` no second
      time, and their names are the last to be forgotten.
    * A visit that comes back to chunks it was the last to use has not used them again.
    * A victim is named without knowing who comes: a tie, |T1| = p, takes from T2.
    """

    def __init__(self) -> None:
        self.c = 0
        self.clear()

    def clear(self) -> None:
        self.t1: list[Chunk] = []
        self.t2: list[Chunk] = []
        self.b1: list[Chunk] = []
        self.b2: list[Chunk] = []
        self.p = 0
        self._asked: set[Chunk] = set()
        self._last_visit: dict[Chunk, int] = {}

    def resize(self, capacity: int) -> None:
        self.c = capacity

    def arrived(self, chunk: Chunk, visit: int, depth: int) -> None:
        if chunk in self.b1:  # case II
            self.b1.remove(chunk)
            self.t2.append(chunk)
        elif chunk in self.b2:  # case III
            self.b2.remove(chunk)
            self.t2.append(chunk)
        else:  # case IV
            self.t1.append(chunk)
        self._asked.discard(chunk)
        self._last_visit[chunk] = visit

    def used(self, chunk: Chunk, visit: int) -> None:
        if chunk in self.t1 and self._last_visit[chunk] == visit:
            self.t1.remove(chunk)
            self.t1.append(chunk)
        else:  # case I
            (self.t1 if chunk in self.t1 else self.t2).remove(chunk)
            self.t2.append(chunk)
        self._last_visit[chunk] = visit

    def victim(self, may_leave: Callable[[Chunk], bool]) -> Chunk | None:  # REPLACE
        return first_of(self.t1 + self.t2 if len(self.t1) > self.p else self.t2 + self.t1, may_leave)

    def left(self, chunk: Chunk) -> None:
        if chunk in self.t1:
            self.t1.remove(chunk)
            self.b1.append(chunk)
        else:
            self.t2.remove(chunk)
            self.b2.append(chunk)

    def asked_again(self, chunks: Sequence[Chunk]) -> None:
        b1, b2 = len(self.b1), len(self.b2)
        for chunk in chunks:
            names = self.b1 if chunk in self.b1 else self.b2
            names.remove(chunk)
            names.append(chunk)
            if chunk in self._asked:
                continue
            self._asked.add(chunk)
            if names is self.b1:
                self.p = min(self.c, self.p + max(1, b2 // b1))
            else:
                self.p = max(0, self.p - max(1, b1 // b2))

    def forget(self, extended: Callable[[Chunk], bool]) -> list[Chunk]:
        gone: list[Chunk] = []
        while True:
            if self.b1 and len(self.t1) + len(self.b1) > self.c:
                names = self.b1 + self.b2
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.c:
                names = self.b2 + self.b1
            else:
                return gone
            chunk = first_of(names, lambda name: not extended(name))
            if chunk is None:
                return gone
            (self.b1 if chunk in self.b1 else self.b2).remove(chunk)
            self._asked.discard(chunk)
            gone.append(chunk)

    def remembered(self) -> set[Chunk]:
        return {*self.b1, *self.b2}
