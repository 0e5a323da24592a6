"""The folder of a directory tier: not there, gone, emptied, open to others; and what a ping says of it."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from directory_calls import opened, read, tier_in, write

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.testing.tiers import DEADLINE_S, payload_of
from kvtide.tiers import directory_files
from kvtide.tiers.base import Written
from kvtide.tiers.directory import DirectoryTier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DirectoryTier]:
    yield from tier_in(tmp_path)


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
