"""The disk: the tests for tiers with and without the page cache, and what only a disk can do."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.errors import ConfigError, CorruptRecordError, TierFullError, TierUnavailableError
from kvtide.keys import OffloadKey
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, PrivateTierTests, name_of, payload_of
from kvtide.tiers import slabs
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk_index import DiskIndex
from kvtide.tiers.records import RecordIdentity
from kvtide.tiers.slabs import ALIGNMENT, ROW_BYTES, Place, aligned

SLOT_BYTES = ALIGNMENT + aligned(PAYLOAD_BYTES)
RECORD_BYTES = SLOT_BYTES + ROW_BYTES


def limit_of(count: int) -> int:
    """A limit that has room for so many records; a sixteenth is the index's."""
    return -(-count * RECORD_BYTES * 16 // 15)


class TestDiskTier(PrivateTierTests):
    def make(self, place: Any, identity: RecordIdentity) -> DiskTier:
        return DiskTier(place, identity, 64 << 20)

    def damage(self, tier: Any, key: OffloadKey) -> None:
        overwrite(tier, key, ALIGNMENT + 777, b"\xff\x00\xff")

    def lose(self, tier: Any, key: OffloadKey) -> None:
        overwrite(tier, key, 0, bytes(ALIGNMENT))


class TestDiskTierThroughThePageCache(TestDiskTier):
    def make(self, place: Any, identity: RecordIdentity) -> DiskTier:
        return DiskTier(place, identity, 64 << 20, direct=False)


def opened(folder: Path, *args: Any, **options: Any) -> DiskTier:
    tier = DiskTier(folder, *args, **options)
    tier.open()
    return tier


def overwrite(tier: DiskTier, key: OffloadKey, offset: int, content: bytes) -> None:
    place = tier._entries[key]
    with (tier._folder / f"slab-{place.payload_bytes}").open("r+b") as file:
        slot_bytes = ALIGNMENT + aligned(place.payload_bytes)
        file.seek(place.slot * slot_bytes + offset)
        file.write(content)


def write(tier: DiskTier, number: int, byte_count: int = PAYLOAD_BYTES) -> None:
    tier.write(name_of(number), memoryview(payload_of(number, byte_count)), DEADLINE_S)


def read(tier: DiskTier, number: int) -> bytearray | None:
    payload = bytearray(PAYLOAD_BYTES)
    return payload if tier.read_into(name_of(number).key, memoryview(payload), DEADLINE_S) else None


def test_memory_that_direct_io_can_use_is_used_as_it_is(tmp_path: Path) -> None:
    tier = opened(tmp_path, IDENTITY, 1 << 20)
    memory = np.zeros(3 * PAYLOAD_BYTES, dtype=np.uint8)
    at = -memory.ctypes.data % ALIGNMENT
    straight, crooked = memory[at : at + PAYLOAD_BYTES], memory[at + 9 : at + 9 + PAYLOAD_BYTES]
    for number, source in ((1, straight), (2, crooked)):
        source[:] = np.frombuffer(payload_of(number), dtype=np.uint8)
        tier.write(name_of(number), memoryview(source), DEADLINE_S)
        assert read(tier, number) == payload_of(number)
        source[:] = 0
        assert tier.read_into(name_of(number).key, memoryview(source), DEADLINE_S)
        assert bytes(source) == payload_of(number)
    tier.close()


def test_the_limit_holds_and_what_is_discarded_makes_room(tmp_path: Path) -> None:
    limit_bytes = limit_of(10) + 100
    tier = opened(tmp_path, IDENTITY, limit_bytes)
    for number in range(10):
        write(tier, number)
    with pytest.raises(TierFullError, match=r"128000 of \d+ bytes are used"):
        write(tier, 10)
    with pytest.raises(TierFullError):
        write(tier, 11, 100)
    tier.discard([name_of(3).key])
    write(tier, 12)
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("slab-*"))
    assert on_disk + 10 * ROW_BYTES == tier._slabs.allocated_bytes <= limit_bytes
    assert [number for number in range(13) if read(tier, number)] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 12]
    tier.close()


def test_the_limit_counts_what_was_there_before_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path, IDENTITY, limit_of(10))
    for number in range(10):
        write(tier, number)
    tier.close()
    again = opened(tmp_path, IDENTITY, limit_of(10))
    with pytest.raises(TierFullError):
        write(again, 10)
    assert again._slabs.allocated_bytes == 10 * RECORD_BYTES
    again.close()


