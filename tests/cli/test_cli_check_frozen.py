"""``kvtide check`` where a file system never answers."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli import check, check_stores
from kvtide.cli.main import app
from kvtide.cli.unanswered import UnansweredError, mount_of, within

MOUNTS = r"""21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /mnt/kv rw shared:7 master:3 - nfs4 filer:/export/kv rw,vers=4.2
31 30 0:41 / /mnt/kv/one\040two rw - fuse.juicefs JuiceFS:pool\134one rw
32 21 0:42 / /mnt/kv-other rw - tmpfs tmpfs rw
33 21 0:43 / /over rw - xfs /dev/sdb rw
34 33 0:44 / /over rw - nfs filer:/over rw
garbled
35 21 0:45 / /cut rw -
"""


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file system says how much of it is free, until the test is over."""
    thawed, real = threading.Event(), os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        thawed.wait()
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(check, "DISK_LIMIT_S", 0.1)
    monkeypatch.setattr(check_stores, "LIMIT_S", 0.3)
    yield
    thawed.set()


def test_a_disk_and_a_store_on_a_frozen_mount_are_named_with_the_mount(frozen: None, tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "store")}
    tiers = json.dumps([{"class": "directory", "limit": "1GiB", "options": options}])
    given = ["check", "--host-memory", "16MiB", "--disk", str(tmp_path / "disk"), "--disk-limit", "1MiB"]
    result = CliRunner().invoke(app, [*given, "--tiers", tiers, "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 2
    wrong = {one["setting"]: (one["value"], one["hint"]) for one in found["errors"]}
    mount = mount_of(str(tmp_path))
    assert mount is not None
    assert wrong["disk"] == (
        str(tmp_path / "disk"),
        f"cannot be used: {mount} has not answered for 0.1 s; look at that mount",
    )
    assert wrong["tiers"] == ("directory", f"{mount} has not answered for 0.3 s, and does not say why")
    assert found["stores"] == [{"name": "directory", "answer": None}]
    assert found["disk"] is None


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/", "/ (ext4 from /dev/sda1)"),
        ("/var/cache", "/ (ext4 from /dev/sda1)"),
        ("/mnt/kv", "/mnt/kv (nfs4 from filer:/export/kv)"),
        ("/mnt/kv/../kv/deep/er/", "/mnt/kv (nfs4 from filer:/export/kv)"),
        ("/mnt/kv/one two/x", "/mnt/kv/one two (fuse.juicefs from JuiceFS:pool\\one)"),
        ("/mnt/kv-other/x", "/mnt/kv-other (tmpfs from tmpfs)"),
        ("/mnt/kv-else", "/ (ext4 from /dev/sda1)"),
        ("/over/x", "/over (nfs from filer:/over)"),
        ("/cut/x", "/ (ext4 from /dev/sda1)"),
    ],
)
def test_a_mount_is_found_without_a_look_at_the_path(tmp_path: Path, path: str, mount: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert mount_of(path, mounts) == mount


def test_where_no_mounts_are_told_there_is_none(tmp_path: Path) -> None:
    assert mount_of("/x", tmp_path / "nowhere") is None
    (tmp_path / "empty").write_text("")
    assert mount_of("/x", tmp_path / "empty") is None


def test_an_answer_in_time_is_handed_on_whatever_it_is() -> None:
    assert within(60, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="its own"):
        within(60, _its_own)
    never = threading.Event()
    try:
        with pytest.raises(UnansweredError):
            within(0.01, never.wait)
    finally:
        never.set()


def _its_own() -> None:
    raise TimeoutError("its own")
