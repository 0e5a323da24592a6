"""A shared folder with others in it: what they put there, and what they do at the same time."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from directory_calls import files_in, path_of, read, tier_in, write

from kvtide.errors import CorruptRecordError, NodeUnavailableError
from kvtide.testing.tiers import DEADLINE_S, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import Written
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.directory_files import RecordFile


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DirectoryTier]:
    yield from tier_in(tmp_path)


# -- what somebody put there -------------------------------------------------------------------


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


# -- others at the same time -------------------------------------------------------------------


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
