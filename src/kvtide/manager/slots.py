"""Which slots of the pool are free, in runs.

Knows slot numbers only. Hands out neighbouring slots for neighbouring chunks, because runs that are
contiguous on both sides become one copy.
"""

from collections.abc import Iterable


class SlotAllocator:
    """Free runs, kept by their first slot, by their end and by the power of two of their length.

    Allocation looks at no more than one run per power of two; freeing joins neighbours at once.
    """

    def __init__(self) -> None:
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._by_size: dict[int, set[int]] = {}
        self._capacity = 0
        self._free_count = 0

    @property
    def capacity(self) -> int:
        """Slots there are, free or not."""
        return self._capacity

    @property
    def free_count(self) -> int:
        """Slots that can be handed out now."""
        return self._free_count

    def grow(self, capacity: int) -> None:
        """Add slots at the end until there are ``capacity``; a smaller number changes nothing."""
        if capacity > self._capacity:
            start, self._capacity = self._capacity, capacity
            self._add(start, capacity - start)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` slots in as few runs as can be found.

        Args:
            count: At most ``free_count``.
            after: Slot of the chunk before the first one: its neighbour is tried first.

        Returns:
            Slots in the order in which the chunks should get them.
        """
        if count > self._free_count:
            raise ValueError(f"{count} slots asked for, {self._free_count} free")
        taken: list[int] = []
        if after is not None and after + 1 in self._length_at:
            taken += self._take(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._take(self._best_run(missing), missing)
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Give back slots, in any order."""
        for start, count in _runs(sorted(slots)):
            self._add(start, count)

    def runs(self) -> list[tuple[int, int]]:
        """List ``(first slot, count)`` of every free run, in order."""
        return sorted(self._length_at.items())

    def _best_run(self, count: int) -> int:
        """Pick the shortest class of runs that surely fits, else the longest there is."""
        sizes = [size for size, starts in self._by_size.items() if starts]
        fitting = [size for size in sizes if 1 << size >= count]
        size = min(fitting) if fitting else max(sizes)
        return min(self._by_size[size])

    def _take(self, start: int, count: int) -> range:
        length = self._remove(start)
        taken = min(count, length)
        if taken < length:
            self._insert(start + taken, length - taken)
        self._free_count -= taken
        return range(start, start + taken)

    def _add(self, start: int, count: int) -> None:
        self._free_count += count
        if (before := self._start_before.get(start)) is not None:
            count += self._remove(before)
            start = before
        if start + count in self._length_at:
            count += self._remove(start + count)
        self._insert(start, count)

    def _insert(self, start: int, count: int) -> None:
        self._length_at[start] = count
        self._start_before[start + count] = start
        self._by_size.setdefault(count.bit_length() - 1, set()).add(start)

    def _remove(self, start: int) -> int:
        count = self._length_at.pop(start)
        del self._start_before[start + count]
        self._by_size[count.bit_length() - 1].discard(start)
        return count


def _runs(ordered: list[int]) -> Iterable[tuple[int, int]]:
    start = count = 0
    for slot in ordered:
        if count and slot == start + count:
            count += 1
            continue
        if count:
            yield start, count
        start, count = slot, 1
    if count:
        yield start, count
