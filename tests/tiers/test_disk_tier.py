"""The disk: the tests for tiers with and without the page cache, and what only a disk can do."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.errors import ConfigError, CorruptRecordError, TierFullError
from kvtide.keys import OffloadKey
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, TierTests, name_of, payload_of
from kvtide.tiers import slabs
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity
from kvtide.tiers.slabs import ALIGNMENT, Place, aligned

SLOT_BYTES = ALIGNMENT + aligned(PAYLOAD_BYTES)


class TestDiskTier(TierTests):
    def make(self, place: Any, identity: RecordIdentity) -> DiskTier:
        return DiskTier(place, identity, 64 << 20)

    def damage(self, tier: Any, key: OffloadKey) -> None:
        overwrite(tier, key, ALIGNMENT + 777, b"\xff\x00\xff")

    def lose(self, tier: Any, key: OffloadKey) -> None:
        overwrite(tier, key, 0, bytes(ALIGNMENT))


class TestDiskTierThroughThePageCache(TestDiskTier):
    def make(self, place: Any, identity: RecordIdentity) -> DiskTier:
        return DiskTier(place, identity, 64 << 20, direct=False)


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
    tier = DiskTier(tmp_path, IDENTITY, 1 << 20)
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
    limit_bytes = 10 * SLOT_BYTES + 100
    tier = DiskTier(tmp_path, IDENTITY, limit_bytes)
    for number in range(10):
        write(tier, number)
    with pytest.raises(TierFullError, match=f"of {limit_bytes} bytes are used"):
        write(tier, 10)
    with pytest.raises(TierFullError):
        write(tier, 11, 100)
    tier.discard([name_of(3).key])
    write(tier, 12)
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("slab-*"))
    assert on_disk == tier.used_bytes <= limit_bytes
    assert [number for number in range(13) if read(tier, number)] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 12]
    tier.close()


def test_the_limit_counts_what_was_there_before_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, IDENTITY, 10 * SLOT_BYTES)
    for number in range(10):
        write(tier, number)
    tier.close()
    again = DiskTier(tmp_path, IDENTITY, 10 * SLOT_BYTES)
    with pytest.raises(TierFullError):
        write(again, 10)
    assert again.used_bytes == 10 * SLOT_BYTES
    again.close()


def test_free_space_that_is_reserved_stays_free(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    tier = DiskTier(tmp_path, IDENTITY, 1 << 40, reserve_bytes=status.f_bavail * status.f_frsize + (1 << 30))
    with pytest.raises(TierFullError, match="stay free on the file system"):
        write(tier, 1)
    assert tier.used_bytes == 0
    tier.close()


def test_nobody_else_may_read_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = DiskTier(folder, IDENTITY, 1 << 20)
    write(tier, 1)
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert set(modes.values()) == {0o600, 0o700}, modes
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
    tier.close()


def test_a_second_instance_is_refused_by_the_folder_s_name(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, IDENTITY, 1 << 20)
    with pytest.raises(ConfigError, match=r"disk = '.*': another instance uses this folder"):
        DiskTier(tmp_path, IDENTITY, 1 << 20)
    tier.close()
    DiskTier(tmp_path, IDENTITY, 1 << 20).close()


def test_a_slot_that_is_read_is_not_written_before_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, IDENTITY, 2 * SLOT_BYTES)
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


def test_old_generations_make_room_bit_by_bit_and_stay_away_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, IDENTITY, 100 * SLOT_BYTES)
    for number in range(100):
        write(tier, number)
    tier.begin_generation(trusted=True)
    for number in range(50):
        write(tier, 1000 + number)
    tier.close()
    again = DiskTier(tmp_path, IDENTITY, 100 * SLOT_BYTES)
    assert again.generation == 1
    assert sorted(header.name.chunk_index for header in again.inventory()) == list(range(1000, 1050))
    assert [read(again, number) for number in range(100)] == [None] * 100
    for number in range(50):
        write(again, 2000 + number)
    again.close()


@pytest.mark.parametrize("how", ["gone", "garbage", "torn", "another schema"])
def test_a_lost_index_is_made_anew_from_the_records(tmp_path: Path, how: str) -> None:
    tier = DiskTier(tmp_path, IDENTITY, 1 << 20)
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
    again = DiskTier(tmp_path, IDENTITY, 1 << 20)
    assert again.generation == 1
    assert [read(again, number) for number in range(6)] == [payload_of(number) for number in range(6)]
    again.close()


def test_rows_that_name_the_wrong_slots_serve_nothing_wrong(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, IDENTITY, 1 << 20)
    for number in range(4):
        write(tier, number)
    folder = tier._folder
    tier.close()
    with sqlite3.connect(folder / "index.sqlite") as rows:
        headers = [row[0] for row in rows.execute("SELECT header FROM records ORDER BY slot")]
        for slot, header in enumerate(reversed(headers)):
            rows.execute("UPDATE records SET header = ? WHERE slot = ?", (header, slot))
        rows.execute("UPDATE records SET slot = 900 WHERE slot = 3")
    again = DiskTier(tmp_path, IDENTITY, 1 << 20)
    for number in range(4):
        try:
            assert read(again, number) in (None, payload_of(number))
        except CorruptRecordError:
            assert read(again, number) is None
    again.close()


def test_every_bit_of_a_record_on_disk_is_covered(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, IDENTITY, 1 << 20)
    places = [*range(0, HEADER_BYTES, 5), *range(ALIGNMENT, ALIGNMENT + PAYLOAD_BYTES, 401)]
    for at in places:
        write(tier, 1)
        place = tier._entries[name_of(1).key]
        path = tier._folder / f"slab-{PAYLOAD_BYTES}"
        byte = path.read_bytes()[place.slot * SLOT_BYTES + at]
        overwrite(tier, name_of(1).key, at, bytes([byte ^ 1 << at % 8]))
        with pytest.raises(CorruptRecordError):
            read(tier, 1)
    tier.close()
