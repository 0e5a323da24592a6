"""A shared folder: the tests for tiers on two file systems, and what only a folder of many hosts can do."""

import errno
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import (
    ConfigError,
    CorruptRecordError,
    NodeUnavailableError,
    TierFullError,
    TierUnavailableError,
)
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, TierTests, name_of, payload_of
from kvtide.tiers import directory_files
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.directory_files import RecordFile, publish
from kvtide.tiers.named import check_tier, tier_named
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity, RecordRun

GIB = 1 << 30


def place_of(
    folder: Path, identity: RecordIdentity = IDENTITY, limit_bytes: int = 0, rank: int = 0, **more: Any
) -> TierPlace:
    return TierPlace(identity, rank, limit_bytes, {"path": str(folder)}, instance=os.urandom(4).hex(), **more)


def opened(folder: Path, *args: Any, **more: Any) -> DirectoryTier:
    tier = DirectoryTier.build(place_of(folder, *args, **more))
    tier.open()
    return tier


def path_of(tier: DirectoryTier, number: int) -> Path:
    return Path(tier._path_of(name_of(number).key))


def write(tier: DirectoryTier, number: int, payload: bytes | None = None) -> Written:
    return tier.write(name_of(number), memoryview(payload or payload_of(number)), DEADLINE_S)


def read(tier: DirectoryTier, number: int) -> bytes | None:
    payload = bytearray(PAYLOAD_BYTES)
    found = tier.read_into(name_of(number).key, memoryview(payload), DEADLINE_S)
    return bytes(payload) if found else None


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("kvtide.")]


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
    tier = opened(tmp_path / "tier")
    yield tier
    tier.close()


# -- what lies there ------------------------------------------------------------------------------


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


# -- publishing -----------------------------------------------------------------------------------


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


# -- what somebody put there ----------------------------------------------------------------------


def put_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def put_pipe(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path, elsewhere: Path) -> None:
    own = socket.socket(socket.AF_UNIX)
    before = os.getcwd()
    os.chdir(path.parent)  # the name alone is short enough for a socket
    try:
        own.bind(path.name)
    finally:
        os.chdir(before)
        own.close()


@pytest.mark.parametrize("put", [put_link, put_pipe, put_socket])
def test_what_is_no_file_is_neither_followed_nor_waited_for_and_makes_room(
    tier: DirectoryTier, tmp_path: Path, put: Any
) -> None:
    write(tier, 1)
    elsewhere = tmp_path / "elsewhere"
    shutil.copy(path_of(tier, 1), elsewhere)
    content = elsewhere.read_bytes()
    for _ in range(2):
        path_of(tier, 1).unlink()
        put(path_of(tier, 1), elsewhere)
        assert tier.contains([name_of(1).key], DEADLINE_S) == [False]
        with pytest.raises(CorruptRecordError, match="not a file"):
            read(tier, 1)
        assert read(tier, 1) is None
        assert write(tier, 1) is Written.NEW
    path_of(tier, 1).unlink()
    put(path_of(tier, 1), elsewhere)
    assert write(tier, 1) is Written.NEW
    assert read(tier, 1) == payload_of(1)
    assert elsewhere.read_bytes() == content


def test_a_folder_in_the_place_of_a_record_harms_that_record_alone(tier: DirectoryTier) -> None:
    write(tier, 1)
    path_of(tier, 1).unlink()
    path_of(tier, 1).mkdir()
    with pytest.raises(NodeUnavailableError, match="remove it"):
        write(tier, 1)
    with pytest.raises(CorruptRecordError):
        read(tier, 1)
    write(tier, 2)
    assert read(tier, 2) == payload_of(2)


def test_one_record_under_the_name_of_another_is_refused(tier: DirectoryTier) -> None:
    write(tier, 1)
    shutil.copy(path_of(tier, 1), path_of(tier, 2))
    with pytest.raises(CorruptRecordError, match="of another key"):
        read(tier, 2)
    assert read(tier, 1) == payload_of(1)


def test_a_giant_file_is_not_read(tier: DirectoryTier) -> None:
    write(tier, 1)
    os.truncate(path_of(tier, 1), 1 << 40)  # a hole
    with pytest.raises(CorruptRecordError, match=f"{1 << 40} bytes"):
        read(tier, 1)
    assert read(tier, 1) is None


# -- others at the same time ----------------------------------------------------------------------


def test_a_record_that_was_replaced_while_it_was_read_stays(tier: DirectoryTier, tmp_path: Path) -> None:
    write(tier, 1)
    with RecordFile(str(path_of(tier, 1))) as file:
        path_of(tier, 1).unlink()
        write(tier, 1)
        file.remove()
    assert read(tier, 1) == payload_of(1)
    with RecordFile(str(path_of(tier, 1))) as file:
        file.remove()
    assert read(tier, 1) is None


def test_a_record_that_is_removed_while_it_is_read_is_read_to_its_end(tier: DirectoryTier) -> None:
    write(tier, 1)
    payload = bytearray(PAYLOAD_BYTES)
    with RecordFile(str(path_of(tier, 1))) as file:
        tier.discard([name_of(1).key])
        header = file.read(memoryview(payload), time.monotonic() + DEADLINE_S)
    assert header is not None
    tier.check(header, name_of(1).key, memoryview(payload))