def test_free_space_that_is_reserved_stays_free(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    tier = opened(tmp_path, IDENTITY, 1 << 40, reserve_bytes=status.f_bavail * status.f_frsize + (1 << 30))
    with pytest.raises(TierFullError, match="stay free on the file system"):
        write(tier, 1)
    assert tier.used_bytes == 0
    tier.close()


def test_nobody_else_may_read_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = opened(folder, IDENTITY, 1 << 20)
    write(tier, 1)
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert set(modes.values()) == {0o600, 0o700}, modes
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
    tier.close()


def test_a_second_instance_is_refused_by_the_folder_s_name(tmp_path: Path) -> None:
    tier = opened(tmp_path, IDENTITY, 1 << 20)
    with pytest.raises(ConfigError, match=r"disk = '.*': another instance uses this folder"):
        DiskTier(tmp_path, IDENTITY, 1 << 20)
    tier.close()
    opened(tmp_path, IDENTITY, 1 << 20).close()


def test_a_slot_that_is_read_is_not_written_before_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, IDENTITY, limit_of(2))
    write(tier, 1)
    taken: list[Place] = []
    plain = slabs.Slabs.read

    def meanwhile(self: slabs.Slabs, place: Place, payload: memoryview) -> bytes:
        tier.discard([name_of(1).key])
        write(tier, 2)
        taken.append(tier._entries[name_of(2).key])
        return plain(self, place, payload)

    monkeypatch.setattr(slabs.Slabs, "read", meanwhile)
    where = tier._entries[name_of(1).key]
    assert read(tier, 1) == payload_of(1)
    monkeypatch.undo()
    assert taken[0] != where
    write(tier, 3)
    assert tier._entries[name_of(3).key] == where
    assert read(tier, 2) == payload_of(2)
    tier.close()


def test_a_damaged_record_that_was_written_anew_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, IDENTITY, limit_of(4))
    write(tier, 1)
    overwrite(tier, name_of(1).key, ALIGNMENT, b"damage")
    plain = slabs.Slabs.read

    def meanwhile(self: slabs.Slabs, place: Place, payload: memoryview) -> bytes:
        tier.discard([name_of(1).key])
        write(tier, 1)
        return plain(self, place, payload)

    monkeypatch.setattr(slabs.Slabs, "read", meanwhile)
    with pytest.raises(CorruptRecordError):
        read(tier, 1)
    monkeypatch.undo()
    assert read(tier, 1) == payload_of(1)
    tier.close()


@pytest.mark.parametrize("what", ["slabs", "index"])
def test_a_write_that_fails_leaves_its_slot_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tier = opened(tmp_path, IDENTITY, limit_of(2))

    def failing(*_: object) -> None:
        raise TierUnavailableError("a fault was injected")

    if what == "slabs":
        monkeypatch.setattr(slabs.Slabs, "write", failing)
    else:
        monkeypatch.setattr(DiskIndex, "put", failing)
    for number in range(5):
        with pytest.raises(TierUnavailableError):
            write(tier, number)
    monkeypatch.undo()
    assert (numbers_in(tier), tier.used_bytes) == ([], 0)
    for number in range(2):
        write(tier, number)
    assert numbers_in(tier) == [0, 1]
    tier.close()


def test_what_is_of_before_a_reset_is_cleared_away_while_others_are_written(tmp_path: Path) -> None:
    tier = opened(tmp_path, IDENTITY, 8 << 20)
    for number in range(100):
        write(tier, number)
    tier.begin_generation(trusted=True)
    write(tier, 200)
    write(tier, 201)
    assert len(list(tier._index.rows())) == 2
    tier.close()


def test_old_generations_make_room_bit_by_bit_and_stay_away_after_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path, IDENTITY, limit_of(100))
    for number in range(100):
        write(tier, number)
    tier.begin_generation(trusted=True)
    for number in range(50):
        write(tier, 1000 + number)
    tier.close()
    again = opened(tmp_path, IDENTITY, limit_of(100))
    assert again.generation == 1
    assert sorted(header.name.chunk_index for header in again.inventory()) == list(range(1000, 1050))
    assert [read(again, number) for number in range(100)] == [None] * 100
    for number in range(50):
        write(again, 2000 + number)
    again.close()


