"""S3-FIFO and SIEVE chunk by chunk, for ``PolicyTests``; see ``naive_policies``.

Queues are plain lists, the end where chunks leave in front.
"""

from collections.abc import Callable, Sequence

from kvtide.testing.naive_policies import Chunk, first_of

USES_TO_STAY = 2
"""Uses after which a chunk goes from S to M."""


class NaiveS3FIFO:
    """J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.

    The queues have the paper's names. What a prefix cache makes of it:

    * Nothing leaves, and no name is forgotten, before what extends it. Where the queue whose turn it is
      holds nothing that may go, the other one gives.
    * A chunk that was not used when its turn came, and had to stay, is ``passed``: it leaves first when it
      may, and a use of it is rewarded at once.
    * A visit counts once; visits are numbered as they come, and an older one that comes back counts no more.
      What only its own visit has used takes its place anew with each use.
    * A name that is asked for goes to the young end of G.
    """

    def __init__(self) -> None:
        self.c = 0
        self.clear()

    def clear(self) -> None:
        self.s: list[Chunk] = []
        self.m: list[Chunk] = []
        self.g: list[Chunk] = []
        self._freq: dict[Chunk, int] = {}
        self._last_visit: dict[Chunk, int] = {}
        self._own: set[Chunk] = set()  # used by nobody but who stored it
        self._passed: set[Chunk] = set()

    def resize(self, capacity: int) -> None:
        self.c = capacity

    @property
    def s_size(self) -> int:
        """Chunks that S should hold."""
        return max(1, self.c // 10)

    def arrived(self, chunk: Chunk, visit: int, depth: int) -> None:
        if chunk in self.g:
            self.g.remove(chunk)
            self.m.append(chunk)
        else:
            self.s.append(chunk)
        self._freq[chunk], self._last_visit[chunk] = 0, visit
        self._own.add(chunk)

    def used(self, chunk: Chunk, visit: int) -> None:
        queue = self.s if chunk in self.s else self.m
        if visit > self._last_visit[chunk]:
            self._last_visit[chunk] = visit
            self._own.discard(chunk)
            self._freq[chunk] = min(3, self._freq[chunk] + 1)
            if chunk in self._passed and self._freq[chunk] >= self._enough(queue):
                self._reward(chunk, queue)
        elif chunk in self._own and visit == self._last_visit[chunk]:
            queue.remove(chunk)
            queue.append(chunk)
            self._passed.discard(chunk)

    def victim(self, may_leave: Callable[[Chunk], bool]) -> Chunk | None:
        # What comes from S to M on the way is looked at, too.
        for queue in (self.s, self.m) if len(self.s) >= self.s_size else (self.m, self.s, self.m):
            chunk = self._evict(queue, may_leave)
            if chunk is not None:
                return chunk
        return None

    def left(self, chunk: Chunk) -> None:
        if chunk in self.s:
            self.s.remove(chunk)
            self.g.append(chunk)
        else:
            self.m.remove(chunk)
        self._passed.discard(chunk)

    def asked_again(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.g.remove(chunk)
            self.g.append(chunk)

    def forget(self, extended: Callable[[Chunk], bool]) -> list[Chunk]:
        gone: list[Chunk] = []
        while len(self.g) > self.c - self.s_size:
            chunk = first_of(self.g, lambda name: not extended(name))
            if chunk is None:
                break
            self.g.remove(chunk)
            gone.append(chunk)
        return gone

    def remembered(self) -> set[Chunk]:
        return set(self.g)

    # -- inside ---------------------------------------------------------------------------------

    def _evict(self, queue: list[Chunk], may_leave: Callable[[Chunk], bool]) -> Chunk | None:
        for chunk in queue:
            if chunk in self._passed and may_leave(chunk):
                return chunk
        while waiting := [chunk for chunk in queue if chunk not in self._passed]:
            chunk = waiting[0]
            if self._freq[chunk] >= self._enough(queue):
                self._reward(chunk, queue)
            elif may_leave(chunk):
                return chunk
            else:
                self._passed.add(chunk)
        return None

    def _enough(self, queue: list[Chunk]) -> int:
        return USES_TO_STAY if queue is self.s else 1

    def _reward(self, chunk: Chunk, queue: list[Chunk]) -> None:
        self._freq[chunk] = 0 if queue is self.s else self._freq[chunk] - 1
        queue.remove(chunk)
        self.m.append(chunk)
        self._passed.discard(chunk)


class NaiveSieve:
    """Y. Zhang et al., "SIEVE is simpler than LRU", NSDI 2024, algorithm 1.

    A queue from old to new and a hand that goes over it, here an index. What a prefix cache makes of it:

    * A chunk that was not used when the hand came, and had to stay, is ``passed``, and in the queue no more:
      it leaves first when it may. If it is used before that, it is put in again right behind the hand.
    * A visit counts once; visits are numbered as they come, and an older one that comes back counts no more.
      What only its own visit has used is new once more with each use.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.queue: list[Chunk] = []
        self.hand = 0
        self.visited: set[Chunk] = set()
        self.passed: list[Chunk] = []
        self._last_visit: dict[Chunk, int] = {}
        self._own: set[Chunk] = set()  # used by nobody but who stored it

    def resize(self, capacity: int) -> None:
        """The hand knows no capacity."""

    def arrived(self, chunk: Chunk, visit: int, depth: int) -> None:
        self.queue.append(chunk)
        self._last_visit[chunk] = visit
        self._own.add(chunk)

    def used(self, chunk: Chunk, visit: int) -> None:
        if visit > self._last_visit[chunk]:
            self._last_visit[chunk] = visit
            self._own.discard(chunk)
            self.visited.add(chunk)
            if chunk in self.passed:
                self.passed.remove(chunk)
                self.queue.insert(self.hand, chunk)
                self.hand += 1
        elif chunk in self._own and visit == self._last_visit[chunk]:
            self.left(chunk)
            self.queue.append(chunk)

    def victim(self, may_leave: Callable[[Chunk], bool]) -> Chunk | None:
        ripe = first_of(self.passed, may_leave)
        while ripe is None and self.queue:
            self.hand %= len(self.queue)
            chunk = self.queue[self.hand]
            if chunk in self.visited:
                self.visited.remove(chunk)
                self.hand += 1
            elif may_leave(chunk):
                return chunk
            else:
                self.passed.append(self.queue.pop(self.hand))
        return ripe

    def left(self, chunk: Chunk) -> None:
        if chunk in self.passed:
            self.passed.remove(chunk)
            return
        index = self.queue.index(chunk)
        del self.queue[index]
        self.hand -= index < self.hand
        self.visited.discard(chunk)

    def asked_again(self, chunks: Sequence[Chunk]) -> None:
        """Nothing is remembered."""

    def forget(self, extended: Callable[[Chunk], bool]) -> list[Chunk]:
        return []

    def remembered(self) -> set[Chunk]:
        return set()
