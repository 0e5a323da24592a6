"""From settings to shared tiers: what each rank is given, and what is built for who asks."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import pytest

from kvtide.config import KVTideConfig
from kvtide.spec_tiers import NAMES_LIMIT, TierIdentity, prober_of, tier_plans, tier_seats
from kvtide.tiers.base import Tier, TierPlace
from kvtide.tiers.fingerprint import Fingerprint
from kvtide.tiers.records import HEADER_BYTES, Shard
from kvtide.tiers.shared import SharedTier
from kvtide.transfer.tier_lane import LaneSettings

FINGERPRINT = Fingerprint.of({"model": "m"})
# Ranks 0 and 1 hold different parts of group 0; of group 1 both have the same.
SHARDS = ((Shard(0, 2), Shard()), (Shard(1, 2), Shard()))
PRIVATE = "kvtide.testing.MemoryTier"


class Recorded(SharedTier):
    """Remembers the places it was built for."""

    places: list[TierPlace] = []  # noqa: RUF012 - emptied by a fixture

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        cls.places.append(place)
        return cls(place)

    def _never(self, *arguments: Any) -> Any:
        raise AssertionError

    read_into = write = contains = discard = ping = _never

    def close(self) -> None:
        """Nothing to end."""


SHARED = f"{Recorded.__module__}.{Recorded.__qualname__}"


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorded.places.clear()
    monkeypatch.setitem(sys.modules, Recorded.__module__, sys.modules[__name__])


def config_of(*tiers: Mapping[str, Any], **settings: Any) -> KVTideConfig:
    return KVTideConfig(host_memory=1 << 30, tiers=list(tiers), **settings)


def identity_of(rank: int) -> TierIdentity:
    return TierIdentity(rank, FINGERPRINT, "m", SHARDS, "this life")


def lane_of(tier: Tier, name: str, settings: LaneSettings) -> Any:
    return tier, name, settings


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)


def test_a_rank_is_given_its_own_part_and_one_of_those_alike_writes() -> None:
    config = config_of({"class": SHARED, "name": "store", "limit": 1000, "options": {"url": "x"}})
    for rank in (0, 1):
        (seat,) = tier_seats(config, identity_of(rank), (100, 200), lane_of)  # type: ignore[arg-type]
        assert seat.record_bytes == (HEADER_BYTES + 100, HEADER_BYTES + 200)
        assert (seat.shard_counts, seat.names_limit) == ((2, 2), NAMES_LIMIT)
    first, second = Recorded.places
    assert (first.writes, second.writes) == ((True, True), (True, False))
    assert [place.identity.shards for place in Recorded.places] == list(SHARDS)
    for place in Recorded.places:
        assert place.instance == "this life", "after a reset all ranks write to the same place"
        assert (place.limit_bytes, place.options) == (1000, {"url": "x"}), (
            "the store's limit, not a rank's share"
        )


def test_a_private_tier_is_given_its_share_and_has_no_limit_of_names() -> None:
    (seat,) = tier_seats(config_of({"class": PRIVATE, "limit": 1000}), identity_of(1), (100, 200), lane_of)  # type: ignore[arg-type]
    tier = seat.lane[0]  # type: ignore[index]
    assert (tier.capacity_bytes, seat.names_limit) == (500, None)


def test_a_shared_tier_is_asked_and_tells_no_inventory() -> None:
    plans = tier_plans(config_of({"class": SHARED, "name": "store"}, {"class": PRIVATE, "limit": 1}))
    assert [(plan.books.is_shared, plan.books.reports_inventory) for plan in plans] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("disk", [False, True])
def test_who_asks_reads_the_part_of_rank_0_and_never_writes(disk: bool, tmp_path: Any) -> None:
    settings = {"disk": str(tmp_path / "disk"), "disk_limit": 1 << 20} if disk else {}
    config = config_of(
        {"class": PRIVATE, "limit": 1}, {"class": SHARED, "name": "store", "limit": 1000}, **settings
    )
    prober = prober_of(config, lambda: identity_of(1))
    assert prober is not None
    index = 3 if disk else 2
    until(lambda: prober.answer_s(index) < math.inf)
    prober.close()
    (place,) = Recorded.places
    assert place.identity.shards == SHARDS[0]
    assert (place.rank, place.limit_bytes, place.writes) == (0, 0, (False, False))
    assert [plan.books.is_shared for plan in tier_plans(config)].index(True) == index - 1
    with pytest.raises(KeyError):
        prober.answer_s(index - 1)


def test_without_a_shared_tier_nobody_asks() -> None:
    assert prober_of(config_of({"class": PRIVATE, "limit": 1}), lambda: identity_of(0)) is None