@pytest.mark.parametrize("how", ["gone", "garbage", "torn", "another schema"])
def test_a_lost_index_is_made_anew_from_the_records(tmp_path: Path, how: str) -> None:
    tier = opened(tmp_path, IDENTITY, 1 << 20)
    tier.begin_generation(trusted=True)
    for number in range(6):
        write(tier, number)
    folder = tier._folder
    tier.close()
    index = folder / "index.sqlite"
    if how == "gone":
        index.unlink()
    elif how == "garbage":
        index.write_bytes(os.urandom(8192))
    elif how == "torn":
        index.write_bytes(index.read_bytes()[:5000])
    else:
        with sqlite3.connect(index) as rows:
            rows.execute("DROP TABLE records")
            rows.execute("CREATE TABLE records (other TEXT)")
    again = opened(tmp_path, IDENTITY, 1 << 20)
    assert again.generation == 1
    assert [read(again, number) for number in range(6)] == [payload_of(number) for number in range(6)]
    again.close()


def test_rows_that_name_the_wrong_slots_serve_nothing_wrong(tmp_path: Path) -> None:
    tier = opened(tmp_path, IDENTITY, 1 << 20)
    for number in range(4):
        write(tier, number)
    folder = tier._folder
    tier.close()
    with sqlite3.connect(folder / "index.sqlite") as rows:
        headers = [row[0] for row in rows.execute("SELECT header FROM records ORDER BY slot")]
        for slot, header in enumerate(reversed(headers)):
            rows.execute("UPDATE records SET header = ? WHERE slot = ?", (header, slot))
        rows.execute("UPDATE records SET slot = 900 WHERE slot = 3")
    again = opened(tmp_path, IDENTITY, 1 << 20)
    for number in range(4):
        try:
            assert read(again, number) in (None, payload_of(number))
        except CorruptRecordError:
            assert read(again, number) is None
    again.close()


def test_a_write_that_is_under_way_at_a_reset_is_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, IDENTITY, limit_of(4))
    plain = slabs.Slabs.write

    def meanwhile(self: slabs.Slabs, place: Place, header: bytes, payload: memoryview) -> None:
        tier.begin_generation(trusted=True)
        plain(self, place, header, payload)

    monkeypatch.setattr(slabs.Slabs, "write", meanwhile)
    write(tier, 1)
    monkeypatch.undo()
    assert (read(tier, 1), tier.used_bytes, list(tier.inventory())) == (None, 0, [])
    for number in range(2, 6):  # and its slot comes free
        write(tier, number)
    tier.close()
    again = opened(tmp_path, IDENTITY, limit_of(4))
    assert numbers_in(again) == [2, 3, 4, 5]
    again.close()


# -- several models in one folder -------------------------------------------------------------------------


OTHER = RecordIdentity(b"\x07" * 32)
THIRD = RecordIdentity(b"\x08" * 32)


def numbers_in(tier: DiskTier, count: int = 100) -> list[int]:
    return [number for number in range(count) if read(tier, number) == payload_of(number)]


def fill(folder: Path, identity: RecordIdentity, numbers: range, limit_bytes: int) -> None:
    tier = opened(folder, identity, limit_bytes)
    for number in numbers:
        write(tier, number)
    tier.close()


def kept(folder: Path, identity: RecordIdentity, limit_bytes: int) -> list[int]:
    tier = opened(folder, identity, limit_bytes)
    found = numbers_in(tier)
    assert sorted(header.name.chunk_index for header in tier.inventory()) == found
    tier.close()
    return found


def test_what_another_model_has_written_stays_for_it_while_there_is_room(tmp_path: Path) -> None:
    fill(tmp_path, IDENTITY, range(5), 1 << 20)
    fill(tmp_path, OTHER, range(3, 9), 1 << 20)
    assert kept(tmp_path, IDENTITY, 1 << 20) == [0, 1, 2, 3, 4]
    assert kept(tmp_path, OTHER, 1 << 20) == [3, 4, 5, 6, 7, 8]


