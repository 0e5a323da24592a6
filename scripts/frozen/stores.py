"""Stores that many servers share, as media of a trial: real servers, then stopped, killed or slow.

Knows how each is started and what is done to it. What is left of it, others see.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtide.testing.servers.slow_proxy import SlowProxy, slow_proxy

SLOW_S = 0.2
SERVERS_NICE = 15
MEMORY = "1gb"
BUCKET, KEY_VARIABLE, SECRET_VARIABLE = "records", "FROZEN_TRIAL_KEY", "FROZEN_TRIAL_SECRET"
CLUSTER_NODES, CLUSTER_KILLED = 5, 2
"""With half of its nodes gone or more, what is left of a cluster thinks it is cut off, and refuses all."""


def _nothing() -> None:
    pass


def _stand_back(process_id: int) -> None:
    """Let a server compute when nobody else does: elsewhere it has a machine of its own."""
    os.setpriority(os.PRIO_PROCESS, process_id, SERVERS_NICE)


@dataclass
class Store:
    """One of them; see ``Medium``.

    Attributes:
        name: For people.
        tier: The class of kvtide's tier on it, and its name.
        options: Of the tier.
        stop: Does to it what its kind says.
        go_on: Undoes it, where that can be.
        running: What ends its processes.
        held: Counts calls that were held back.
    """

    name: str
    tier: str
    options: Mapping[str, Any]
    stop: Callable[[], object]
    running: ExitStack
    go_on: Callable[[], object] = _nothing
    held: Callable[[], int] = field(default=lambda: 0)

    def settings(self) -> Mapping[str, Any]:
        return {"tiers": [{"class": self.tier, "name": self.tier, "options": dict(self.options)}]}

    def freeze(self, process_id: int) -> None:
        self.stop()

    def thaw(self) -> None:
        self.go_on()

    def close(self) -> None:
        with self.running:
            self.thaw()

    def held_count(self) -> int:
        return self.held()


def _slowed(name: str, tier: str, options: Mapping[str, Any], proxy: SlowProxy, running: ExitStack) -> Store:
    """A store behind a proxy."""
    _stand_back(proxy.pid)

    def stop() -> None:
        proxy.hold(SLOW_S)

    def go_on() -> None:
        proxy.hold(0)

    return Store(
        f"{name}, each round trip {SLOW_S * 1e3:.0f} ms longer",
        tier,
        options,
        stop,
        running,
        go_on,
        lambda: proxy.hold(SLOW_S),
    )


# -- Valkey and Redis -------------------------------------------------------------------------------


def valkey_frozen(folder: Path) -> Store:
    """One server that is stopped: connections stay, and nothing is answered."""
    from kvtide.testing.servers.valkey import redis_server

    with ExitStack() as stack:
        server = stack.enter_context(redis_server(folder / "valkey", *_limits()))
        return Store(
            "redis-server, stopped (SIGSTOP)",
            "valkey",
            {"url": server.url},
            server.freeze,
            stack.pop_all(),
            server.thaw,
        )


def valkey_slow(folder: Path) -> Store:
    """One server at the end of a long way."""
    from kvtide.testing.servers.valkey import redis_server

    with ExitStack() as stack:
        server = stack.enter_context(redis_server(folder / "valkey", *_limits()))
        proxy = stack.enter_context(slow_proxy(server.port))
        options = {"url": f"redis://127.0.0.1:{proxy.port}"}
        return _slowed("redis-server", "valkey", options, proxy, stack.pop_all())


def valkey_half(folder: Path) -> Store:
    """A cluster of which a part is killed: their ports refuse, the others go on."""
    return _part_of_cluster(folder, f"{CLUSTER_KILLED} of {CLUSTER_NODES} nodes killed", killed=True)


def valkey_half_frozen(folder: Path) -> Store:
    """A cluster of which a part is stopped: they take connections and do not answer, the others go on."""
    return _part_of_cluster(
        folder, f"{CLUSTER_KILLED} of {CLUSTER_NODES} nodes stopped (SIGSTOP)", killed=False
    )


def _part_of_cluster(folder: Path, what: str, killed: bool) -> Store:
    from kvtide.testing.servers.valkey import cluster

    with ExitStack() as stack:
        nodes = stack.enter_context(cluster(folder / "valkey", CLUSTER_NODES))
        # Not the one that the settings name.
        victims = nodes[-CLUSTER_KILLED:]

        def stop() -> None:
            for node in victims:
                if killed:
                    node.kill()
                else:
                    node.freeze()

        def go_on() -> None:
            for node in victims:
                node.thaw()

        options = {"url": nodes[0].url, "cluster": True}
        return Store(f"redis-server cluster, {what}", "valkey", options, stop, stack.pop_all(), go_on)


def _limits() -> tuple[str, ...]:
    return ("--maxmemory", MEMORY, "--maxmemory-policy", "allkeys-lru")


# -- a shared file system ---------------------------------------------------------------------------


def directory_frozen(folder: Path) -> Store:
    """A mount whose process is stopped: every call on it waits."""
    from kvtide.testing.servers.juicefs import juicefs_volume

    (folder / "volume").mkdir()
    with ExitStack() as stack:
        volume = stack.enter_context(juicefs_volume(folder / "volume"))
        mount = stack.enter_context(volume.mounted(folder / "mount"))
        return Store(
            "JuiceFS, its mount stopped (SIGSTOP)",
            "directory",
            {"path": str(mount.path.resolve() / "records")},
            mount.freeze,
            stack.pop_all(),
            mount.thaw,
        )


# -- objects ----------------------------------------------------------------------------------------


def objects_frozen(folder: Path) -> Store:
    """An object store that is stopped."""
    from kvtide.testing.servers.s3 import moto_server

    with ExitStack() as stack:
        server = stack.enter_context(moto_server(folder / "moto", BUCKET))
        _stand_back(server.pid)
        options = _bucket(server, server.endpoint, stack)
        return Store(
            "moto (S3), stopped (SIGSTOP)", "objects", options, server.freeze, stack.pop_all(), server.thaw
        )


def objects_slow(folder: Path) -> Store:
    """An object store at the end of a long way."""
    from kvtide.testing.servers.s3 import moto_server

    with ExitStack() as stack:
        server = stack.enter_context(moto_server(folder / "moto", BUCKET))
        _stand_back(server.pid)
        proxy = stack.enter_context(slow_proxy(int(server.endpoint.rpartition(":")[2])))
        options = _bucket(server, f"http://127.0.0.1:{proxy.port}", stack)
        return _slowed("moto (S3)", "objects", options, proxy, stack.pop_all())


def _bucket(server: Any, endpoint: str, stack: ExitStack) -> Mapping[str, Any]:
    """Say how the tier finds it; what it needs to get in is in the environment of the engines meanwhile."""
    for name, value in ((KEY_VARIABLE, server.access_key_id), (SECRET_VARIABLE, server.secret_access_key)):
        os.environ[name] = value
        stack.callback(os.environ.pop, name, None)
    return {
        "url": f"s3://{BUCKET}/kv",
        "endpoint": endpoint,
        "region": "us-east-1",
        "allow_http": True,
        "access_key_id_env": KEY_VARIABLE,
        "secret_access_key_env": SECRET_VARIABLE,
    }


# -- Mooncake ---------------------------------------------------------------------------------------


def mooncake_master_killed(folder: Path) -> Store:
    """A Mooncake store without its master: the memory is there, and nobody knows what is in it."""
    from kvtide.testing.servers.mooncake import mooncake_store

    with ExitStack() as stack:
        store = stack.enter_context(mooncake_store(memory_bytes=1 << 30))
        return Store(
            "Mooncake store, its master killed",
            "mooncake",
            {"master": store.address, "local_hostname": "127.0.0.1"},
            store.master.kill,
            stack.pop_all(),
        )
