"""What several ranks have alike is on the disk once, and all of them read it."""

import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import CorruptRecordError, TierError, TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.testing.tiers import DEADLINE_S, PAYLOAD_BYTES, PrivateTierTests, name_of, payload_of
from kvtide.tiers.base import PrivateTier, Written
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import RecordIdentity, Shard
from kvtide.tiers.replicas import Replicas, disk_tier, writers_of
from kvtide.tiers.slabs import ALIGNMENT, slot_bytes_of

FINGERPRINT = bytes(range(32))
# Two ranks: group 0 is shared out among them, group 1 they have alike.
IDENTITIES = [RecordIdentity(FINGERPRINT, (Shard(rank, 2), Shard(0, 1))) for rank in range(2)]


def both(folder: Path, opened: bool = True) -> list[PrivateTier]:
    tiers = [disk_tier(folder, IDENTITIES, rank, 8 << 20) for rank in range(2)]
    for tier in tiers if opened else ():
        tier.open()
    return tiers


def closed(*tiers: PrivateTier) -> None:
    for tier in tiers:
        tier.close()


def write(tier: PrivateTier, number: int, group_index: int) -> Written:
    return tier.write(name_of(number, group_index), memoryview(payload_of(number)), DEADLINE_S)


def read(tier: PrivateTier, number: int, group_index: int) -> bytes | None:
    payload = bytearray(PAYLOAD_BYTES)
    key = name_of(number, group_index).key
    return bytes(payload) if tier.read_into(key, memoryview(payload), DEADLINE_S) else None


class TestReplicasOfNothing(PrivateTierTests):
    """Where this rank writes everything itself, it is a disk."""

    def make(self, place: Any, identity: RecordIdentity) -> PrivateTier:
        return Replicas(DiskTier(place, identity, 64 << 20), [None])

    def damage(self, tier: Any, key: OffloadKey) -> None:
        overwrite(tier, key, ALIGNMENT + 777, b"\xff\x00\xff")

    def lose(self, tier: Any, key: OffloadKey) -> None:
        overwrite(tier, key, 0, bytes(ALIGNMENT))


def overwrite(tier: Any, key: OffloadKey, offset: int, content: bytes) -> None:
    place = tier._own._entries[key]
    with (tier._own._folder / f"slab-{place.payload_bytes}").open("r+b") as file:
        file.seek(place.slot * slot_bytes_of(place.payload_bytes) + offset)
        file.write(content)


