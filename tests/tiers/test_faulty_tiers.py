"""Tiers in the way of another: they change nothing but when and whether."""

import threading
from typing import Any

import pytest

from kvtide.errors import CorruptRecordError, TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.testing.faulty_tiers import FaultyTier, HeldTier, SlowTier, TierCall
from kvtide.testing.memory_tier import MemoryTier, Records
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, PrivateTierTests, name_of, payload_of
from kvtide.tiers.base import Tier
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity


class Passing(PrivateTierTests):
    """With no trouble to make, what stands before a tier is that tier."""

    @pytest.fixture
    def place(self) -> Any:
        return Records()

    def damage(self, tier: Any, key: OffloadKey) -> None:
        tier.inner.records[key][HEADER_BYTES + 1] ^= 1

    def lose(self, tier: Any, key: OffloadKey) -> None:
        del tier.inner.records[key]


class TestFaultyTier(Passing):
    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        return FaultyTier(MemoryTier(identity, records=place))


class TestSlowTier(Passing):
    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        return SlowTier(MemoryTier(identity, records=place), 0.0005)


class TestHeldTier(Passing):
    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        return HeldTier(MemoryTier(identity, records=place), set())


def test_the_chosen_calls_fail_and_no_others() -> None:
    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.WRITE: {1}, TierCall.READ: range(2)})
    payload = memoryview(payload_of(1))
    tier.write(name_of(1), payload, 1.0)
    with pytest.raises(TierUnavailableError):
        tier.write(name_of(2), payload, 1.0)
    tier.write(name_of(3), payload, 1.0)
    buffer = memoryview(bytearray(PAYLOAD_BYTES))
    for _ in range(2):
        with pytest.raises(TierUnavailableError):
            tier.read_into(name_of(1).key, buffer, 1.0)
    assert tier.read_into(name_of(1).key, buffer, 1.0)
    assert tier.contains([name_of(number).key for number in (1, 2, 3)], 1.0) == [True, False, True]
    assert tier.calls == {TierCall.WRITE: 3, TierCall.READ: 3, TierCall.CONTAINS: 1}


def test_another_error_can_be_chosen() -> None:
    def torn() -> Exception:
        return CorruptRecordError("torn")

    tier = FaultyTier(MemoryTier(IDENTITY), {TierCall.READ: {0}}, torn)
    with pytest.raises(CorruptRecordError, match="torn"):
        tier.read_into(name_of(1).key, memoryview(bytearray(1)), 1.0)


def test_a_call_that_would_be_late_ends_at_its_deadline() -> None:
    tier = SlowTier(MemoryTier(IDENTITY), 60.0)
    with pytest.raises(TierUnavailableError, match=r"write had not ended after 0\.01 s"):
        tier.write(name_of(1), memoryview(payload_of(1)), 0.01)


def test_a_held_call_ends_when_it_is_let_go_and_not_before() -> None:
    tier = HeldTier(MemoryTier(IDENTITY), {TierCall.WRITE})
    thread = threading.Thread(target=tier.write, args=(name_of(1), memoryview(payload_of(1)), 0.001))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert tier.held_count(TierCall.WRITE) == 1
    assert tier.contains([name_of(1).key], 1.0) == [False]
    tier.release()
    thread.join(10.0)
    assert tier.contains([name_of(1).key], 1.0) == [True]
    assert tier.held_count(TierCall.WRITE) == 0
