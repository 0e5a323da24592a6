"""Whether a folder that has a limit may be written to, as one process can know.

The limit is of all that write there together, and they do not know of each other. What they know is what was
counted last (``directory_lease``), which is some time ago. So each writes no more than a share of the limit
until it is counted again, whatever happens: what comes while it is counted may not be in that count, and so
the folder is never beyond the limit by more than the tolerance and two shares for each. Knows numbers; does
not know files.
"""

import threading
import time
from collections.abc import Callable

from kvtide.errors import TierFullError
from kvtide.tiers.directory_lease import Count

TOLERANCE = 0.1
"""So far beyond the limit, of it, it may be seen before writes are refused."""

SHARE = 1 / 8
"""Of the limit: what a process may write from one count to the next."""

NUDGE_SHARE = 1 / 64
"""Of the limit: after which it asks for a count before its time."""

LOOK_S, LOOK_AGAIN_S = 10.0, 1.0
"""How often it asks what was counted: as a rule, and while it is refused."""


class Room:
    """What one process may write.

    Args:
        limit_bytes: Of the folder; 0 for none.
        last_count: Asks what was counted last; may wait for the file system.
        nudge: Asks for a count; does not wait.
        clock: In seconds.
    """

    def __init__(
        self,
        limit_bytes: int,
        last_count: Callable[[], Count | None],
        nudge: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._last_count, self._nudge, self._clock = last_count, nudge, clock
        self._lock = threading.Lock()
        self._count: Count | None = None
        self._asked_s = -LOOK_S
        self._written_bytes = 0  # since the last count
        self._nudged_bytes = 0

    def take(self, byte_count: int) -> None:
        """Count what is about to be written.

        Raises:
            TierFullError: It may not be.
            OSError: It cannot be found out.
        """
        if not self.limit_bytes:
            return
        if self._clock() >= self._asked_s + LOOK_S:
            self._look()
        refusal = self._taken(byte_count)
        if refusal is not None and self._clock() >= self._asked_s + LOOK_AGAIN_S:
            self._look()
            refusal = self._taken(byte_count)
        if refusal is not None:
            raise TierFullError(refusal)

    def give_back(self, byte_count: int) -> None:
        """Take it back: it was not written."""
        with self._lock:
            self._written_bytes = max(0, self._written_bytes - byte_count)

    def _look(self) -> None:
        self._asked_s = self._clock()  # nobody else has to
        count = self._last_count()  # without the lock: it may take as long as the medium likes
        with self._lock:
            if count is not None and count != self._count:
                self._count = count
                self._written_bytes = self._nudged_bytes = 0

    def _taken(self, byte_count: int) -> str | None:
        """Count what is about to be written; or say why it may not be."""
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                self._written_bytes += byte_count
            nudging = self._written_bytes >= self._nudged_bytes + self.limit_bytes * NUDGE_SHARE
            if nudging:
                self._nudged_bytes = self._written_bytes
        if nudging:
            self._nudge()
        return refusal

    def _refusal(self) -> str | None:
        if self._count is not None and self._count.used_bytes > self.limit_bytes * (1 + TOLERANCE):
            return f"{self._count.used_bytes} bytes were counted, where {self.limit_bytes} are the limit"
        if self._written_bytes >= self.limit_bytes * SHARE:
            return f"{self._written_bytes} bytes were written since they were counted last"
        return None
