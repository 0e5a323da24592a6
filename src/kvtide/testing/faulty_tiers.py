"""Tiers that are in the way of another: they fail or delay calls, or keep them until they are let go.

Each passes everything on to the tier it stands before, so that what is kept is what that one keeps.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from kvtide.errors import TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.tiers.base import Tier, Written
from kvtide.tiers.records import ChunkName

T = TypeVar("T")


class TierCall(Enum):
    """What a tier is asked for, for choosing which calls meet with trouble."""

    READ = "read"
    WRITE = "write"
    CONTAINS = "contains"
    DISCARD = "discard"


class _Before(Tier):
    """Passes every call on, through ``_meet``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def _meet(self, kind: TierCall, call: Callable[[], T], deadline_s: float) -> T:
        return call()

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        return self._meet(TierCall.READ, lambda: self.inner.read_into(key, payload, deadline_s), deadline_s)

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        return self._meet(TierCall.WRITE, lambda: self.inner.write(name, payload, deadline_s), deadline_s)

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        return self._meet(TierCall.CONTAINS, lambda: self.inner.contains(keys, deadline_s), deadline_s)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._meet(TierCall.DISCARD, lambda: self.inner.discard(keys), 0.0)

    def begin_generation(self, generation: int) -> None:
        self.inner.begin_generation(generation)

    def close(self) -> None:
        self.inner.close()


class FaultyTier(_Before):
    """Fails chosen calls.

    Args:
        inner: The tier before which it stands.
        failing: By kind of call, which ones fail, counted from 0; ``range(2, 5)`` or a set.
        error: What they fail with.

    Attributes:
        calls: How many there were, by kind.
        failing: May be changed at any time.
    """

    def __init__(
        self,
        inner: Tier,
        failing: Mapping[TierCall, Sequence[int] | set[int]] | None = None,
        error: Callable[[], Exception] = lambda: TierUnavailableError("a fault was injected"),
    ) -> None:
        super().__init__(inner)
        self.failing = dict(failing or {})
        self.calls: Counter[TierCall] = Counter()
        self._error = error
        self._lock = threading.Lock()

    def _meet(self, kind: TierCall, call: Callable[[], T], deadline_s: float) -> T:
        with self._lock:
            number = self.calls[kind]
            self.calls[kind] += 1
        if number in self.failing.get(kind, ()):
            raise self._error()
        return call()


class SlowTier(_Before):
    """Takes longer: a call that would end past its deadline ends then, with ``TierUnavailableError``.

    Args:
        inner: The tier before which it stands.
        delay_s: Added to each call.
    """

    def __init__(self, inner: Tier, delay_s: float) -> None:
        super().__init__(inner)
        self.delay_s = delay_s

    def _meet(self, kind: TierCall, call: Callable[[], T], deadline_s: float) -> T:
        if kind is not TierCall.DISCARD and self.delay_s > deadline_s:
            time.sleep(deadline_s)
            raise TierUnavailableError(f"{kind.value} had not ended after {deadline_s} s")
        time.sleep(self.delay_s)
        return call()


class HeldTier(_Before):
    """Keeps calls, past any deadline, until they are let go: a medium that does not come back.

    Args:
        inner: The tier before which it stands.
        holding: Kinds of calls that are kept.
    """

    def __init__(self, inner: Tier, holding: set[TierCall]) -> None:
        super().__init__(inner)
        self._holding = set(holding)
        self._held: Counter[TierCall] = Counter()
        self._changed = threading.Condition()

    def held_count(self, kind: TierCall) -> int:
        """How many calls are kept now."""
        with self._changed:
            return self._held[kind]

    def hold(self, *kinds: TierCall) -> None:
        """Keep calls of these kinds from now on."""
        with self._changed:
            self._holding |= set(kinds)

    def release(self) -> None:
        """Let every call go, those that come too."""
        with self._changed:
            self._holding.clear()
            self._changed.notify_all()

    def _meet(self, kind: TierCall, call: Callable[[], T], deadline_s: float) -> T:
        with self._changed:
            self._held[kind] += 1
            self._changed.wait_for(lambda: kind not in self._holding)
            self._held[kind] -= 1
        return call()
