"""What can lie below host memory and stop answering when it is told to; and the disks among it.

``ThrottledDisk`` is real: a file system of its own on a loop device, whose reads the kernel holds back for
one process. Threads that read sleep in the kernel and cannot be woken, as with a disk or a network file
system that is gone. It needs root and version 1 of the block I/O controller. ``HeldMemory`` needs nothing:
kvtide's own ``HeldTier``, whose reads wait for a file to go away.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

BLKIO = Path("/sys/fs/cgroup/blkio")
LIMIT = "1GiB"
IMAGE_BYTES = 2 << 30


class Medium(Protocol):
    """What can be frozen.

    Attributes:
        name: For people.
        tier: The name of kvtide's tier on it; "" when there is none.
    """

    name: str
    tier: str

    def settings(self) -> Mapping[str, Any]:
        """Settings of kvtide that put a tier on it."""

    def freeze(self, process_id: int) -> None:
        """Let it be for this process from now on as its kind says: reads do not return, calls take long."""

    def thaw(self) -> None:
        """Let everything return."""

    def close(self) -> None:
        """Leave nothing behind; whoever used it has ended."""

    def held_count(self) -> int:
        """Calls that it has held back since it was frozen, as far as it can tell; else 0."""


class Nothing:
    """No medium: what the trial then finds between its engines is its own error."""

    name = "nothing: neither engine has a tier"
    tier = ""

    def __init__(self, folder: Path) -> None:
        pass

    def settings(self) -> Mapping[str, Any]:
        return {}

    def freeze(self, process_id: int) -> None:
        pass

    def thaw(self) -> None:
        pass

    def close(self) -> None:
        pass

    def held_count(self) -> int:
        return 0


class HeldMemory:
    """Memory behind a tier that keeps its reads while a file is there."""

    name = "HeldTier: reads wait for a file to go away"
    tier = "held"

    def __init__(self, folder: Path) -> None:
        self._switch = folder.resolve() / "held"
        self._switch.unlink(missing_ok=True)

    def settings(self) -> Mapping[str, Any]:
        tier = {
            "class": "kvtide.testing.HeldTier",
            "name": self.tier,
            "limit": LIMIT,
            "options": {"switch": str(self._switch), "holding": ["read"]},
        }
        return {"tiers": [tier]}

    def freeze(self, process_id: int) -> None:
        self._switch.touch()

    def thaw(self) -> None:
        self._switch.unlink(missing_ok=True)

    def close(self) -> None:
        self.thaw()

    def held_count(self) -> int:
        return 0


class ThrottledDisk:
    """A file system on a loop device that the kernel slows down to nothing for one process."""

    name = "ext4 on a loop device, its reads held back by the kernel (blkio, 1 byte a second)"
    tier = "disk"

    def __init__(self, folder: Path) -> None:
        self._image = folder.resolve() / "disk.img"
        self._mount = folder.resolve() / "disk"
        self._group = BLKIO / f"kvtide-frozen-{os.getpid()}"
        self._undo: list[Callable[[], object]] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def why_not() -> str:
        """Say what is missing here, "" when nothing is."""
        if os.geteuid() != 0:
            return "only root can make one"
        if not (BLKIO / "blkio.throttle.read_bps_device").exists():
            return f"no throttle in {BLKIO}"
        missing = [name for name in ("losetup", "mkfs.ext4", "mount") if shutil.which(name) is None]
        return f"no {', '.join(missing)}" if missing else ""

    def settings(self) -> Mapping[str, Any]:
        return {"disk": str(self._mount / "tier"), "disk_limit": LIMIT, "disk_reserve": "16MiB"}

    def freeze(self, process_id: int) -> None:
        self._limit(1)
        (self._group / "cgroup.procs").write_text(str(process_id))

    def thaw(self) -> None:
        self._limit(0)

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def held_count(self) -> int:
        return 0

    def _limit(self, bytes_per_s: int) -> None:
        """Set the limit for reads; 0 is none.

        Writes go on: they would hang first, have the tier left out, and no read would be seen to hang.
        """
        (self._group / "blkio.throttle.read_bps_device").write_text(f"{self._device} {bytes_per_s}")

    def _build(self) -> None:
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        self._undo.append(self._image.unlink)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", str(self._image))
        self._undo.append(lambda: _run("losetup", "--detach", loop))
        _run("mkfs.ext4", "-q", loop)
        self._mount.mkdir(exist_ok=True)
        _run("mount", loop, str(self._mount))
        self._undo.append(lambda: _run("umount", str(self._mount)))
        number = os.stat(loop).st_rdev
        self._device = f"{os.major(number)}:{os.minor(number)}"
        self._group.mkdir()
        self._undo.append(self._leave)

    def _leave(self) -> None:
        self.thaw()
        for process_id in (self._group / "cgroup.procs").read_text().split():
            (BLKIO / "cgroup.procs").write_text(process_id)
        self._group.rmdir()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def stuck_threads(process_id: int) -> int:
    """Count the threads of a process that sleep in the kernel and cannot be woken."""
    found = 0
    for stat in Path(f"/proc/{process_id}/task").glob("*/stat"):
        try:
            found += stat.read_text().rsplit(")", 1)[1].split()[0] == "D"
        except (OSError, IndexError):
            continue
    return found
