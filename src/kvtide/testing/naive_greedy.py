"""LFU with ageing and GDSF chunk by chunk, for ``PolicyTests``; see ``naive_policies``.

Every victim is the least of all keys; nothing is kept in order but the uses.
"""

from collections.abc import Callable, Sequence

from kvtide.testing.naive_policies import Chunk


class NaiveLFU:
    """M. Arlitt et al., "Evaluating content management techniques for web proxy caches", 2000: K = F + L.

    Of equal keys the one used longest ago leaves. A visit counts once; visits are numbered as they come, and
    an older one that comes back counts no more, but L is taken anew with each use.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.resident: list[Chunk] = []  # in the order of their uses
        self.l = 0
        self._f: dict[Chunk, int] = {}
        self._l_at_use: dict[Chunk, int] = {}
        self._depth: dict[Chunk, int] = {}
        self._last_visit: dict[Chunk, int] = {}

    def resize(self, capacity: int) -> None:
        """Keys know no capacity."""

    def key(self, chunk: Chunk) -> int:
        """What it is worth, from the floor of its last use."""
        return self._l_at_use[chunk] + self._f[chunk] * self.cost(self._depth[chunk])

    def cost(self, depth: int) -> int:
        """What it takes to have a chunk back, ``depth`` others before it."""
        return 1

    def arrived(self, chunk: Chunk, visit: int, depth: int) -> None:
        self.resident.append(chunk)
        self._f[chunk], self._last_visit[chunk] = 1, visit
        self._l_at_use[chunk], self._depth[chunk] = self.l, depth

    def used(self, chunk: Chunk, visit: int) -> None:
        self.resident.remove(chunk)
        self.resident.append(chunk)
        if visit > self._last_visit[chunk]:
            self._last_visit[chunk] = visit
            self._f[chunk] += 1
        self._l_at_use[chunk] = self.l

    def victim(self, may_leave: Callable[[Chunk], bool]) -> Chunk | None:
        chunk = min(filter(may_leave, self.resident), key=self.key, default=None)
        if chunk is not None:
            self.l = max(self.l, self.key(chunk))
        return chunk

    def left(self, chunk: Chunk) -> None:
        self.resident.remove(chunk)

    def asked_again(self, chunks: Sequence[Chunk]) -> None:
        """Nothing is remembered."""

    def forget(self, extended: Callable[[Chunk], bool]) -> list[Chunk]:
        return []

    def remembered(self) -> set[Chunk]:
        return set()


class NaiveGDSF(NaiveLFU):
    """L. Cherkasova, HPL-98-69R1, 1998: K = L + F * C / S, with S = 1 and C all chunks up to this one."""

    def cost(self, depth: int) -> int:
        return depth + 1
