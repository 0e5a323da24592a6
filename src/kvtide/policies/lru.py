"""Least recently used: the chunk whose last use is longest ago leaves first."""

import heapq
from collections.abc import Iterable


class LRUPolicy:
    """LRU over offered chunks, in O(log n) a victim.

    Stamps only ever rise, so the heap may hold an older stamp for a chunk than the true one: it is
    corrected when the entry surfaces. An id has at most one entry, hence the heap never outgrows the
    number of ids.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._stamps: dict[int, int] = {}
        self._offered: set[int] = set()
        self._heap: list[tuple[int, int]] = []
        self._queued: set[int] = set()

    def touched(self, chunk_ids: Iterable[int]) -> None:
        self._clock += 1
        self._stamps.update(dict.fromkeys(chunk_ids, self._clock))

    def offer(self, chunk_id: int) -> None:
        self._offered.add(chunk_id)
        if chunk_id not in self._queued:
            self._queued.add(chunk_id)
            heapq.heappush(self._heap, (self._stamps.get(chunk_id, 0), chunk_id))

    def withdraw(self, chunk_id: int) -> None:
        self._offered.discard(chunk_id)

    def forget(self, chunk_id: int) -> None:
        self._offered.discard(chunk_id)
        self._stamps.pop(chunk_id, None)

    def victim(self) -> int | None:
        while self._heap:
            stamp, chunk_id = self._heap[0]
            if chunk_id not in self._offered:
                heapq.heappop(self._heap)
                self._queued.discard(chunk_id)
            elif (true_stamp := self._stamps.get(chunk_id, 0)) != stamp:
                heapq.heapreplace(self._heap, (true_stamp, chunk_id))
            else:
                return chunk_id
        return None