def test_a_read_is_noted_once_in_a_while_and_leaves_the_time_of_writing(tier: DirectoryTier) -> None:
    write(tier, 1)
    long_ago_ns = int((time.time() - 10_000) * 1e9)
    os.utime(path_of(tier, 1), ns=(long_ago_ns, long_ago_ns))
    before, began_s = path_of(tier, 1).stat(), time.time()
    assert read(tier, 1) is not None
    first = path_of(tier, 1).stat()
    assert first.st_atime >= began_s - 1
    assert first.st_mtime_ns == long_ago_ns
    # The system may note a read by itself; only ours is a change of the file.
    assert first.st_ctime_ns > before.st_ctime_ns
    assert read(tier, 1) is not None
    assert path_of(tier, 1).stat().st_ctime_ns == first.st_ctime_ns


@pytest.mark.parametrize("how", [[], ["--replaces"]], ids=["renames that spare", "renames that replace"])
def test_processes_that_read_write_remove_and_clean_at_once_never_see_a_wrong_byte(
    tmp_path: Path, how: list[str]
) -> None:
    script, count = Path(__file__).with_name("directory_worker.py"), 4
    workers = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "tier", str(seed), "600", "--count", str(count), *how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in range(count)
    ]
    try:
        told = [worker.communicate(timeout=120.0) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, told, strict=True):
        assert worker.returncode == 0, errors.decode()
    done = sum((Counter(json.loads(output)) for output, _ in told), Counter[str]())
    assert all(done[what] > 20 for what in ("hit", "miss", "new", "there already", "cleaned")), done
    assert [path for path in files_in(tmp_path) if path.name.endswith(".tmp")] == []


# -- the folder -----------------------------------------------------------------------------------


def test_what_is_above_the_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailableError, match=r"there is no folder .*; mount the file system"):
        opened(tmp_path / "not mounted" / "tier")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("mine")
    with pytest.raises(TierUnavailableError, match="not a folder"):
        opened(tmp_path / "tier")
    assert (tmp_path / "tier").read_text() == "mine"


def test_a_folder_that_has_gone_is_not_made_anew_and_works_again_when_it_is_back(
    tier: DirectoryTier, tmp_path: Path
) -> None:
    write(tier, 1)
    (tmp_path / "tier").rename(tmp_path / "away")
    assert read(tier, 1) is None
    with pytest.raises(TierUnavailableError, match="is the file system mounted"):
        write(tier, 2)
    assert not (tmp_path / "tier").exists()
    (tmp_path / "away").rename(tmp_path / "tier")
    assert read(tier, 1) == payload_of(1)
    assert write(tier, 2) is Written.NEW


def test_a_folder_that_was_emptied_is_written_to_again(tier: DirectoryTier, tmp_path: Path) -> None:
    write(tier, 1)
    for path in (tmp_path / "tier").iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert read(tier, 1) is None
    assert write(tier, 1) is Written.NEW
    assert read(tier, 1) == payload_of(1)
    assert (tmp_path / "tier" / "kvtide.folder").is_file()


def test_a_folder_to_which_others_may_write_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tier").mkdir(mode=0o700)
    opened(tmp_path / "tier").close()
    assert caplog.messages == []
    (tmp_path / "tier").chmod(0o770)
    opened(tmp_path / "tier").close()
    assert any("others than its owner may write there" in message for message in caplog.messages)


def test_a_ping_says_where_it_is_and_leaves_nothing(tier: DirectoryTier, tmp_path: Path) -> None:
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    said = tier.ping(DEADLINE_S)
    assert str(tmp_path / "tier") in said
    assert " free" in said
    assert "unknown" not in said
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, TierFullError),
        (errno.EDQUOT, TierFullError),
        (errno.EIO, TierUnavailableError),
        (errno.ESTALE, TierUnavailableError),
        (errno.ENOTCONN, TierUnavailableError),
        (errno.EACCES, TierUnavailableError),
    ],
)
def test_what_the_system_says_becomes_what_a_tier_says(number: int, kind: type[Exception]) -> None:
    error = directory_files.tier_error("/mnt/kv", OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert os.strerror(number) in str(error)
    assert "/mnt/kv" in str(error)


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "setting", "said"),
    [
        ({}, "tiers.options.path", "is needed"),
        ({"path": ""}, "tiers.options.path", "at least 2"),
        ({"path": "kv"}, "tiers.options.path", "absolute"),
        ({"path": "~/kv"}, "tiers.options.path", "absolute"),
        ({"path": "/mnt/\0"}, "tiers.options.path", "absolute"),
        ({"path": 7}, "tiers.options.path", "string"),
        ({"path": "/mnt/kv", "fsync": "maybe"}, "tiers.options.fsync", "boolean"),
        ({"path": "/mnt/kv", "folder": "x"}, "tiers.options.folder", "there are path, fsync"),
    ],
)
def test_options_that_will_not_do_are_refused_by_name(
    options: dict[str, Any], setting: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        tier_named("directory", TierPlace(IDENTITY, 0, 0, options))
    assert caught.value.setting == setting
    with pytest.raises(ConfigError, match=said):
        check_tier("directory", "directory", 0, options)
