"""What a private tier holds and who leaves it when there is no room: the least recently used.

vLLM leaves eviction to the tier, and kvtide's private tiers leave it to whoever drives them. Knows keys and
counts, all records being of one size; does not know bytes, prefixes or threads.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvtide.keys import OffloadKey


class Room:
    """Books of one tier. Chunks that come together are in prefix order: the deepest of them leaves first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[OffloadKey, None] = OrderedDict()  # who leaves first stands first
        self._coming: set[OffloadKey] = set()

    def __len__(self) -> int:
        return len(self._kept) + len(self._coming)

    def lacks(self, key: OffloadKey) -> bool:
        """Whether a chunk is neither there nor on its way."""
        return key not in self._kept and key not in self._coming

    def admit(self, keys: Collection[OffloadKey], capacity: int) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Make room for chunks that are not there.

        Args:
            keys: In prefix order.
            capacity: Records that the tier can hold.

        Returns:
            Which of them may be written, the first ones, and which others are to be discarded before.
        """
        admitted = list(keys)[: max(0, capacity - len(self._coming))]
        leaving = self.evict(len(self) + len(admitted) - capacity)
        self._coming.update(admitted)
        return admitted, leaving

    def evict(self, count: int) -> list[OffloadKey]:
        """Choose who leaves: at most so many, none for a count below one."""
        return [self._kept.popitem(last=False)[0] for _ in range(min(count, len(self._kept)))]

    def note_written(self, keys: Collection[OffloadKey], there: Collection[OffloadKey]) -> None:
        """Writes have ended; ``there`` are those of them that can be read back."""
        self._coming.difference_update(keys)
        for key in reversed(list(there)):
            self._kept[key] = None
            self._kept.move_to_end(key)

    def note_found(self, keys: Iterable[OffloadKey]) -> None:
        """Take in what lies there from before, those near the beginning of prompts first."""
        for key in keys:
            if self.lacks(key):
                self._kept[key] = None
                self._kept.move_to_end(key, last=False)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Note use, of those that are there."""
        for key in reversed(list(keys)):
            if key in self._kept:
                self._kept.move_to_end(key)

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """They are gone."""
        for key in keys:
            self._kept.pop(key, None)

    def clear(self) -> None:
        """All are gone; what is on its way is still to end."""
        self._kept.clear()
