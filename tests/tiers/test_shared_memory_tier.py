"""The shared tier for tests passes the tests for tiers, and notices what it is told wrongly."""

import dataclasses
from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.keys import LEAD_ALIGNMENT, OffloadKey
from kvtide.testing.shared_memory_tier import SharedMemoryTier, Store, is_private, store_named
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, TierTests, name_of, payload_of
from kvtide.tiers.base import Tier, TierPlace, Written
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity, RecordRun
from kvtide.tiers.shared import SharedTier

RECORD_BYTES = HEADER_BYTES + PAYLOAD_BYTES


def hash_of(number: int) -> bytes:
    return (number + 1).to_bytes(4, "big") * 8


def run_of(start: int, count: int, lead: int | None = None) -> RecordRun:
    """Chunks of one prompt, with a lead as long as is due, or another one."""
    before = [hash_of(number) for number in range(start)]
    length = start % LEAD_ALIGNMENT if lead is None else lead
    hashes = tuple(hash_of(number) for number in range(start, start + count))
    return RecordRun(0, start, hashes, before[-1] if before else None, tuple(before[len(before) - length :]))


def opened(store: str, **place: Any) -> SharedMemoryTier:
    options = place.pop("options", {})
    tier = SharedMemoryTier.build(TierPlace(IDENTITY, 0, 0, {"store": store, **options}, **place))
    tier.open()
    return tier


class TestSharedMemoryTier(TierTests):
    @pytest.fixture
    def place(self, tmp_path: Any) -> Any:
        options = {"store": str(tmp_path)}
        store = store_named(options)
        yield options
        assert store.mistakes == []

    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        return SharedMemoryTier.build(TierPlace(identity, 0, 0, place, "a life"))

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, SharedMemoryTier)
        tier.store.records[tier.name_of(key)].data[HEADER_BYTES + 100] ^= 4

    def lose(self, tier: Tier, key: OffloadKey) -> None:
        assert isinstance(tier, SharedMemoryTier)
        tier.store.take(tier.name_of(key))


def test_a_store_outlives_its_tiers_as_long_as_somebody_holds_it() -> None:
    store = store_named({"store": "held"})
    opened("held").write(name_of(0), memoryview(payload_of(0)), DEADLINE_S)
    assert opened("held").contains([name_of(0).key], DEADLINE_S) == [True]
    assert len(store.records) == 1
    del store
    assert opened("held").contains([name_of(0).key], DEADLINE_S) == [False]


@pytest.mark.parametrize("evicts", ["oldest", "random"])
def test_a_full_store_evicts_by_its_own_rules_and_remembers_whom_it_told_nothing(evicts: str) -> None:
    tier = opened("full", options={"limit_bytes": 3 * RECORD_BYTES, "evicts": evicts, "seed": 1})
    for number in range(5):
        assert tier.write(name_of(number), memoryview(payload_of(number)), DEADLINE_S) is Written.NEW
    keys = [name_of(number).key for number in range(5)]
    there = tier.contains(keys, DEADLINE_S)
    assert there.count(True) == 3
    assert tier.store.gone == {key for key, one in zip(keys, there, strict=True) if not one}
    assert evicts == "random" or there == [False, False, True, True, True]


def test_what_a_server_that_was_reset_keeps_is_its_own() -> None:
    store = store_named({"store": "apart"})
    tier, other = opened("apart", instance="one"), opened("apart", instance="another")
    for one in (tier, other):
        one.begin_generation()
    assert tier.write(name_of(0), memoryview(payload_of(0)), DEADLINE_S) is Written.NEW
    assert other.write(name_of(0), memoryview(payload_of(1)), DEADLINE_S) is Written.NEW
    assert opened("apart").contains([name_of(0).key], DEADLINE_S) == [False]
    assert [is_private(name) for name in store.records] == [True, True]
    assert store.archive == {}


def test_a_rank_that_is_not_to_write_does_not_and_two_that_do_are_noticed() -> None:
    store = store_named({"store": "ranks"})
    assert opened("ranks", writes=(False,)).write(name_of(0), memoryview(payload_of(0)), DEADLINE_S) is (
        Written.THERE_ALREADY
    )
    assert store.records == {}
    place = TierPlace(IDENTITY, 0, 0, {"store": "ranks"})
    for rank in range(2):
        tier = SharedMemoryTier.build(dataclasses.replace(place, rank=rank))
        tier.write(name_of(0), memoryview(payload_of(0)), DEADLINE_S)
    assert len(store.mistakes) == 1


@pytest.mark.parametrize(
    "run",
    [run_of(70, 2, lead=5), run_of(70, 2, lead=0), run_of(64, 2, lead=1), run_of(3, 1, lead=2)],
    ids=["short", "none", "too long", "one short"],
)
def test_a_lead_that_does_not_reach_back_to_where_it_should_is_noticed(run: RecordRun) -> None:
    tier = opened("leads")
    tier.find(run, DEADLINE_S)
    assert len(tier.store.mistakes) == 1


def test_a_run_that_contradicts_what_was_said_before_is_noticed() -> None:
    tier = opened("runs")
    for run in (run_of(0, 4), run_of(3, 2), run_of(64, 3), run_of(70, 2)):
        tier.find(run, DEADLINE_S)
    assert tier.store.mistakes == []
    other = RecordRun(0, 1, (hash_of(2),), hash_of(0), (hash_of(0),))
    tier.find(other, DEADLINE_S)
    assert len(tier.store.mistakes) == 1


def test_what_others_use_too_and_is_discarded_is_written_down() -> None:
    tier = opened("discards")
    tier.write(name_of(0), memoryview(payload_of(0)), DEADLINE_S)
    tier.discard([name_of(1).key])
    assert tier.store.discarded == []
    tier.discard([name_of(0).key])
    assert len(tier.store.discarded) == 1


def test_options_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="known options: store"):
        SharedMemoryTier.check_options({"shop": "a"})
    with pytest.raises(ConfigError, match="give a int"):
        SharedMemoryTier.check_options({"run_chunks": "many"})
    assert issubclass(SharedMemoryTier, SharedTier)
    assert isinstance(store_named({}), Store)
