"""Tiers that settings name: by a short name, or by the path of a class."""

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from kvtide.errors import ConfigError, TierUnavailableError
from kvtide.testing import FaultyTier, HeldTier, MemoryTier, SlowTier, TierCall
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import PrivateTier, TierPlace
from kvtide.tiers.named import SHORT_NAMES, check_tier, tier_class, tier_named
from kvtide.tiers.shared import SharedTier


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
        ("memory", {}, "name directory, valkey, objects, mooncake, or a class by its path"),
        ("", {}, "or a class by its path"),
        ("kvtide.nowhere.Tier", {}, "cannot be imported"),
        ("..Tier", {}, "cannot be imported"),
        ("kvtide.testing.", {}, "is not a class of tiers"),
        ("kvtide.testing.NoSuchTier", {}, "is not a class of tiers"),
        ("kvtide.testing.VirtualClock", {}, "is not a class of tiers"),
        ("kvtide.tiers.base.Tier", {}, "cannot be built from settings"),
        ("kvtide.testing.HeldTier", {}, "switch"),
        ("kvtide.testing.SlowTier", {"delay": 1}, "delay"),
        ("kvtide.testing.FaultyTier", {"failing": {"sleep": [1]}}, "options.failing = .* by kind of call"),
        ("kvtide.tiers.disk.DiskTier", {}, "folder"),
        ("kvtide.tiers.disk.DiskTier", {"folder": "x", "colour": 1}, "colour"),
        (
            "kvtide.tiers.disk.DiskTier",
            {"folder": "x", "reserve_bytes": -1},
            "reserve_bytes = -1: give a size",
        ),
        ("kvtide.testing.MemoryTier", {"colour": 1}, "options.colour = .* there are none"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_name(path: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tier_named(path, place(**options))


# -- short names, and what is refused before anything is built ---------------------------------------------


class Picky(SharedTier):
    """A shared tier with one option, of which nothing else is there."""

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        raise AssertionError("it was built")

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        if unknown := set(options) - {"url"}:
            raise ConfigError(
                f"tiers.options.{min(unknown)}", options[min(unknown)], "there is no such option"
            )


PICKY = f"{Picky.__module__}.{Picky.__qualname__}"


def test_a_short_name_stands_for_the_path_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHORT_NAMES, "memory", "kvtide.testing.MemoryTier")
    assert tier_class("memory") is tier_class("kvtide.testing.MemoryTier") is MemoryTier
    assert isinstance(tier_named("memory", place()), MemoryTier)


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_what_a_short_name_needs_is_imported_when_it_is_named_and_said_when_it_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SHORT_NAMES[name].rpartition(".")[0]
    monkeypatch.setitem(sys.modules, module, None)  # as if it could not be imported
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        tier_class(name)
    assert (caught.value.setting, caught.value.value) == ("tiers", SHORT_NAMES[name])
    assert module in str(caught.value)


@pytest.mark.parametrize(
    ("path", "options"),
    [("kvtide.testing.MemoryTier", {}), ("kvtide.tiers.disk.DiskTier", {"folder": "/mnt/nvme"})],
)
def test_a_private_tier_needs_a_limit(path: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="say how many bytes the attic may take, such as 64GiB") as caught:
        check_tier(path, "the attic", 0, options)
    assert (caught.value.setting, caught.value.value) == ("tiers.limit", 0)
    check_tier(path, "the attic", 1, options)


def test_a_shared_tier_needs_none_and_its_options_are_looked_at_without_building_it() -> None:
    check_tier(PICKY, "store", 0, {"url": "x"})
    with pytest.raises(ConfigError, match="there is no such option") as caught:
        check_tier(PICKY, "store", 0, {"url": "x", "colour": 1})
    assert caught.value.setting == "tiers.options.colour"


def test_without_a_class_nothing_else_is_looked_at() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        check_tier("kvtide.nowhere.Tier", "store", 0, {"colour": 1})
