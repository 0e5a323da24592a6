"""How a tier is opened and what it holds is found out, while everything else goes on.

A thread of its own: neither has a deadline, and a medium that hangs here keeps nothing but this thread.
Knows when a tier may be called; does not know what is asked of it.
"""

import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable

import numpy as np

from kvtide.errors import TierError
from kvtide.tiers.base import PrivateTier, Tier
from kvtide.tiers.records import RecordHeader, pack, unpack

logger = logging.getLogger(__name__)

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
"""Between attempts to open a tier."""


class Survey:
    """Opens a tier, and lists what is in it.

    All calls are made with the lane's lock held, except what its thread does.

    Args:
        tier: To be opened.
        name: Of the tier.
        changed: The lane's condition, notified when something has.
        note_opened: Called by the thread when the tier has been opened, without the lock.
    """

    def __init__(
        self, tier: Tier, name: str, changed: threading.Condition, note_opened: Callable[[], None]
    ) -> None:
        self._tier = tier
        self._name = name
        self._changed = changed
        self._note_opened = note_opened
        self._closing = False
        self._wanted = 1  # number of the listing that is wanted
        # None: not listed yet. Told ones are let go of at once: to free all together takes long.
        self._headers: deque[bytes] | None = None
        self.opened = False
        self.is_under_way = False
        self._start()

    @property
    def may_be_opened(self) -> bool:
        """False when the tier is not open and nobody is opening it."""
        return self.opened or self.is_under_way

    def begin(self) -> None:
        """List anew."""
        self._wanted += 1
        self._headers = None
        self._start()

    def forget(self) -> None:
        """What was there is not there any more: nothing remains to be told."""
        self._wanted += 1
        self._headers = deque()

    def take(self, limit: int) -> list[RecordHeader] | None:
        """Hand out the next headers; none when they are not known yet, None after the last."""
        if self._headers is None:
            return []
        count = min(limit, len(self._headers))
        return [unpack(self._headers.popleft()) for _ in range(count)] or None

    def close(self) -> None:
        """Begin nothing more."""
        self._closing = True

    # -- the thread ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self.is_under_way and not self._closing:
            self.is_under_way = True
            threading.Thread(target=self._run, name=f"kvtide-{self._name}-survey", daemon=True).start()

    def _run(self) -> None:
        opened = self.opened or self._open()
        while True:
            with self._changed:
                wanted = self._wanted
                if not opened or self._headers is not None or self._closing:
                    self.is_under_way = False
                    self._changed.notify_all()
                    return
            headers = self._listed()
            with self._changed:
                if wanted == self._wanted:
                    self._headers = deque(headers)

    def _open(self) -> bool:
        rest_s, told = FIRST_REST_S, False
        while True:
            try:
                self._tier.open()
                self._note_opened()
            except Exception as error:  # of a tier that others wrote: serving goes on without it
                if not told:
                    unforeseen = not isinstance(error, TierError)
                    logger.warning("%s cannot be opened: %s", self._name, error, exc_info=unforeseen)
                told = True
            else:
                with self._changed:
                    self.opened = True
                    self._changed.notify_all()
                return True
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, rest_s):
                    return False
            rest_s = min(2 * rest_s, LONGEST_REST_S)

    def _listed(self) -> list[bytes]:
        """List a tier's records, those near the beginning of prompts first, the older of two first.

        As packed headers: objects by the hundred thousand would keep the garbage collector, and with it the
        whole process, busy for a tenth of a second.
        """
        if not isinstance(self._tier, PrivateTier):
            return []
        headers: list[bytes] = []
        chunk_indices, written_s = array("L"), array("Q")
        try:
            for header in self._tier.inventory():
                headers.append(pack(header))
                chunk_indices.append(header.name.chunk_index)
                written_s.append(header.written_at_s)
        except Exception as error:  # as above
            unforeseen = not isinstance(error, TierError)
            logger.warning("%s: what it holds is not known: %s", self._name, error, exc_info=unforeseen)
            return []
        # By numpy, which lets other threads run meanwhile: of a hundred thousand that takes a while.
        order = np.lexsort((np.array(written_s), np.array(chunk_indices)))
        return [headers[at] for at in order.tolist()]
