"""Whether ranking by density does better than recency just now: two small caches serve the same requests.

Knows marks and classes of thinned prompts, chunk by chunk, and counts hits. Chunks are chosen by their marks:
what a cache of a few hundred does with some is what one of full size does with all (C. Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015).
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import sqrt
from typing import NamedTuple

import numpy as np

from kvtide.policies.adaptive_density import HitDensity
from kvtide.policies.adaptive_memory import MARK_LIMIT

SMALL_CACHE_CHUNKS = 512

_MEMORY_REQUESTS = 2000
_FIRST_REQUESTS = 200
_MARGIN = 0.003
_DEVIATIONS = 0.5


class _Use(NamedTuple):
    """Chunks of one class that one request has used.

    Attributes:
        number: Of the use; later ones are greater.
        class_index: Of the chunks.
        time_s: When it was.
    """

    number: int
    class_index: int
    time_s: float


class SmallCache:
    """A cache of single chunks, closed under prefixes, that may refuse what ranks lowest.

    Args:
        capacity: Chunks.
        density: What ranks them; None: their last use.
    """

    def __init__(self, capacity: int, density: HitDensity | None) -> None:
        self._capacity = capacity
        self._density = density
        self._uses: dict[int, _Use] = {}  # chunk -> its last use
        self._above: dict[int, int] = {}
        self._kids: dict[int, int] = {}
        self._ends: dict[int, None] = {}  # chunks that nothing extends
        self._use_count = 0

    def hits(self, marks: Sequence[int]) -> int:
        """Count the leading chunks that are there."""
        uses, count = self._uses, 0
        for mark in marks:
            if mark not in uses:
                break
            count += 1
        return count

    def serve(self, marks: Sequence[int], classes: Sequence[int], now_s: float) -> None:
        """Use a prompt and keep of it what ranks high enough."""
        above, use = 0, _Use(0, -1, 0.0)
        for mark, class_index in zip(marks[: self._capacity], classes, strict=False):
            if class_index != use.class_index:
                self._use_count += 1
                use = _Use(self._use_count, class_index, now_s)
            if mark not in self._uses:
                self._above[mark], self._kids[mark] = above, 0
                self._ends[mark] = None
                if above:
                    self._kids[above] += 1
                    self._ends.pop(above, None)
            self._uses[mark] = use
            above = mark
        if len(self._uses) > self._capacity:
            self._evict(now_s)

    def _evict(self, now_s: float) -> None:
        """Let chunks go, what ranks lowest of those that nothing extends first, until the rest fits."""
        uses = self._uses
        heap = self._ranked([(uses[end], end) for end in self._ends], now_s)
        heapify(heap)
        while True:
            _, use, mark = heappop(heap)
            while mark and uses[mark] is use and not self._kids[mark]:
                if len(uses) <= self._capacity:
                    return
                mark = self._drop(mark)
            if mark and not self._kids[mark]:
                heappush(heap, (self._value(uses[mark], now_s), uses[mark], mark))

    def _value(self, use: _Use, now_s: float) -> float:
        return 0.0 if self._density is None else self._density.value(use.class_index, now_s - use.time_s)

    def _ranked(self, ends: list[tuple[_Use, int]], now_s: float) -> list[tuple[float, _Use, int]]:
        if self._density is None:
            return [(0.0, use, end) for use, end in ends]
        classes = np.array([use.class_index for use, _ in ends])
        ages_s = now_s - np.array([use.time_s for use, _ in ends])
        values = self._density.values(classes, ages_s).tolist()
        return [(value, use, end) for value, (use, end) in zip(values, ends, strict=True)]

    def _drop(self, mark: int) -> int:
        """Drop a chunk that nothing extends; name the one it extends, 0 for none."""
        above = self._above.pop(mark)
        del self._uses[mark], self._kids[mark], self._ends[mark]
        if above:
            self._kids[above] -= 1
            if not self._kids[above]:
                self._ends[above] = None
        return above


class Guard:
    """Says when to rank by recency.

    Args:
        density: What ranks chunks.
        capacity: Chunks of the cache that is guarded.

    Attributes:
        limit: Marks below are served.
        prefers_recency: Recency has had more hits lately, by more than chance.
    """

    def __init__(self, density: HitDensity, capacity: int) -> None:
        small = min(SMALL_CACHE_CHUNKS, capacity)
        self.limit = MARK_LIMIT * small // max(capacity, 1)
        self._by_density = SmallCache(small, density)
        self._by_recency = SmallCache(small, None)
        self._lead = self._squares = self._asked = 0.0
        self._requests = 0
        self.prefers_recency = False

    def serve(self, marks: Sequence[int], classes: Sequence[int], now_s: float) -> None:
        """Let both serve a thinned prompt, and compare."""
        self._requests += 1
        if not marks:
            return
        lead = self._by_recency.hits(marks) - self._by_density.hits(marks)
        self._by_density.serve(marks, classes, now_s)
        self._by_recency.serve(marks, classes, now_s)
        keep = 1.0 - 1.0 / _MEMORY_REQUESTS
        self._lead = self._lead * keep + lead
        self._squares = self._squares * keep + lead * lead
        self._asked = self._asked * keep + len(marks)
        if self.prefers_recency:
            self.prefers_recency = self._lead >= 0
        elif self._requests >= _FIRST_REQUESTS:
            certain = self._lead > _DEVIATIONS * sqrt(self._squares)
            self.prefers_recency = certain and self._lead > _MARGIN * self._asked
