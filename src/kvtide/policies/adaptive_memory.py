"""What is remembered of chunks that are asked for, whether they are kept or not.

Knows marks (numbers made of hashes), when they were seen and how often; does not know runs. Bounded, in flat
arrays, the one used longest ago forgotten first.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.policies.columns import Columns
from kvtide.policies.recency import Links, RecencyList

_SPREAD = np.uint64(0x9E3779B97F4A7C14)
_S30, _M30 = np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)
_S27, _M27 = np.uint64(27), np.uint64(0x94D049BB133111EB)
_S31 = np.uint64(31)
_WORD_BYTES = 8
MARK_LIMIT = 1 << 64


def marks_of(keys: Sequence[bytes], seed: int) -> np.ndarray:
    """Give ``uint64[n]``: one number per hash, evenly spread whatever the hashes are.

    The first and the last eight bytes are mixed as in splitmix64 (G. Steele, D. Lea, C. Flood, "Fast
    Splittable Pseudorandom Number Generators", OOPSLA 2014): what shares them shares its mark.
    """
    if not keys:
        return np.zeros(0, dtype=np.uint64)
    width = len(keys[0])
    table = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), width)
    words = np.zeros((len(keys), 2, _WORD_BYTES), dtype=np.uint8)
    used = min(width, _WORD_BYTES)
    words[:, 0, :used] = table[:, :used]
    words[:, 1, :used] = table[:, width - used :]
    first, last = words.view(np.uint64)[:, :, 0].T
    marks: np.ndarray = first * _SPREAD + last + np.uint64(seed & (MARK_LIMIT - 1))
    for shift, multiplier in ((_S30, _M30), (_S27, _M27)):
        marks ^= marks >> shift
        marks *= multiplier
    marks ^= marks >> _S31
    return marks


class Remembered(NamedTuple):
    """What is known of a mark.

    Attributes:
        class_index: Of the chunk when it was last asked for.
        time_s: When that was.
        seen: How often it has been asked for.
        missed: Chunks that had been missed by then, of all requests.
    """

    class_index: int
    time_s: float
    seen: int
    missed: int


class Memory:
    """Marks in the order of their last use."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._marks, self._classes = array("Q", [0]), array("H", [0])
        self._times_s, self._seen, self._missed = array("d", [0.0]), array("B", [0]), array("q", [0])
        self._columns = Columns()
        self._links = Links(self._columns)
        self._order = RecencyList(self._links)
        self._unused: list[int] = []
        self._cursor = 0
        self._purging = 0  # slots that are still to be looked at

    def __len__(self) -> int:
        return len(self._slots)

    def among(self, marks: Sequence[int]) -> list[int]:
        """Find which of some marks are remembered: their places among them."""
        found = self._slots.keys() & marks
        return [at for at, mark in enumerate(marks) if mark in found] if found else []

    def get(self, mark: int) -> Remembered | None:
        """Say what is known of a mark."""
        slot = self._slots.get(mark)
        return None if slot is None else self._at(slot)

    def put(self, mark: int, class_index: int, time_s: float, seen: int, missed: int) -> Remembered | None:
        """Remember a mark as told, most recent; give what was known of it before."""
        slot, before = self._slots.get(mark), None
        if slot is not None:
            before = self._at(slot)
            self._order.use(slot)
        else:
            slot = self._slots[mark] = self._take_slot()
            self._marks[slot] = mark
            self._order.push(slot)
        self._classes[slot], self._times_s[slot] = class_index, time_s
        self._seen[slot], self._missed[slot] = seen, missed
        return before

    def oldest(self) -> tuple[int, Remembered]:
        """Name the mark used longest ago; there is one."""
        slot = self._order.oldest()
        assert slot is not None, "nothing is remembered"
        return self._marks[slot], self._at(slot)

    def drop(self, mark: int) -> None:
        """Forget a mark."""
        slot = self._slots.pop(mark)
        self._order.discard(slot)
        self._links.offered[slot] = 0
        self._unused.append(slot)

    def begin_purge(self) -> None:
        """Mean to drop all that ``purge`` will be told to."""
        self._cursor, self._purging = 1, len(self._marks) - 1

    @property
    def is_purging(self) -> bool:
        """Whether ``purge`` has more to look at."""
        return self._purging > 0

    def purge(self, limit: int, most: int) -> None:
        """Drop marks from ``limit`` on among the next ``most`` places, after ``begin_purge``."""
        stop = min(self._cursor + most, self._cursor + self._purging)
        for slot in range(self._cursor, stop):
            if self._marks[slot] >= limit and self._links.offered[slot]:
                self.drop(self._marks[slot])
        self._purging -= stop - self._cursor
        self._cursor = stop

    def waiting(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Give classes and times of all marks below ``limit``: ``int64[n]``, ``float64[n]``."""
        chosen = np.frombuffer(self._links.offered, dtype=np.uint8)[: len(self._marks)] != 0
        chosen &= np.frombuffer(self._marks, dtype=np.uint64) <= np.uint64(limit - 1)
        classes = np.frombuffer(self._classes, dtype=np.uint16)[chosen].astype(np.int64)
        return classes, np.frombuffer(self._times_s, dtype=np.float64)[chosen]

    def _at(self, slot: int) -> Remembered:
        return Remembered(self._classes[slot], self._times_s[slot], self._seen[slot], self._missed[slot])

    def _take_slot(self) -> int:
        if self._unused:
            slot = self._unused.pop()
        else:
            slot = len(self._marks)
            for field in (self._marks, self._classes, self._times_s, self._seen, self._missed):
                field.append(0)
            self._columns.cover(slot)
        self._links.offered[slot] = 1
        return slot
