"""Mooncake Store for tests: a master and storage processes, in a network namespace of their own.

Their ports are open on every interface and ask for no password, and so is the client's. So whoever tests with
them runs as a whole in a namespace where there is nothing but a loopback device: ``in_own_network`` says how.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtide.testing.servers.process import ServerProcess, free_port, takes_connections


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


class Store:
    """A master, and one storage process that lends it memory.

    Args:
        memory_bytes: Of the storage process.
        lease_ms: For how long what was read, or asked about, is not evicted.
        client_ttl_s: After which a client that is not heard of is forgotten, with what it held.

    Attributes:
        address: Of the master, as host:port.
        master: It knows what is where.
        storage: It has the memory.
    """

    def __init__(self, memory_bytes: int, lease_ms: int, client_ttl_s: int) -> None:
        package = _package()
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._logs = tempfile.TemporaryDirectory(prefix="kvtide-")
        self.master = self._server(
            "master",
            port,
            [
                str(package / "mooncake_master"),
                f"-rpc_port={port}",
                f"-metrics_port={free_port()}",
                f"-default_kv_lease_ttl={lease_ms}",
                f"-client_ttl={client_ttl_s}",
            ],
        )
        port = free_port()
        self.storage = self._server(
            "storage",
            port,
            [
                str(package / "mooncake_client"),
                "--host=127.0.0.1",
                f"--master_server_address={self.address}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                f"--global_segment_size={memory_bytes}",
                f"--port={port}",
            ],
        )

    def close(self) -> None:
        """End both."""
        self.storage.kill()
        self.master.kill()
        self._logs.cleanup()

    def _server(self, name: str, port: int, command: Sequence[str]) -> ServerProcess:
        log = Path(self._logs.name) / name
        return ServerProcess(command, log, lambda: takes_connections(port), _environment())


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
