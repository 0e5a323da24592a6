"""The books of a tier that many servers share: what it is remembered to hold, which is a hint.

Others write to it, and it evicts by its own rules. So nothing that leaves these books is told to anybody, and
what they say is confirmed by asking, or refuted by a read. Knows when each chunk was confirmed or refuted;
does not know who asks.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from kvtide.keys import ChunkRun, OffloadKey
from kvtide.manager.lower import TICKETS, LowerTier
from kvtide.manager.pending import PendingStore

CONFIRMED_FOR_S = 30
"""After which a chunk is asked for again before it is read: stores expire and evict."""


REFUTED_FOR_S = 300
"""For which a chunk that a read did not find is not believed to be there: another rank's part may be missing,
which who is asked cannot know, and only who writes it anew puts right."""

REFUTED_LIMIT = 4096
"""Chunks of which that is remembered."""


class SharedTierBooks(LowerTier):
    """One shared tier.

    In the catalog the place of a chunk is when it was confirmed, in seconds above ``TICKETS``; below that it
    is the number of a write of ours, which nobody has confirmed since.

    Attributes:
        now_s: Whole seconds since some beginning, to be kept right by whoever knows the time.
    """

    now_s = 0

    @cached_property
    def _refuted(self) -> dict[OffloadKey, int]:
        """When a read did not find a chunk, in seconds as ``now_s``; the longest ago comes first."""
        return {}

    def lose(self, run: ChunkRun, chunk_index: int) -> None:
        """Note that a read did not find a chunk, whatever anybody says."""
        super().lose(run, chunk_index)
        key = run.between(chunk_index, chunk_index + 1)[0]
        self._refuted.pop(key, None)
        self._refuted[key] = self.now_s
        if len(self._refuted) > REFUTED_LIMIT:
            del self._refuted[next(iter(self._refuted))]

    def reset(self) -> None:
        super().reset()
        self._refuted.clear()

    def is_refuted(self, key: OffloadKey) -> bool:
        """Whether a read did not find a chunk lately, and nobody here has written it since."""
        return self.now_s - self._refuted.get(key, -REFUTED_FOR_S - 1) <= REFUTED_FOR_S

    def first_doubtful(self, run: ChunkRun) -> int:
        """Find the first chunk of a run that is not known to be there, or was not confirmed lately.

        Chunks that are being written are not known to be there.
        """
        keys, _, _ = self._arrivals.positions(run)
        places = self._catalog.slots(self.index, run.group_index, keys, run.start, run.stop)
        sure = places >= TICKETS + self.now_s - CONFIRMED_FOR_S
        return run.start + (len(sure) if sure.all() else int(sure.argmin()))

    def note_presence(self, run: ChunkRun, present: Sequence[bool], visit: int) -> bool:
        """Take in what it says of chunks in a row; what is being written stays as it is.

        Args:
            run: The chunks.
            present: For each whether it is there.
            visit: Who asked.

        Returns:
            Whether anything has changed for readers.
        """
        keys, _, _ = self._arrivals.positions(run)
        places = self._catalog.slots(self.index, run.group_index, keys, run.start, run.stop)
        known = np.zeros(len(run), dtype=bool)
        known[: len(places)] = places >= 0
        changed = False
        there = np.array(present, dtype=bool)
        absent = ~there
        if self._refuted:
            there &= [not self.is_refuted(key) for key in run]
        for start, stop in _stretches(there & known):
            stamps = np.full(stop - start, self._first_place, dtype=np.int32)
            self._catalog.insert(self.index, run.group_index, keys, run.start + start, stamps, visit)
        for at in np.flatnonzero(known & absent).tolist():
            super().lose(run, run.start + at)
            changed = True
        for start, stop in _stretches(there & ~known):
            changed |= bool(self.found(run.between(run.start + start, run.start + stop), visit))
        return changed

    @property
    def _first_place(self) -> int:
        return TICKETS + self.now_s

    def _now_ready(self, store: PendingStore) -> None:
        for key in store.run if self._refuted else ():
            self._refuted.pop(key, None)
        super()._now_ready(store)

    def _discard(self, keys: Sequence[OffloadKey]) -> None:
        """Leave it where it is: others may want it, and the store has rules of its own."""


def _stretches(flags: np.ndarray) -> list[tuple[int, int]]:
    """Where ``bool[n]`` is true in a row: first, and one past the last."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
