"""Keeps a shared folder near its limit: what was used longest ago goes, of whatever model.

A round walks through the folder and counts, by age, what lies there; when that is beyond the limit it walks
again and removes what is older than the age that was found. Between the two nothing is remembered of single
records, so what a round takes of memory does not depend on how many there are, and a record that was read
meanwhile is young again. One of all hosts does this at a time (``directory_lease``).
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvtide.errors import TierError
from kvtide.tiers.directory_lease import Lease
from kvtide.tiers.directory_walk import LEFT_OVER_S, age_class, walk

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.9
"""Of the limit: down to which records are removed."""

PERIOD_S = 30.0
REST_FACTOR = 3.0
"""A round that took long is followed by a rest of so many times as long."""

NUDGED_REST_S = 1.0
"""And one that somebody asks for comes no sooner than this, or than the last one took."""

BEAT_S = 20.0
"""How often the lease is written to."""

ENTRIES_AT_ONCE = 256
"""Looked at without a pause; then it rests for as long as that took."""

LONGEST_PAUSE_S = 1.0


class Ended(Exception):
    """The round is not to go on: the end is near, or another has the lease."""


class Cleaner:
    """Removes records, in a thread of its own once it is started.

    Args:
        folder: Absolute; all below it that has the names of records counts.
        limit_bytes: Of all that together.
        lease: Of this one.
    """

    def __init__(self, folder: str, limit_bytes: int, lease: Lease | None = None) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._lease = lease or Lease(folder)
        self._changed = threading.Condition()
        self._closing = self._nudged = False
        self._thread: threading.Thread | None = None
        self._beat_due_s = 0.0
        self._trouble: str | None = None

    # -- the thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; once is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtide-cleaner", daemon=True)
            self._thread.start()

    def nudge(self) -> None:
        """Ask for a round soon; does not wait."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def close(self, patience_s: float = 5.0) -> bool:
        """End; False when the file system does not answer: then the thread ends when it does."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(patience_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            holds = self._round_told()
            took_s = time.monotonic() - began_s
            if not self._rested(
                max(PERIOD_S, REST_FACTOR * took_s) * random.uniform(0.8, 1.2), took_s, holds
            ):
                break
        self._lease.release()

    def _round_told(self) -> bool:
        """One round, whose trouble is told once; whether it had the lease."""
        try:
            holds = self.round()
        except (OSError, TierError) as error:
            self._tell(str(error))
            return False
        except Exception:  # the next round may do better
            logger.exception("%s: a round of the cleaner failed in a way that none may", self._folder)
            return False
        self._tell(None)
        return holds

    def _tell(self, trouble: str | None) -> None:
        if trouble is not None and self._trouble is None:
            logger.warning("%s: records cannot be counted or removed: %s", self._folder, trouble)
        elif trouble is None and self._trouble is not None:
            logger.warning("%s: records can be counted and removed again", self._folder)
        self._trouble = trouble

    def _rested(self, rest_s: float, least_s: float, holds: bool) -> bool:
        """Rest until the next round or a nudge, and keep the lease meanwhile; False at the end."""
        began_s = time.monotonic()
        while True:
            with self._changed:
                due_s = began_s + (max(least_s, NUDGED_REST_S) if self._nudged else rest_s)
                left_s = due_s - time.monotonic()
                if self._closing or left_s <= 0:
                    self._nudged = False
                    return not self._closing
                self._changed.wait(min(left_s, BEAT_S))
                if self._closing:
                    return False
            if holds:
                with contextlib.suppress(OSError):
                    holds = self._kept()

    # -- a round ----------------------------------------------------------------------------------

    def round(self) -> bool:
        """Count, and remove what is too much; False when that is another's to do.

        Raises:
            OSError: The folder cannot be read.
        """
        if not self._lease.hold():
            return False
        self._beat_due_s = time.monotonic() + BEAT_S
        try:
            used_bytes, ages = self._counted(now_s := time.time())
            self._lease.tell(used_bytes)
            if used_bytes > self._limit_bytes:
                excess_bytes = used_bytes - int(self._limit_bytes * KEPT_SHARE)
                freed_bytes = self._remove(ages, excess_bytes, now_s)
                logger.info("%s: removed %d bytes of %d", self._folder, freed_bytes, used_bytes)
                self._lease.tell(used_bytes - freed_bytes)
        except Ended:
            return False
        return True

    def _counted(self, now_s: float) -> tuple[int, Counter[int]]:
        """Count all bytes, and those of records by age; files that were left unfinished long ago go."""
        used_bytes, ages = 0, Counter[int]()
        for found in walk(self._folder, now_s, self._pace()):
            if not found.is_record and now_s - found.used_s > LEFT_OVER_S:
                with contextlib.suppress(OSError):
                    os.unlink(found.path)
                    continue
            used_bytes += found.byte_count
            if found.is_record:
                ages[age_class(now_s - found.used_s)] += found.byte_count
        return used_bytes, ages

    def _remove(self, ages: Counter[int], excess_bytes: int, now_s: float) -> int:
        """Remove what was used longest ago; returns the bytes that this freed."""
        age, older_bytes, same_bytes = oldest(ages, excess_bytes)
        left_bytes = {True: older_bytes, False: same_bytes}  # by whether a record is older than that
        freed_bytes = 0
        for found in walk(self._folder, now_s, self._pace()):
            found_age = age_class(now_s - found.used_s)
            if not found.is_record or found_age < age or left_bytes[found_age > age] <= 0:
                continue
            with contextlib.suppress(FileNotFoundError):  # another was faster
                os.unlink(found.path)
                left_bytes[found_age > age] -= found.byte_count
                freed_bytes += found.byte_count
            if freed_bytes >= excess_bytes:
                break
        return freed_bytes

    def _pace(self) -> Callable[[], None]:
        """Make what is called for every entry of a walk: it rests half of the time, and keeps the lease.

        What it makes raises ``Ended`` when the walk is not to go on.
        """
        seen, since_s = 0, time.monotonic()

        def pace() -> None:
            nonlocal seen, since_s
            seen += 1
            if seen % ENTRIES_AT_ONCE:
                return
            with self._changed:
                if not self._closing:
                    self._changed.wait(min(time.monotonic() - since_s, LONGEST_PAUSE_S))
                if self._closing:
                    raise Ended
            if not self._kept():
                raise Ended
            since_s = time.monotonic()

        return pace

    def _kept(self) -> bool:
        """Write to the lease when that is due; whether it is still ours."""
        now_s = time.monotonic()
        if now_s < self._beat_due_s:
            return True
        self._beat_due_s = now_s + BEAT_S
        return self._lease.hold()


def oldest(ages: Mapping[int, int], byte_count: int) -> tuple[int, int, int]:
    """Choose which records make so many bytes, the oldest first.

    Args:
        ages: Bytes by ``age_class``.
        byte_count: Wanted.

    Returns:
        An age class, the bytes of all that are older, and the bytes that are wanted of the class itself.
    """
    older_bytes = 0
    for age in sorted(ages, reverse=True):
        if older_bytes + ages[age] >= byte_count:
            return age, older_bytes, byte_count - older_bytes
        older_bytes += ages[age]
    return -1, older_bytes, 0