def test_slots_of_other_models_are_used_when_there_are_no_others_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = limit_of(12)
    for at_s, identity, numbers in ((100, OTHER, range(4)), (50, THIRD, range(4, 8))):
        monkeypatch.setattr("time.time", lambda at_s=at_s: at_s)
        fill(tmp_path, identity, numbers, limit_bytes)
    monkeypatch.undo()
    fill(tmp_path, IDENTITY, range(20, 24), limit_bytes)  # there was room
    assert kept(tmp_path, THIRD, limit_bytes) == [4, 5, 6, 7]
    fill(tmp_path, IDENTITY, range(24, 26), limit_bytes)
    assert len(kept(tmp_path, THIRD, limit_bytes)) == 2
    assert kept(tmp_path, OTHER, limit_bytes) == [0, 1, 2, 3]
    tier = opened(tmp_path, IDENTITY, limit_bytes)
    for number in range(30, 36):
        write(tier, number)
    with pytest.raises(TierFullError):
        write(tier, 36)
    assert numbers_in(tier) == [*range(20, 26), *range(30, 36)]
    tier.close()
    assert kept(tmp_path, OTHER, limit_bytes) == kept(tmp_path, THIRD, limit_bytes) == []


def test_each_model_has_its_own_generation(tmp_path: Path) -> None:
    fill(tmp_path, IDENTITY, range(3), 1 << 20)
    fill(tmp_path, OTHER, range(3), 1 << 20)
    tier = opened(tmp_path, IDENTITY, 1 << 20)
    tier.begin_generation(trusted=True)
    write(tier, 5)
    tier.close()
    assert kept(tmp_path, OTHER, 1 << 20) == [0, 1, 2]
    assert kept(tmp_path, IDENTITY, 1 << 20) == [5]


def test_a_lost_index_is_made_anew_for_every_model_with_its_generation(tmp_path: Path) -> None:
    fill(tmp_path, IDENTITY, range(3), 1 << 20)
    tier = opened(tmp_path, OTHER, 1 << 20)
    write(tier, 1)
    tier.begin_generation(trusted=True)
    write(tier, 2)
    tier.begin_generation()
    write(tier, 3)
    tier.close()
    (tmp_path / "rank-0" / "index.sqlite").unlink()
    assert kept(tmp_path, IDENTITY, 1 << 20) == [0, 1, 2]
    assert kept(tmp_path, OTHER, 1 << 20) == []
    fill(tmp_path, OTHER, range(4, 6), 1 << 20)
    assert kept(tmp_path, OTHER, 1 << 20) == [4, 5]


# -- room -------------------------------------------------------------------------------------------------


SMALL_BYTES = 100
SMALL_RECORD_BYTES = 2 * ALIGNMENT + ROW_BYTES


def blocks_bytes(folder: Path) -> int:
    """What the files take on the file system, without the blocks in which it notes where they are."""
    taken = [path.stat().st_blocks * 512 for path in folder.rglob("slab-*")]
    return sum(taken) - len(taken) * ALIGNMENT


def test_free_slots_of_one_size_make_room_for_another_and_back(tmp_path: Path) -> None:
    limit_bytes = limit_of(6)
    small_count = 6 * RECORD_BYTES // SMALL_RECORD_BYTES
    tier = opened(tmp_path, IDENTITY, limit_bytes)
    for turn in range(3):
        for number in range(6):
            write(tier, number)
        with pytest.raises(TierFullError):
            write(tier, 99, SMALL_BYTES)
        tier.discard([name_of(number).key for number in range(6)])
        for number in range(small_count):
            write(tier, 1000 * turn + number, SMALL_BYTES)
        with pytest.raises(TierFullError):
            write(tier, 99)
        assert blocks_bytes(tmp_path) <= tier._slabs.allocated_bytes <= limit_bytes
        tier.discard([name_of(1000 * turn + number).key for number in range(small_count)])
    write(tier, 7)
    assert read(tier, 7) == payload_of(7)
    tier.close()
    again = opened(tmp_path, IDENTITY, limit_bytes)
    assert numbers_in(again) == [7]
    for number in range(10, 15):
        write(again, number)
    assert numbers_in(again) == [7, 10, 11, 12, 13, 14]
    again.close()


