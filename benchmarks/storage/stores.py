"""The stores of ``stores``: started empty on this machine, with their own client and what a tier is told.

Knows how each is started, and why it cannot be. Does not know what is measured.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.storage.clients import Client, FolderClient, MooncakeStoreClient, ObstoreClient, RedisClient
from benchmarks.storage.store_names import (
    DIRECTORY,
    FILES,
    MOONCAKE,
    MOONCAKE_BATCHED,
    MOTO,
    RADOSGW,
    UNCACHED,
    VALKEY,
)
from kvtide.testing.servers.s3 import S3Server, missing_for_radosgw, moto_server, radosgw_server

KEY, SECRET = "KVTIDE_BENCH_KEY", "KVTIDE_BENCH_SECRET"
REQUEST_LIMIT_S = 20.0
"""A busy machine shall make a store slow, not break it."""

PATIENT = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{REQUEST_LIMIT_S:.0f}",
    "MC_TCP_STATUS_TIMEOUT_SEC": f"{REQUEST_LIMIT_S:.0f}",
}
"""The same for Mooncake."""

CLONE_NEWNET = 0x40000000
MOONCAKE_MEMORY_BYTES = 1 << 30
DIRECTORY_LIMIT_BYTES = 1 << 36


class AbsentError(Exception):
    """There is no such store here; says why."""


@dataclass(frozen=True, slots=True)
class Store:
    """A store that serves.

    Attributes:
        client: Its own.
        tier_class: As settings name it.
        options: Of the tier.
        limit_bytes: Of the tier; 0 for none.
    """

    client: Client
    tier_class: str
    options: Mapping[str, Any]
    limit_bytes: int = 0


@contextmanager
def directory(folder: Path, cached: bool = True) -> Iterator[Store]:
    """A folder in the page cache; or on the medium, which every put waits for and every get reads."""
    tier_folder = folder / "tier"
    yield Store(
        FolderClient(folder / "plain", tier_folder, cached),
        "directory",
        {"path": str(tier_folder), "fsync": not cached},
        DIRECTORY_LIMIT_BYTES,
    )


@contextmanager
def valkey(folder: Path) -> Iterator[Store]:
    """Debian's redis-server, over TCP."""
    _need("redis")
    if shutil.which("redis-server") is None:
        raise AbsentError("redis-server is not installed; run make servers")
    from kvtide.testing.servers.valkey import redis_server

    with redis_server(folder / "server") as server:
        client = RedisClient(server.url)
        try:
            yield Store(client, "valkey", {"url": server.url})
        finally:
            client.close()


@contextmanager
def radosgw(folder: Path) -> Iterator[Store]:
    """Ceph's gateway over a storage daemon that keeps objects in memory."""
    _need("obstore")
    if missing := missing_for_radosgw():
        raise AbsentError(f"{', '.join(missing)} not installed; run scripts/radosgw.sh")
    with radosgw_server(folder / "server") as server:
        yield _s3(server)


@contextmanager
def moto(folder: Path) -> Iterator[Store]:
    """An S3 server in Python."""
    _need("obstore", "moto")
    with moto_server(folder / "server") as server:
        yield _s3(server)


@contextmanager
def files(folder: Path) -> Iterator[Store]:
    """obstore's store of files."""
    _need("obstore")
    from obstore.store import LocalStore

    place = folder / "objects"
    place.mkdir(parents=True)
    yield Store(ObstoreClient(LocalStore(place)), "objects", {"url": place.as_uri()})


@contextmanager
def mooncake(folder: Path, batched: bool = False) -> Iterator[Store]:
    """A master and a storage process, with this process in a network of its own from then on."""
    from kvtide.testing.servers.mooncake import mooncake_store, why_not
    from kvtide.tiers.mooncake import RUN_BYTES
    from kvtide.tiers.mooncake_client import DEFAULT_VARIABLES

    if reason := why_not():
        raise AbsentError(reason)
    enter_own_network()
    os.environ.update(DEFAULT_VARIABLES | PATIENT)
    with mooncake_store(MOONCAKE_MEMORY_BYTES, lease_ms=int(1e3 * REQUEST_LIMIT_S)) as store:
        client = MooncakeStoreClient(store.address, RUN_BYTES if batched else 0)
        yield Store(client, "mooncake", {"master": store.address})


STORES: Mapping[str, Callable[[Path], AbstractContextManager[Store]]] = {
    DIRECTORY: directory,
    UNCACHED: partial(directory, cached=False),
    VALKEY: valkey,
    MOONCAKE: mooncake,
    MOONCAKE_BATCHED: partial(mooncake, batched=True),
    RADOSGW: radosgw,
    FILES: files,
    MOTO: moto,
}


def enter_own_network() -> None:
    """Leave the machine's network: this thread and what it starts have a loopback device, and nothing else.

    Raises:
        AbsentError: It is not allowed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(CLONE_NEWNET):
        raise AbsentError(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=REQUEST_LIMIT_S)


def _s3(server: S3Server) -> Store:
    from obstore.store import S3Store

    os.environ.update({KEY: server.access_key_id, SECRET: server.secret_access_key})
    client = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id=server.access_key_id,
        secret_access_key=server.secret_access_key,
        client_options={"allow_http": True},
    )
    options = {
        "url": f"s3://{server.bucket}",
        "endpoint": server.endpoint,
        "region": "us-east-1",
        "access_key_id_env": KEY,
        "secret_access_key_env": SECRET,
        "allow_http": True,
        "timeout_s": REQUEST_LIMIT_S,
    }
    return Store(ObstoreClient(client), "objects", options)


def _need(*modules: str) -> None:
    for module in modules:
        try:
            __import__(module)
        except ImportError:
            raise AbsentError(f"{module} is not installed; run make servers") from None
