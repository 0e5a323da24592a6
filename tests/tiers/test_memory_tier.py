"""The tier for tests passes the tests for tiers."""

from typing import Any

import pytest

from kvtide.errors import TierFullError
from kvtide.keys import OffloadKey
from kvtide.testing.memory_tier import MemoryTier, Records
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, PrivateTierTests, name_of, payload_of
from kvtide.tiers.base import Tier
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity


class TestMemoryTier(PrivateTierTests):
    @pytest.fixture
    def place(self) -> Any:
        return Records()

    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        return MemoryTier(identity, records=place)

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, MemoryTier)
        tier.records[key][HEADER_BYTES + 100] ^= 4

    def lose(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, MemoryTier)
        del tier.records[key]


def test_a_full_tier_says_so_and_keeps_what_it_has() -> None:
    tier = MemoryTier(IDENTITY, limit_bytes=2 * (PAYLOAD_BYTES + HEADER_BYTES))
    for number in range(2):
        tier.write(name_of(number), memoryview(payload_of(number)), 1.0)
    with pytest.raises(TierFullError):
        tier.write(name_of(2), memoryview(payload_of(2)), 1.0)
    payload = bytearray(PAYLOAD_BYTES)
    assert tier.read_into(name_of(1).key, memoryview(payload), 1.0)
    assert payload == payload_of(1)
