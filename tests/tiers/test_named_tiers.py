"""Tiers that settings name by the path of a class."""

import threading
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError, TierUnavailableError
from kvtide.testing import FaultyTier, HeldTier, MemoryTier, SlowTier, TierCall
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import PrivateTier, TierPlace
from kvtide.tiers.named import tier_named


def place(**options: Any) -> TierPlace:
    return TierPlace(IDENTITY, 0, 1 << 20, options)


def built(path: str, **options: Any) -> PrivateTier:
    tier = tier_named(path, place(**options))
    assert isinstance(tier, PrivateTier)
    tier.open()
    return tier


def read(tier: PrivateTier, number: int) -> bool:
    return tier.read_into(name_of(number).key, memoryview(bytearray(PAYLOAD_BYTES)), 1.0)


def test_a_tier_is_built_from_its_path_with_the_limit_of_the_settings() -> None:
    tier = built("kvtide.testing.MemoryTier")
    assert isinstance(tier, MemoryTier)
    assert tier.capacity_bytes == 1 << 20


def test_a_tier_that_is_in_the_way_of_another_says_of_which(tmp_path: Path) -> None:
    of = {"class": "kvtide.testing.SlowTier", "options": {"delay_s": 0.5}}
    tier = built("kvtide.testing.FaultyTier", of=of, failing={"read": [0]})
    assert isinstance(tier, FaultyTier)
    assert isinstance(tier.inner, SlowTier)
    assert isinstance(tier.inner.inner, MemoryTier)
    assert tier.inner.delay_s == 0.5
    tier.inner.delay_s = 0.0
    with pytest.raises(TierUnavailableError):
        read(tier, 1)
    assert not read(tier, 1)


def test_reads_do_not_return_while_there_is_a_file(tmp_path: Path) -> None:
    switch = tmp_path / "held"
    tier = built("kvtide.testing.HeldTier", switch=str(switch))
    assert isinstance(tier, HeldTier)
    tier.write(name_of(1), memoryview(payload_of(1)), 1.0)
    assert read(tier, 1)
    switch.touch()
    thread = threading.Thread(target=read, args=(tier, 1))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert tier.held_count(TierCall.READ) == 1
    tier.write(name_of(2), memoryview(payload_of(2)), 1.0)
    switch.unlink()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_disk_can_be_what_is_held(tmp_path: Path) -> None:
    of = {"class": "kvtide.tiers.disk.DiskTier", "options": {"folder": str(tmp_path / "disk")}}
    tier = built("kvtide.testing.HeldTier", of=of, switch=str(tmp_path / "held"))
    tier.write(name_of(1), memoryview(payload_of(1)), 1.0)
    tier.close()
    again = built("kvtide.testing.HeldTier", of=of, switch=str(tmp_path / "held"))
    assert read(again, 1)
    again.close()


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("MemoryTier", {}, "or a class by its path"),
        ("kvtide.nowhere.Tier", {}, "cannot be imported"),
        ("kvtide.testing.NoSuchTier", {}, "is not a class of tiers"),
        ("kvtide.testing.VirtualClock", {}, "is not a class of tiers"),
        ("kvtide.tiers.base.Tier", {}, "cannot be built from settings"),
        ("kvtide.testing.HeldTier", {}, "switch"),
        ("kvtide.testing.SlowTier", {"delay": 1}, "delay"),
        ("kvtide.testing.FaultyTier", {"failing": {"sleep": [1]}}, "sleep"),
        ("kvtide.tiers.disk.DiskTier", {}, "folder"),
        ("kvtide.tiers.disk.DiskTier", {"folder": "x", "colour": 1}, "colour"),
        ("kvtide.testing.MemoryTier", {"colour": 1}, "colour"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_name(path: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tier_named(path, place(**options))