def test_the_lowest_rank_with_a_shard_writes_it() -> None:
    shards = [(Shard(rank // 2, 2), Shard(0, 1), Shard(rank, 4)) for rank in range(4)]
    assert [writers_of(shards, rank) for rank in range(4)] == [(0, 0, 0), (0, 0, 1), (2, 0, 2), (2, 0, 3)]


def test_ranks_with_nothing_alike_have_plain_tiers(tmp_path: Path) -> None:
    identities = [RecordIdentity(FINGERPRINT, (Shard(rank, 2),)) for rank in range(2)]
    tiers = [disk_tier(tmp_path, identities, rank, 1 << 20) for rank in range(2)]
    assert all(isinstance(tier, DiskTier) for tier in tiers)
    closed(*tiers)


def test_bytes_that_are_alike_are_written_once_and_read_by_all(tmp_path: Path) -> None:
    writer, reader = both(tmp_path)
    assert isinstance(reader, Replicas)
    assert [write(tier, 1, 1) for tier in (writer, reader)] == [Written.NEW, Written.THERE_ALREADY]
    assert [write(tier, 1, 0) for tier in (writer, reader)] == [Written.NEW, Written.NEW]
    assert [read(tier, 1, 1) for tier in (writer, reader)] == [bytes(payload_of(1))] * 2
    assert reader.contains([name_of(1, 1).key, name_of(2, 1).key, name_of(1, 0).key], 1.0) == [
        True,
        False,
        True,
    ]
    record_bytes = writer.record_bytes(PAYLOAD_BYTES)
    assert (writer.used_bytes, reader.used_bytes) == (2 * record_bytes, record_bytes)
    assert len(list(writer.inventory())) == 2
    assert [header.name for header in reader.inventory()] == [name_of(1, 0)]
    closed(writer, reader)


def test_they_are_there_again_after_a_restart_once_the_writer_has_opened(tmp_path: Path) -> None:
    writer, reader = both(tmp_path)
    write(writer, 1, 1)
    closed(writer, reader)
    reader = disk_tier(tmp_path, IDENTITIES, 1, 8 << 20)
    reader.open()
    with pytest.raises(TierUnavailableError, match="no rank has this folder yet"):
        read(reader, 1, 1)
    writer = disk_tier(tmp_path, IDENTITIES, 0, 8 << 20)
    with pytest.raises(TierUnavailableError, match="not opened yet"):
        read(reader, 1, 1)
    writer.open()
    assert read(reader, 1, 1) == payload_of(1)
    closed(writer, reader)


def test_what_was_discarded_or_written_anew_is_seen_at_once(tmp_path: Path) -> None:
    writer, reader = both(tmp_path)
    for number in range(20):
        write(writer, number, 1)
        assert read(reader, number, 1) == payload_of(number)
        writer.discard([name_of(number, 1).key])
        reader.discard([name_of(number, 1).key])
        assert read(reader, number, 1) is None
    closed(writer, reader)


def test_slots_that_change_hands_while_others_read_them_are_never_served_wrong(tmp_path: Path) -> None:
    writer, reader = both(tmp_path)
    over = threading.Event()
    seen: Counter[str] = Counter()

    def look(seed: int) -> None:
        chance = random.Random(seed)
        while not over.is_set():
            number = chance.randrange(12)
            try:
                found = read(reader, number, 1)
            except CorruptRecordError:
                seen["refused"] += 1
                continue
            assert found in (None, bytes(payload_of(number))), f"{number} came back wrong"
            seen["miss" if found is None else "served"] += 1

    with ThreadPoolExecutor(3) as pool:
        looking = [pool.submit(look, seed) for seed in range(3)]
        chance = random.Random(9)
        for _ in range(400):
            write(writer, chance.randrange(12), 1)
            writer.discard([name_of(chance.randrange(12), 1).key])
        over.set()
        for one in looking:
            one.result()
    assert seen["served"] > 0
    closed(writer, reader)


def test_a_damaged_record_is_refused_and_left_to_its_writer(tmp_path: Path) -> None:
    writer, reader = both(tmp_path)
    write(writer, 1, 1)
    with (tmp_path / "rank-0" / f"slab-{PAYLOAD_BYTES}").open("r+b") as slab:
        slab.seek(ALIGNMENT + 5)
        slab.write(os.urandom(8))
    for _ in range(2):
        with pytest.raises(CorruptRecordError):
            read(reader, 1, 1)
    with pytest.raises(CorruptRecordError):
        read(writer, 1, 1)
    assert read(reader, 1, 1) is None
    closed(writer, reader)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("trusted", [False, True])
def test_whoever_hears_of_a_reset_first_nothing_of_before_is_served(
    tmp_path: Path, first: int, trusted: bool
) -> None:
    tiers = both(tmp_path)
    for reset in range(3):
        number = 10 * reset
        write(tiers[0], number, 1)
        assert [read(tier, number, 1) for tier in tiers] == [bytes(payload_of(number))] * 2
        tiers[first].begin_generation(trusted)
        assert read(tiers[first], number, 1) is None
        if first == 0:
            write(tiers[0], number + 1, 1)
            assert read(tiers[1], number + 1, 1) is None  # of another generation than this rank's
        tiers[1 - first].begin_generation(trusted)
        assert [read(tier, number, 1) for tier in tiers] == [None, None]
    closed(*tiers)


def test_what_is_in_doubt_is_served_by_the_run_that_wrote_it_alone(tmp_path: Path) -> None:
    tiers = both(tmp_path)
    for tier in tiers:
        tier.begin_generation()
    write(tiers[0], 1, 1)
    assert read(tiers[1], 1, 1) == payload_of(1)
    closed(*tiers)
    tiers = both(tmp_path, opened=False)
    tiers[1].open()
    for _ in range(2):
        try:
            assert read(tiers[1], 1, 1) is None
        except TierError:
            tiers[0].open()
    closed(*tiers)


def test_a_rank_that_writes_nothing_takes_nothing(tmp_path: Path) -> None:
    identities = [RecordIdentity(FINGERPRINT)] * 2
    writer, reader = (disk_tier(tmp_path, identities, rank, 8 << 20) for rank in range(2))
    assert (writer.record_bytes(PAYLOAD_BYTES) > 0, reader.record_bytes(PAYLOAD_BYTES)) == (True, 0)
    closed(writer, reader)
