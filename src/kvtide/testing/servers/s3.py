"""Object stores for tests: moto's server in a process of its own, and a real radosgw over a small cluster.

Both speak S3 on loopback, on a port that was free, and end by pid. moto keeps everything in memory and
believes every signature unless told otherwise. The radosgw is Ceph's: a monitor, one storage daemon that
keeps objects in memory, and the gateway; ``scripts/radosgw.sh`` installs what it needs.
"""

import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtide.testing.servers.ceph_conf import CONFIGURATION
from kvtide.testing.servers.process import START_S, ServerProcess, free_port, serving

CEPH_PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool")


class S3Server(ServerProcess):
    """A server on loopback, ``http://127.0.0.1:port``.

    Args:
        command: To run it.
        log: File for what it says.
        port: Where it listens.
        bucket: That it has, or will have.
        access_key_id: Of a user who may do everything.
        secret_access_key: The user's.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        port: int,
        bucket: str,
        access_key_id: str,
        secret_access_key: str,
    ) -> None:
        super().__init__(command, log, lambda: _answers(f"{self.endpoint}/"))
        self.endpoint, self.bucket = f"http://127.0.0.1:{port}", bucket
        self.access_key_id, self.secret_access_key = access_key_id, secret_access_key


@contextmanager
def moto_server(folder: Path, bucket: str = "kvtide") -> Iterator[S3Server]:
    """Run moto's server.

    Args:
        folder: Where it writes its log; made when it is not there.
        bucket: To be made.

    Raises:
        RuntimeError: It does not answer.
    """
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = S3Server(command, folder / "moto.log", port, bucket, "moto", "moto-has-no-secret")
    with serving(server):
        _make_bucket(server)
        yield server


def moto_checks_signatures(server: S3Server) -> None:
    """Let moto refuse every user that it does not know, which are all.

    Raises:
        RuntimeError: It did not answer.
    """
    url, plain = f"{server.endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, data=b"0", headers=plain, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=START_S):
            return
    except OSError as error:
        raise RuntimeError(f"moto: {error}") from None


def missing_for_radosgw() -> list[str]:
    """Tell which of the programs that a radosgw takes are not installed."""
    return [name for name in CEPH_PROGRAMS if shutil.which(name) is None]


@contextmanager
def radosgw_server(folder: Path, bucket: str = "kvtide") -> Iterator[S3Server]:
    """Run a radosgw, and below it a monitor and a storage daemon in memory. Takes some 15 s.

    Args:
        folder: Where they write; made when it is not there.
        bucket: To be made.

    Raises:
        RuntimeError: A program is not installed, or one of them does not answer.
    """
    if missing := missing_for_radosgw():
        raise RuntimeError(f"{', '.join(missing)}: not installed; run scripts/radosgw.sh")
    with ExitStack() as daemons:
        cluster = _Cluster(folder, free_port())
        daemons.enter_context(serving(cluster.monitor()))
        daemons.enter_context(serving(cluster.storage()))
        key, secret = "KVTIDE", uuid.uuid4().hex
        cluster.add_user(key, secret)
        port = free_port()
        server = S3Server(cluster.gateway(port), folder / "rgw.log", port, bucket, key, secret)
        daemons.enter_context(serving(server))
        _make_bucket(server)
        yield server


def _make_bucket(server: S3Server) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name="us-east-1",
    )
    try:
        client.create_bucket(Bucket=server.bucket)
    finally:
        client.close()


class _Cluster:
    """Ceph's daemons over a folder: how each is called. They trust everybody; so it is on loopback."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._fsid = folder, str(uuid.uuid4())
        self._address = f"[v2:127.0.0.1:{port}/0]"
        self._conf = folder / "ceph.conf"
        for name in ("mon", "osd", "rgw", "run"):
            (folder / name).mkdir(parents=True)
        self._conf.write_text(CONFIGURATION.format(folder=folder, fsid=self._fsid, address=self._address))

    def monitor(self) -> ServerProcess:
        """Make the monitor's store, and the monitor."""
        monmap = str(self._folder / "monmap")
        _run(["monmaptool", "--create", "--addv", "a", self._address, "--fsid", self._fsid, monmap])
        _run([*self._program("ceph-mon"), "-i", "a", "--mkfs", "--monmap", monmap])
        command = [*self._program("ceph-mon"), "-f", "-i", "a"]
        return ServerProcess(command, self._folder / "mon.log", lambda: bool(self._said("mon", "stat")))

    def storage(self) -> ServerProcess:
        """Make the storage daemon's store, and the daemon."""
        osd_uuid = str(uuid.uuid4())
        _run([*self._program("ceph"), "osd", "new", osd_uuid])
        _run([*self._program("ceph-osd"), "-i", "0", "--mkfs", "--osd-uuid", osd_uuid])
        command = [*self._program("ceph-osd"), "-f", "-i", "0"]
        return ServerProcess(command, self._folder / "osd.log", lambda: "1 up" in self._said("osd", "stat"))

    def gateway(self, port: int) -> list[str]:
        """Say how the gateway is run."""
        frontend = f"beast endpoint=127.0.0.1:{port} tcp_nodelay=1"
        return [*self._program("radosgw"), "-f", "-n", "client.admin", f"--rgw-frontends={frontend}"]

    def add_user(self, key: str, secret: str) -> None:
        """Make a user, and with the first one the pools."""
        user = ["--uid=kvtide", "--display-name=kvtide", f"--access-key={key}", f"--secret-key={secret}"]
        _run([*self._program("radosgw-admin"), "user", "create", *user])

    def _said(self, *words: str) -> str:
        """What the monitor answers; nothing when it does not."""
        asked = [*self._program("ceph"), "--connect-timeout", "5", *words]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=START_S)
        return done.stdout if done.returncode == 0 else ""

    def _program(self, name: str) -> list[str]:
        return [name, "-c", str(self._conf)]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: ends with {done.returncode}: {done.stderr[-400:]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
