"""A shared folder on a file system that is really full, and on one that is unmounted under it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, name_of, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.directory import DirectoryTier

PAYLOAD = bytes(payload_of(1, 64 << 10))
MORE_THAN_FITS = 100


def mount(path: Path) -> None:
    """A file system of 4 MiB; where that is not allowed these tests fail, and say why."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=10k", "tmpfs", path], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount(folder)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)


def opened(path: Path) -> DirectoryTier:
    tier = DirectoryTier.build(TierPlace(IDENTITY, 0, 0, {"path": str(path)}))
    tier.open()
    return tier


def write(tier: DirectoryTier, number: int) -> Written:
    return tier.write(name_of(number), memoryview(PAYLOAD), DEADLINE_S)


def read(tier: DirectoryTier, number: int) -> bool:
    into = bytearray(len(PAYLOAD))
    found = tier.read_into(name_of(number).key, memoryview(into), DEADLINE_S)
    assert not found or into == PAYLOAD
    return found


def filled(tier: DirectoryTier) -> int:
    """Write until there is no room; how many were kept."""
    for number in range(MORE_THAN_FITS):
        try:
            write(tier, number)
        except TierFullError:
            return number
    raise AssertionError("it never was full")


def test_a_full_file_system_keeps_what_it_has_and_nothing_unfinished(small: Path) -> None:
    tier = opened(small / "tier")
    count = filled(tier)
    assert 50 < count < 64
    with pytest.raises(TierFullError, match="No space left"):
        write(tier, count)
    assert list(small.rglob("*.tmp")) == []
    assert all(read(tier, number) for number in range(count))
    assert not read(tier, count)
    tier.discard([name_of(0).key, name_of(1).key])
    assert write(tier, count) is Written.NEW
    assert read(tier, count)
    tier.close()


def test_a_full_file_system_can_be_opened_and_read_and_a_ping_says_that_it_is_full(small: Path) -> None:
    tier = opened(small / "tier")
    count = filled(tier)
    tier.close()
    with (small / "of others").open("wb", buffering=0) as file:
        free = 1
        while free:
            try:
                free = file.write(bytes(4096))
            except OSError:
                free = 0
    again = opened(small / "tier")
    assert all(read(again, number) for number in range(count))
    with pytest.raises(TierUnavailableError, match=r"No space left.*make room"):
        again.ping(DEADLINE_S)
    again.close()


def test_nothing_is_written_under_a_mount_point_whose_file_system_has_gone(small: Path) -> None:
    tier = opened(small / "tier")
    write(tier, 1)
    subprocess.run(["umount", small], check=True)
    assert not read(tier, 1)
    for number in (1, 2):
        with pytest.raises(TierUnavailableError, match="is the file system mounted"):
            write(tier, number)
    assert list(small.iterdir()) == []
    with pytest.raises(TierUnavailableError):
        opened(small / "gone" / "tier")
    # A folder of that name, but on the host's own disk, is not the one.
    (small / "tier").mkdir()
    with pytest.raises(TierUnavailableError, match="not the folder it was"):
        write(tier, 1)
    assert list((small / "tier").iterdir()) == []
    tier.close()
