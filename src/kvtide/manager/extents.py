"""Which numbers of a range are free, as runs of neighbours.

Knows numbers only; they may be slots of the pool or entries of the catalog. Hands out neighbours for
neighbouring chunks, because runs that are contiguous on both sides become one copy, and keeps a few
free ones behind a run that is growing, or sessions that grow a chunk at a time would shred each other.
"""

from itertools import islice

import numpy as np

LOOKED_AT = 16
"""Extents of one class that are looked at for one that just fits."""

Extent = tuple[int, int]
"""First number and how many follow one another from there."""


class ExtentAllocator:
    """Free extents, by their first number, by their end, and by the power of two of their length.

    Taking looks at one extent per power of two, and a few of one; giving back joins neighbours at once. What
    is kept behind growing runs counts as free: it is given up, oldest first, before anybody is refused.

    Args:
        reserve: Numbers to keep behind a run that has grown, where they are free.
        reserve_share: At most one in so many of all numbers is kept like that.
    """

    def __init__(self, reserve: int = 0, reserve_share: int = 64) -> None:
        self._reserve = reserve
        self._reserve_share = reserve_share
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._by_size: list[dict[int, None]] = []
        self._reserved: dict[int, int] = {}  # first number -> how many; oldest first
        self._reserved_count = 0
        self._capacity = 0
        self._free_count = 0

    @property
    def capacity(self) -> int:
        """Numbers there are, free or not."""
        return self._capacity

    @property
    def free_count(self) -> int:
        """Numbers that can be handed out now."""
        return self._free_count

    @property
    def longest(self) -> int:
        """A length that is surely free in one piece: half of the truth at worst."""
        for size in range(len(self._by_size) - 1, -1, -1):
            if self._by_size[size]:
                return 1 << size
        return 0

    def grow(self, capacity: int) -> None:
        """Add numbers at the end until there are ``capacity``; a smaller one changes nothing."""
        if capacity > self._capacity:
            start, self._capacity = self._capacity, capacity
            self.free(start, capacity - start)

    def allocate(self, count: int, after: int | None = None) -> list[Extent]:
        """Take ``count`` numbers in as few extents as can be found.

        Args:
            count: At most ``free_count``.
            after: The number of the chunk before the first one: its neighbours are tried first.

        Raises:
            ValueError: More than there are.
        """
        if count > self._free_count:
            raise ValueError(f"{count} asked for, {self._free_count} free")
        taken: list[Extent] = []
        missing = count
        if after is not None:
            missing -= self._take_behind(after + 1, count, taken)
        while missing:
            # Taken in this call, and still counted as free: hence not ``missing``.
            if self._free_count - self._reserved_count < count:
                self._give_up_oldest()
                continue
            start, length = self._best(missing)
            taken.append((start, min(missing, length)))
            if length > missing:
                self._insert(start + missing, length - missing)
            missing -= taken[-1][1]
        self._free_count -= count
        if self._reserve and taken and after is not None:
            self._keep_behind(sum(taken[-1]))
        return taken

    def free(self, start: int, count: int) -> None:
        """Give back neighbours."""
        self._free_count += count
        if (before := self._start_before.get(start)) is not None:
            count += self._remove(before)
            start = before
        if start + count in self._length_at:
            count += self._remove(start + count)
        self._insert(start, count)

    def free_all(self, numbers: np.ndarray) -> None:
        """Give back numbers in any order, none of them twice."""
        if len(numbers) == 1:
            self.free(int(numbers[0]), 1)
        elif len(numbers):
            # They come in pieces as a rule: these are put in order, not each number.
            breaks = np.flatnonzero(numbers[1:] != numbers[:-1] + 1) + 1
            starts = numbers[np.concatenate(([0], breaks))]
            ends = numbers[np.concatenate((breaks, [len(numbers)])) - 1] + 1
            order = np.argsort(starts)
            starts, ends = starts[order], ends[order]
            apart = np.flatnonzero(starts[1:] != ends[:-1])
            starts = starts[np.concatenate(([0], apart + 1))].tolist()
            ends = ends[np.concatenate((apart, [len(ends) - 1]))].tolist()
            for start, end in zip(starts, ends, strict=True):
                self.free(start, end - start)

    def clear(self, taken: np.ndarray) -> None:
        """Begin anew: everything is free but ``taken``, distinct numbers in any order."""
        capacity, self._capacity = self._capacity, 0
        self._length_at, self._start_before, self._by_size = {}, {}, []
        self._reserved, self._reserved_count, self._free_count = {}, 0, 0
        self._capacity = capacity
        bounds = np.concatenate(([-1], np.sort(taken), [capacity]))
        for gap in np.flatnonzero(np.diff(bounds) > 1).tolist():
            self.free(int(bounds[gap]) + 1, int(bounds[gap + 1] - bounds[gap]) - 1)

    def extents(self) -> list[Extent]:
        """List every free extent, in order; what is kept behind a run is one of its own."""
        return sorted([*self._length_at.items(), *self._reserved.items()])

    # -- inside ---------------------------------------------------------------------------------

    def _take_behind(self, start: int, count: int, taken: list[Extent]) -> int:
        """Take what is free, or kept, directly behind a run; say how much that was."""
        found, begin = 0, start
        while found < count:
            if (length := self._reserved.pop(start, 0)) > 0:
                self._reserved_count -= length
            elif start in self._length_at:
                length = self._remove(start)
            else:
                break
            used = min(length, count - found)
            if used < length:
                self._insert(start + used, length - used)
            found += used
            start += used
        if found:
            taken.append((begin, found))
        return found

    def _keep_behind(self, start: int) -> None:
        if (length := self._length_at.get(start, 0)) == 0:
            return
        kept = min(self._reserve, length, self._capacity // self._reserve_share)
        if not kept:
            return
        self._remove(start)
        if length > kept:
            self._insert(start + kept, length - kept)
        self._reserved[start] = kept
        self._reserved_count += kept
        while self._reserved_count * self._reserve_share > self._capacity:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        start = next(iter(self._reserved))
        count = self._reserved.pop(start)
        self._reserved_count -= count
        self._free_count -= count  # it was counted as free already
        self.free(start, count)

    def _best(self, count: int) -> Extent:
        """Take out an extent that just fits, or one that surely does, or one of the largest there are."""
        classes = self._by_size
        fitting = (count - 1).bit_length()
        if 0 < fitting <= len(classes):
            some = islice(reversed(classes[fitting - 1]), LOOKED_AT)
            fit = min(
                ((self._length_at[one], one) for one in some if self._length_at[one] >= count), default=None
            )
            if fit is not None:
                self._remove(fit[1])
                return fit[1], fit[0]
        for size in range(fitting, len(classes)):
            if classes[size]:
                break
        else:
            size = min(fitting, len(classes)) - 1
            while not classes[size]:
                size -= 1
        # popitem leaves no gap at the end; the first item of a dictionary that is emptied from the
        # front takes ever longer to find.
        start, _ = classes[size].popitem()
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        return start, length

    def _insert(self, start: int, count: int) -> None:
        self._length_at[start] = count
        self._start_before[start + count] = start
        size = count.bit_length() - 1
        while len(self._by_size) <= size:
            self._by_size.append({})
        self._by_size[size][start] = None

    def _remove(self, start: int) -> int:
        count = self._length_at.pop(start)
        del self._start_before[start + count]
        del self._by_size[count.bit_length() - 1][start]
        return count
