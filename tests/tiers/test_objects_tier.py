"""The objects tier by its contract, over obstore's stores in memory and in a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

from kvtide.errors import CorruptRecordError, TierUnavailableError
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, TierTests, name_of, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.named import tier_named
from kvtide.tiers.objects import LOOK_FIRST_BYTES, ObjectsTier
from kvtide.tiers.objects_options import options_of
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity


def tier_over(store: Any, identity: RecordIdentity = IDENTITY, **place: Any) -> ObjectsTier:
    tier = ObjectsTier(TierPlace(identity, 0, 0, **place), options_of({"url": "memory://"}), store)
    tier.open()
    return tier


class StoreTests(TierTests):
    """Over whatever store ``place`` is."""

    def make(self, place: Any, identity: RecordIdentity) -> ObjectsTier:
        return ObjectsTier(TierPlace(identity, 0, 1 << 30), options_of({"url": "memory://"}), place)

    def damage(self, tier: ObjectsTier, key: Any) -> None:
        store, path = tier._bucket._store, tier._path_of(key)
        record = bytearray(obstore.get(store, path).bytes())
        record[HEADER_BYTES + 100] ^= 4
        obstore.put(store, path, bytes(record))

    def lose(self, tier: ObjectsTier, key: Any) -> None:
        obstore.delete(tier._bucket._store, tier._path_of(key))


class TestInMemory(StoreTests):
    @pytest.fixture
    def place(self) -> MemoryStore:
        return MemoryStore()


class TestInAFolder(StoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "bucket", mkdir=True)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tier(store: MemoryStore) -> Iterator[ObjectsTier]:
    tier = tier_over(store)
    yield tier
    tier.close()


def test_where_a_record_lies_and_what_it_is_does_not_change(store: MemoryStore, tier: ObjectsTier) -> None:
    tier.write(name_of(5, 2), memoryview(payload_of(5)), DEADLINE_S)
    (listed,) = obstore.list(store).collect()
    one = "0000000600000006000000060000000600000006000000060000000600000006"
    assert listed["path"] == f"kv1/{IDENTITY.fingerprint.hex()}/g2/00/{one}.1of4"
    assert bytes(obstore.get(store, listed["path"]).bytes())[HEADER_BYTES:] == payload_of(5)


def test_what_the_caller_does_with_its_buffer_afterwards_changes_nothing(tier: ObjectsTier) -> None:
    payload = payload_of(1)
    tier.write(name_of(1), memoryview(payload), DEADLINE_S)
    payload[:] = bytes(len(payload))
    read = bytearray(PAYLOAD_BYTES)
    assert tier.read_into(name_of(1).key, memoryview(read), DEADLINE_S)
    assert read == payload_of(1)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1, 1 << 20])
def test_an_object_of_another_length_is_refused_and_goes(
    store: MemoryStore, tier: ObjectsTier, length: int
) -> None:
    path = tier._path_of(name_of(1).key)
    obstore.put(store, path, bytes(length))
    with pytest.raises(CorruptRecordError, match=f"{length} bytes"):
        tier.read_into(name_of(1).key, memoryview(bytearray(PAYLOAD_BYTES)), DEADLINE_S)
    assert tier.contains([name_of(1).key], DEADLINE_S) == [False]


def test_a_record_under_the_name_of_another_is_refused(store: MemoryStore, tier: ObjectsTier) -> None:
    tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)
    obstore.copy(store, tier._path_of(name_of(1).key), tier._path_of(name_of(2).key))
    with pytest.raises(CorruptRecordError, match="another key"):
        tier.read_into(name_of(2).key, memoryview(bytearray(PAYLOAD_BYTES)), DEADLINE_S)


def test_a_large_write_mends_what_is_there_with_another_length(store: MemoryStore, tier: ObjectsTier) -> None:
    payload = memoryview(bytes(LOOK_FIRST_BYTES))
    obstore.put(store, tier._path_of(name_of(1).key), b"half of it")
    assert tier.write(name_of(1), payload, DEADLINE_S) is Written.NEW
    assert tier.write(name_of(1), payload, DEADLINE_S) is Written.THERE_ALREADY
    assert tier.read_into(name_of(1).key, memoryview(bytearray(LOOK_FIRST_BYTES)), DEADLINE_S)


def test_a_rank_whose_bytes_another_writes_writes_nothing(store: MemoryStore) -> None:
    tier = tier_over(store, writes=(False, True))
    assert tier.write(name_of(1, 0), memoryview(payload_of(1)), DEADLINE_S) is Written.THERE_ALREADY
    assert tier.write(name_of(1, 1), memoryview(payload_of(1)), DEADLINE_S) is Written.NEW
    assert len(obstore.list(store).collect()) == 1
    tier.close()


def test_of_a_group_that_the_model_does_not_have_nothing_is_here(store: MemoryStore) -> None:
    two_groups = RecordIdentity(IDENTITY.fingerprint, IDENTITY.shards * 2)
    tier = tier_over(store, two_groups)
    keys = [name_of(1, 7).key]
    assert tier.contains(keys, DEADLINE_S) == [False]
    assert not tier.read_into(keys[0], memoryview(bytearray(8)), DEADLINE_S)
    tier.discard(keys)
    tier.close()


def test_no_time_left_is_said_before_anything_is_asked(tier: ObjectsTier) -> None:
    with pytest.raises(TierUnavailableError, match="out of time"):
        tier.read_into(name_of(1).key, memoryview(bytearray(8)), 0.0)
    with pytest.raises(TierUnavailableError, match="out of time"):
        tier.write(name_of(1), memoryview(bytearray(8)), -1.0)


def test_after_a_close_it_says_so(store: MemoryStore) -> None:
    tier = tier_over(store)
    tier.close()
    with pytest.raises(TierUnavailableError, match="closed"):
        tier.contains([name_of(1).key], DEADLINE_S)
    tier.discard([name_of(1).key])


def test_ping_writes_reads_and_leaves_nothing(store: MemoryStore, tier: ObjectsTier) -> None:
    assert "written, read and deleted" in tier.ping(DEADLINE_S)
    assert "writes once" in tier.ping(DEADLINE_S)
    assert obstore.list(store).collect() == []


def test_a_folder_is_a_store_too_by_its_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    for expected in (Written.NEW, Written.THERE_ALREADY):
        tier = tier_named("objects", TierPlace(IDENTITY, 0, 0, {"url": url}))
        tier.open()
        assert tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S) is expected
        tier.close()


class Uncreating:
    """A store's answers, but for create-if-absent, which it does not know."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(obstore, name)

    def put(self, store: Any, path: str, parts: Any, **options: Any) -> Any:
        if options.get("mode") == "create":
            self.asked += 1
            raise self.error
        return obstore.put(store, path, parts, **options)


@pytest.mark.parametrize(
    "error",
    [
        obstore.exceptions.NotSupportedError("not supported"),
        NotImplementedError(),
        obstore.exceptions.GenericError("Server returned non-2xx status code: 501 Not Implemented: <xml>"),
    ],
    ids=["not supported", "not implemented", "status 501"],
)
def test_a_store_without_create_if_absent_is_asked_once_and_looked_at_before_each_write(
    tier: ObjectsTier, error: Exception
) -> None:
    tier._bucket._obstore = library = Uncreating(error)
    for number in range(2):
        assert tier.write(name_of(number), memoryview(payload_of(number)), DEADLINE_S) is Written.NEW
        assert tier.write(name_of(number), memoryview(payload_of(9)), DEADLINE_S) is Written.THERE_ALREADY
        read = bytearray(PAYLOAD_BYTES)
        assert tier.read_into(name_of(number).key, memoryview(read), DEADLINE_S)
        assert read == payload_of(number)
    assert library.asked == 1