def test_a_large_record_takes_the_room_of_as_many_small_ones_of_another_model(tmp_path: Path) -> None:
    limit_bytes = limit_of(6)
    tier = opened(tmp_path, OTHER, limit_bytes)
    for number in range(6 * RECORD_BYTES // SMALL_RECORD_BYTES):
        write(tier, number, SMALL_BYTES)
    tier.close()
    fill(tmp_path, IDENTITY, range(6), limit_bytes)
    assert kept(tmp_path, IDENTITY, limit_bytes) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("why", ["no holes in files", "others have filled the file system"])
def test_what_another_model_has_written_is_not_given_up_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    limit_bytes = limit_of(7)
    fill(tmp_path, OTHER, range(4), limit_bytes)
    tier = opened(tmp_path, OTHER, limit_bytes)
    for number in range(50, 54):
        write(tier, number, SMALL_BYTES)
    tier.close()
    tier = opened(tmp_path, IDENTITY, limit_bytes)
    if why == "no holes in files":
        monkeypatch.setattr(slabs, "punched", lambda *_: False)
        tier._slabs._punches = False
    else:
        tier._slabs._reserve_bytes = 1 << 60
    for number in range(4):
        write(tier, number, SMALL_BYTES)
    with pytest.raises(TierFullError):
        write(tier, 4, SMALL_BYTES)
    tier.close()
    assert kept(tmp_path, OTHER, limit_bytes) == [0, 1, 2, 3]


def test_without_holes_in_files_a_size_has_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "punched", lambda *_: False)
    tier = opened(tmp_path, IDENTITY, limit_of(2))
    write(tier, 1)
    write(tier, 2)
    tier.discard([name_of(1).key])
    with pytest.raises(TierFullError):
        write(tier, 3, SMALL_BYTES)
    write(tier, 4)
    assert numbers_in(tier) == [2, 4]
    tier.close()


def test_what_was_free_goes_back_to_the_file_system_at_a_start(tmp_path: Path) -> None:
    tier = opened(tmp_path, IDENTITY, limit_of(64))
    for number in range(32):
        write(tier, number)
    tier.discard([name_of(number).key for number in range(0, 32, 2)])
    tier.close()
    again = opened(tmp_path, IDENTITY, limit_of(64))
    assert blocks_bytes(tmp_path) <= 16 * RECORD_BYTES == again._slabs.allocated_bytes
    assert numbers_in(again) == list(range(1, 32, 2))
    again.close()


def test_what_it_could_hold_is_what_there_was_room_for_until_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = limit_of(64)
    tier = opened(tmp_path, IDENTITY, limit_bytes)
    capacity_bytes = tier.capacity_bytes
    assert 64 * RECORD_BYTES <= capacity_bytes <= limit_bytes
    for number in range(3):
        write(tier, number)
    tier._slabs._reserve_bytes = 1 << 60  # as if others had filled the file system
    with pytest.raises(TierFullError, match="stay free on the file system"):
        write(tier, 3)
    assert tier.capacity_bytes == tier._slabs.allocated_bytes < capacity_bytes
    tier._slabs._reserve_bytes = 0
    monkeypatch.setattr(slabs, "SHORT_REST_S", 0.0)
    write(tier, 3)
    assert tier.capacity_bytes == capacity_bytes
    tier.close()


def test_a_lower_limit_than_before_holds_too(tmp_path: Path) -> None:
    fill(tmp_path, OTHER, range(4), limit_of(20))
    fill(tmp_path, IDENTITY, range(10), limit_of(20))
    tier = opened(tmp_path, IDENTITY, limit_of(6))
    assert numbers_in(tier) == list(range(10))  # which of these go is not for the tier to say
    assert (tier.capacity_bytes, tier.used_bytes) == (6 * RECORD_BYTES, 10 * RECORD_BYTES)
    tier.discard([name_of(number).key for number in range(5)])
    assert blocks_bytes(tmp_path) <= tier._slabs.allocated_bytes <= 6 * RECORD_BYTES
    tier.close()
    assert kept(tmp_path, IDENTITY, limit_of(6)) == [5, 6, 7, 8, 9]
    assert kept(tmp_path, OTHER, limit_of(6)) == []


def test_the_limit_is_of_all_files_together(tmp_path: Path) -> None:
    limit_bytes = 64 << 20
    tier = opened(tmp_path, IDENTITY, limit_bytes)
    most_bytes = number = 0
    payload = memoryview(payload_of(1, SMALL_BYTES))
    while tier.used_bytes + tier.record_bytes(SMALL_BYTES) <= tier.capacity_bytes:
        tier.write(name_of(number), payload, DEADLINE_S)
        number += 1
        if number % 500 == 0:
            most_bytes = max(most_bytes, sum(path.stat().st_size for path in tmp_path.rglob("*")))
    assert most_bytes <= limit_bytes < 1.1 * tier.used_bytes
    tier.close()
