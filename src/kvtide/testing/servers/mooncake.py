"""Mooncake Store for tests: a master and storage processes, in a network namespace of their own.

Their ports are open on every interface and ask for no password, and so is the client's. So whoever tests with
them runs as a whole in a namespace where there is nothing but a loopback device: ``in_own_network`` says how.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

START_LIMIT_S = 30.0
POLL_S = 0.02


def in_own_network(command: Sequence[str]) -> list[str]:
    """Make a command that runs ``command`` where there is only a loopback device, and that is up."""
    return ["unshare", "-n", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def why_not() -> str | None:
    """Say why there can be no Mooncake here; None when there can."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    try:
        package = importlib.util.find_spec("mooncake.store")
    except ImportError as error:
        return f"mooncake cannot be imported: {error}"
    if package is None:
        return "mooncake is not installed: pip install 'kvtide[mooncake]'"
    trial = subprocess.run(in_own_network(["true"]), capture_output=True, text=True, check=False)
    return f"no network namespace: {trial.stderr.strip()}" if trial.returncode else None


def free_port() -> int:
    """A port of the loopback device on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One process, ended with the block it is used in.

    Args:
        command: To start it.
        port: On which it listens once it serves.
    """

    def __init__(self, command: Sequence[str], port: int) -> None:
        self._command, self.port = list(command), port
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()

    def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            RuntimeError: It does not; with the end of its log.
        """
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=_environment()
        )
        until_s = time.monotonic() + START_LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    self._log.seek(0)
                    log = self._log.read().decode(errors="replace")
                    self.kill()
                    raise RuntimeError(f"{self._command[0]} does not serve: {log[-2000:]}") from None
                time.sleep(POLL_S)

    def kill(self) -> None:
        """End it without warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it do nothing from now on until ``thaw``; its connections stay."""
        pid = self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._log.close()

    def _signal(self, number: int) -> int:
        assert self._process is not None
        os.kill(self._process.pid, number)
        return self._process.pid


class Store:
    """A master, and one storage process that lends it memory.

    Args:
        memory_bytes: Of the storage process.
        lease_ms: For how long what was read, or asked about, is not evicted.
        client_ttl_s: After which a client that is not heard of is forgotten, with what it held.
    """

    def __init__(self, memory_bytes: int, lease_ms: int, client_ttl_s: int) -> None:
        package = _package()
        port, storage_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.master = Server(
            [
                str(package / "mooncake_master"),
                f"-rpc_port={port}",
                f"-metrics_port={free_port()}",
                f"-default_kv_lease_ttl={lease_ms}",
                f"-client_ttl={client_ttl_s}",
            ],
            port,
        )
        self.storage = Server(
            [
                str(package / "mooncake_client"),
                "--host=127.0.0.1",
                f"--master_server_address={self.address}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                f"--global_segment_size={memory_bytes}",
                f"--port={storage_port}",
            ],
            storage_port,
        )

    def close(self) -> None:
        """End both."""
        self.storage.close()
        self.master.close()


@contextmanager
def mooncake_store(
    memory_bytes: int = 256 << 20, lease_ms: int = 5000, client_ttl_s: int = 10
) -> Iterator[Store]:
    """A store that serves; to be called in a network of its own.

    Raises:
        RuntimeError: It does not start, or other machines could reach it.
    """
    if [name for _, name in socket.if_nameindex() if name != "lo"] and not _only_loopback_is_up():
        raise RuntimeError("mooncake listens on every interface: run this by in_own_network()")
    store = Store(memory_bytes, lease_ms, client_ttl_s)
    try:
        store.master.start()
        store.storage.start()
        yield store
    finally:
        store.close()


def _only_loopback_is_up() -> bool:
    """Whether no other device has a route: a new namespace may have tunnel devices, which are down."""
    return len(Path("/proc/net/route").read_text().splitlines()) <= 1


def _package() -> Path:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _environment() -> dict[str, str]:
    return {"MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_TCP_STATUS_TIMEOUT_SEC": "2", **os.environ}
