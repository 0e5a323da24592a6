"""Slots of host memory: which are free, and which a copy still reads.

A slot whose chunk is gone is free only once the last copy that reads it has ended, whatever became of the
chunk. Knows numbers; does not know chunks.
"""

import numpy as np

from kvtide.jobs import Ids, ids
from kvtide.manager.extents import ExtentAllocator

SLOTS_BEHIND_A_RUN = 32
"""Slots kept behind a run that grows: a session that decodes stores one chunk at a time."""


class Slots:
    """All slots.

    Attributes:
        pinned_count: Slots that open copies are reading.
        planned: Slots there will be.
    """

    def __init__(self) -> None:
        self._free = ExtentAllocator(SLOTS_BEHIND_A_RUN)
        self._readers = np.zeros(0, dtype=np.int32)  # open copies that read it, per slot
        self._unowned = np.zeros(0, dtype=bool)  # read by a copy alone: free once that has ended
        self._unowned_count = 0
        self.pinned_count = 0
        self.planned = 0

    @property
    def capacity(self) -> int:
        """Slots that can be used so far."""
        return self._free.capacity

    @property
    def free_count(self) -> int:
        """Slots that hold nothing and that nobody reads."""
        return self._free.free_count

    def grow(self, capacity: int, planned: int) -> None:
        """Use slots up to ``capacity``, of ``planned`` that there will be."""
        self._free.grow(capacity)
        self.planned = max(capacity, planned, self.planned)
        missing = self.planned - len(self._readers)
        if missing > 0 and capacity > len(self._readers):
            self._readers = np.concatenate((self._readers, np.zeros(missing, dtype=np.int32)))
            self._unowned = np.concatenate((self._unowned, np.zeros(missing, dtype=bool)))

    def allocate(self, count: int, after: int | None) -> Ids:
        """Take free slots, neighbours of slot ``after`` where that can be; there are as many."""
        extents = self._free.allocate(count, after)
        if len(extents) == 1 and extents[0][1] == 1:
            return ids((extents[0][0],))
        return packed(np.concatenate([np.arange(at, at + count, dtype=np.int32) for at, count in extents]))

    def hold(self, slots: Ids) -> None:
        """Let nobody else have slots while a copy reads them."""
        held = np.frombuffer(slots, dtype=np.int32)
        self._readers[held] += 1
        self.pinned_count += int(np.count_nonzero(self._readers[held] == 1))

    def release(self, slots: Ids) -> bool:
        """Undo ``hold``, once a copy; True when slots have become free by it."""
        held = np.frombuffer(slots, dtype=np.int32)
        self._readers[held] -= 1
        unread = held[self._readers[held] == 0]
        self.pinned_count -= len(unread)
        if not self._unowned_count:
            return False
        unowned = unread[self._unowned[unread]]
        if len(unowned):
            self._unowned[unowned] = False
            self._unowned_count -= len(unowned)
            self._free.free_all(unowned)
        return bool(len(unowned))

    def give_back(self, slots: np.ndarray) -> None:
        """Free slots that hold nothing any more; those that copies still read, when these have ended."""
        if self.pinned_count:
            read = self._readers[slots] > 0
            self._unowned[slots[read]] = True
            self._unowned_count += int(np.count_nonzero(read))
            slots = slots[~read]
        if len(slots):
            self._free.free_all(slots)

    def clear(self, kept: np.ndarray) -> None:
        """Free everything but the slots in ``kept``, which have an owner, and those that copies read."""
        read = np.flatnonzero(self._readers)
        self._unowned[read] = True
        self._unowned[kept] = False
        self._unowned_count = int(np.count_nonzero(self._unowned))
        self._free.clear(np.unique(np.concatenate((kept, read))))

    def check_invariants(self, owned: set[int]) -> None:
        """Check the counts, given the slots that hold a chunk, ready or on the way.

        Raises:
            AssertionError: They do not agree.
        """
        read = set(np.flatnonzero(self._readers).tolist())
        free, held = self.free_count, owned | read
        assert free + len(held) == self.capacity, f"{free} free + {len(held)} held != {self.capacity}"
        assert len(read) == self.pinned_count, f"{len(read)} slots are read, {self.pinned_count} counted"
        unowned = set(np.flatnonzero(self._unowned).tolist())
        assert len(unowned) == self._unowned_count, f"{unowned} are nobody's, {self._unowned_count} counted"
        assert unowned <= read - owned, f"slots {unowned} are nobody's and yet somebody's"


def packed(numbers: np.ndarray) -> Ids:
    """Pack ``int32[n]``."""
    found = ids(())
    found.frombytes(numbers.tobytes())
    return found
