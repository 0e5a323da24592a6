"""Tiers that are in the way of another: they fail or delay calls, or keep them until they are let go.

Each passes everything on to the tier it stands before, so that what is kept is what that one keeps. In
settings that tier is the option ``of``: ``{"class": "package.module.Class", "options": {...}}``; a
``MemoryTier`` without.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field

from kvtide.errors import TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.tiers.base import PrivateTier, TierPlace, Written
from kvtide.tiers.named import tier_named
from kvtide.tiers.options import TierOptions, option_error
from kvtide.tiers.records import ChunkName, RecordHeader

T = TypeVar("T")

SWITCH_LOOK_S = 0.005


class TierCall(Enum):
    """What a tier is asked for, for choosing which calls meet with trouble."""

    READ = "read"
    WRITE = "write"
    CONTAINS = "contains"
    DISCARD = "discard"
    OPEN = "open"
    GENERATION = "generation"
    INVENTORY = "inventory"


WITH_DEADLINE = {TierCall.READ, TierCall.WRITE, TierCall.CONTAINS}


class _BeforeOptions(TierOptions):
    """What all of them have."""

    HINTS: ClassVar[Mapping[str, str]] = {"of": 'give {"class": "package.module.Class", "options": {...}}'}

    of: dict[str, Any] = Field(default_factory=dict)

    def inner(self, place: TierPlace) -> PrivateTier:
        """Build the tier that is named."""
        path = self.of.get("class", "kvtide.testing.memory_tier.MemoryTier")
        tier = tier_named(path, replace(place, options=self.of.get("options", {})))
        if not isinstance(tier, PrivateTier):
            raise option_error("of", path, "is no private tier")
        return tier


def _unavailable() -> TierUnavailableError:
    return TierUnavailableError("a fault was injected")


class _FaultyOptions(_BeforeOptions):
    HINTS: ClassVar[Mapping[str, str]] = {
        **_BeforeOptions.HINTS,
        "failing": 'give numbers by kind of call: {"read": [0, 3]}',
        "error": "give what makes the error, which a file of settings cannot hold",
    }

    failing: dict[TierCall, set[int]] = Field(default_factory=dict)
    error: Callable[[], Exception] = _unavailable


class _SlowOptions(_BeforeOptions):
    HINTS: ClassVar[Mapping[str, str]] = {
        **_BeforeOptions.HINTS,
        "delay_s": "give seconds",
    }
    SHOWN = frozenset({"delay_s"})

    delay_s: float = Field(ge=0, allow_inf_nan=False)


class _HeldOptions(_BeforeOptions):
    HINTS: ClassVar[Mapping[str, str]] = {
        **_BeforeOptions.HINTS,
        "switch": "give the path of a file",
        "holding": 'give kinds of calls: ["read", "write"]',
    }
    SHOWN = frozenset({"switch"})

    switch: Path
    holding: set[TierCall] = Field(default_factory=lambda: {TierCall.READ})


class _Before(PrivateTier):
    """Passes every call on, through ``_meet``."""

    def __init__(self, inner: PrivateTier) -> None:
        self.inner = inner

    def open(self) -> None:
        self._meet(TierCall.OPEN, self.inner.open, 0.0)

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

    def begin_generation(self, trusted: bool = False) -> None:
        self._meet(TierCall.GENERATION, lambda: self.inner.begin_generation(trusted), 0.0)

    def inventory(self) -> Iterator[RecordHeader]:
        return self._meet(TierCall.INVENTORY, self.inner.inventory, 0.0)

    @property
    def capacity_bytes(self) -> int:
        return self.inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    def record_bytes(self, payload_bytes: int) -> int:
        return self.inner.record_bytes(payload_bytes)

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
        inner: PrivateTier,
        failing: Mapping[TierCall, Sequence[int] | set[int]] | None = None,
        error: Callable[[], Exception] = _unavailable,
    ) -> None:
        super().__init__(inner)
        self.failing = dict(failing or {})
        self.calls: Counter[TierCall] = Counter()
        self._error = error
        self._lock = threading.Lock()

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """From ``{"failing": {"read": [0, 3], ...}}``."""
        options = _FaultyOptions.read_from(place.options)
        return cls(options.inner(place), options.failing, options.error)

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

    def __init__(self, inner: PrivateTier, delay_s: float) -> None:
        super().__init__(inner)
        self.delay_s = delay_s

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """From ``{"delay_s": seconds}``."""
        options = _SlowOptions.read_from(place.options)
        return cls(options.inner(place), options.delay_s)

    def _meet(self, kind: TierCall, call: Callable[[], T], deadline_s: float) -> T:
        if kind in WITH_DEADLINE and self.delay_s > deadline_s:
            time.sleep(deadline_s)
            raise TierUnavailableError(f"{kind.value} had not ended after {deadline_s} s")
        time.sleep(self.delay_s)
        return call()


class HeldTier(_Before):
    """Keeps calls, past any deadline, until they are let go: a medium that does not come back.

    Args:
        inner: The tier before which it stands.
        holding: Kinds of calls that are kept.
        switch: They are kept only while there is a file of this name; looked for every few milliseconds.
    """

    def __init__(
        self, inner: PrivateTier, holding: Collection[TierCall] = (), switch: Path | None = None
    ) -> None:
        super().__init__(inner)
        self._holding = set(holding)
        self._switch = switch
        self._held: Counter[TierCall] = Counter()
        self._changed = threading.Condition()

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """From ``{"switch": path, "holding": ["read"]}``; of reads alone without ``holding``."""
        options = _HeldOptions.read_from(place.options)
        return cls(options.inner(place), options.holding, options.switch)

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
            while kind in self._holding and (self._switch is None or self._switch.exists()):
                self._changed.wait(None if self._switch is None else SWITCH_LOOK_S)
            self._held[kind] -= 1
        return call()
