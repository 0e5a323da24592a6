"""A shared folder: the tests for tiers on two file systems, what lies there, and how it comes to be there."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from directory_calls import files_in, opened, path_of, place_of, read, tier_in, write

from kvtide.errors import TierUnavailableError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, TierTests, name_of, payload_of
from kvtide.tiers import directory_files
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.directory_files import publish
from kvtide.tiers.named import tier_named
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity, RecordRun

GIB = 1 << 30


class TestDirectoryTier(TierTests):
    def make(self, place: Any, identity: RecordIdentity) -> DirectoryTier:
        return DirectoryTier.build(place_of(place, identity))

    def damage(self, tier: Any, key: OffloadKey) -> None:
        with open(tier._path_of(key), "r+b") as file:
            file.seek(HEADER_BYTES + 777)
            file.write(b"\xff\x00\xff")

    def lose(self, tier: Any, key: OffloadKey) -> None:
        os.unlink(tier._path_of(key))


class TestDirectoryTierInMemory(TestDirectoryTier):
    @pytest.fixture
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield Path(folder) / "tier"


class TestDirectoryTierWithALimit(TestDirectoryTier):
    def make(self, place: Any, identity: RecordIdentity) -> DirectoryTier:
        return DirectoryTier.build(place_of(place, identity, GIB))


class TestDirectoryTierThatWaitsForTheMedium(TestDirectoryTier):
    def make(self, place: Any, identity: RecordIdentity) -> DirectoryTier:
        options = {"path": str(place), "fsync": True}
        return tier_named("directory", TierPlace(identity, 0, 0, options))  # type: ignore[return-value]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DirectoryTier]:
    yield from tier_in(tmp_path)


# -- what lies there ---------------------------------------------------------------------------


def test_a_record_is_one_file_of_header_and_payload_under_a_name_that_says_all(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tier = opened(tmp_path / "tier")
        write(tier, 0x01020303)
    finally:
        os.umask(before)
    block_hash = "01020304" * 8
    (file,) = files_in(tmp_path / "tier")
    assert str(file.relative_to(tmp_path / "tier")) == (
        f"kv1/{IDENTITY.fingerprint.hex()}/g0/01/02/{block_hash}.1of4"
    )
    assert file.read_bytes()[HEADER_BYTES:] == payload_of(0x01020303)
    assert file.stat().st_size == HEADER_BYTES + PAYLOAD_BYTES
    for path in [tmp_path / "tier", *(tmp_path / "tier").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    tier.close()


def test_two_servers_see_what_the_other_wrote_and_not_what_it_wrote_after_a_reset(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "tier"), opened(tmp_path / "tier")
    write(one, 1)
    assert read(other, 1) == payload_of(1)
    assert write(other, 1) is Written.THERE_ALREADY
    other.discard([name_of(1).key])
    assert read(one, 1) is None
    one.begin_generation()
    write(one, 2)
    assert (read(one, 2), read(other, 2)) == (payload_of(2), None)
    write(other, 3)
    assert (read(one, 3), read(other, 3)) == (None, payload_of(3))
    one.close()
    other.close()


def test_a_rank_whose_bytes_another_writes_writes_nothing_and_reads(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path / "tier"), opened(tmp_path / "tier", writes=(True, False))
    name = name_of(1, group_index=1)
    assert reader.write(name, memoryview(payload_of(1)), DEADLINE_S) is Written.THERE_ALREADY
    assert files_in(tmp_path) == []
    writer.write(name, memoryview(payload_of(1)), DEADLINE_S)
    payload = bytearray(PAYLOAD_BYTES)
    assert reader.read_into(name.key, memoryview(payload), DEADLINE_S)
    assert payload == payload_of(1)
    writer.close()
    reader.close()


def test_a_run_is_asked_for_by_its_names(tier: DirectoryTier) -> None:
    hashes = tuple(split_offload_key(name_of(number).key)[0] for number in range(6))
    for number in (0, 1, 4):
        write(tier, number)
    assert tier.find(RecordRun(0, 0, hashes), DEADLINE_S) == [True, True, False, False, True, False]


def test_a_group_that_the_model_does_not_have_is_a_miss(tmp_path: Path) -> None:
    tier = opened(tmp_path / "tier", RecordIdentity(bytes(32), IDENTITY.shards * 2))
    key = name_of(1, group_index=5).key
    assert not tier.read_into(key, memoryview(bytearray(8)), DEADLINE_S)
    assert tier.contains([key], DEADLINE_S) == [False]
    tier.discard([key])
    tier.close()


def test_nothing_is_left_of_a_write_that_runs_out_of_time(tier: DirectoryTier, tmp_path: Path) -> None:
    write(tier, 1)
    with pytest.raises(TierUnavailableError, match="out of time after 0 of"):
        tier.write(name_of(2), memoryview(payload_of(2)), -1.0)
    with pytest.raises(TierUnavailableError, match="out of time"):
        tier.read_into(name_of(1).key, memoryview(bytearray(PAYLOAD_BYTES)), -1.0)
    with pytest.raises(TierUnavailableError, match="out of time"):
        tier.contains([name_of(1).key], -1.0)
    assert files_in(tmp_path) == [path_of(tier, 1)]
    assert read(tier, 1) == payload_of(1)


def test_records_longer_than_a_piece_are_moved_whole(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_files, "PIECE_BYTES", 1000)
    write(tier, 1)
    assert read(tier, 1) == payload_of(1)
    monkeypatch.undo()
    assert read(tier, 1) == payload_of(1)


# -- publishing --------------------------------------------------------------------------------


def test_a_name_that_is_taken_keeps_its_file(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "there").write_text("there")
    assert not publish(str(tmp_path / "new"), str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "there"
    assert publish(str(tmp_path / "new"), str(tmp_path / "free"))
    assert (tmp_path / "free").read_text() == "new"
    with pytest.raises(FileNotFoundError):
        publish(str(tmp_path / "new"), str(tmp_path / "other"))


def test_where_a_rename_cannot_spare_what_is_there_it_replaces_it(
    tier: DirectoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_files, "_rename_with_flags", None)
    assert write(tier, 1) is Written.NEW
    assert read(tier, 1) == payload_of(1)
    (tmp_path / "new").write_text("new")
    (tmp_path / "there").write_text("there")
    assert publish(str(tmp_path / "new"), str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "new"


def test_what_is_there_already_is_not_written_again(tier: DirectoryTier) -> None:
    write(tier, 1)
    before = path_of(tier, 1).stat()
    assert write(tier, 1, bytes(payload_of(2))) is Written.THERE_ALREADY
    after = path_of(tier, 1).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert read(tier, 1) == payload_of(1)


@pytest.mark.parametrize("left_bytes", [0, 1, HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1])
def test_what_a_crashed_host_left_torn_is_written_anew(tier: DirectoryTier, left_bytes: int) -> None:
    write(tier, 1)
    os.truncate(path_of(tier, 1), left_bytes)
    assert write(tier, 1) is Written.NEW
    assert read(tier, 1) == payload_of(1)
