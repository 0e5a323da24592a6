"""The process that holds Mooncake's client, one for each rank; run as a program by ``mooncake_client``.

A process of its own, for what the library does to the one it is loaded into: connecting and closing hold the
interpreter's lock for seconds, a call at the wrong moment ends the process, and its data port is open on
every interface and asks nobody who he is. Here there is nothing to be had but the staging buffer.

Knows keys, offsets into the buffer it shares with its parent, and the library's calls. Ends when its parent
does. Needs nothing of kvtide, so that it starts quickly.
"""

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from typing import Any

OPERATIONS = ("exist", "get", "put", "remove", "expel")
MESSAGE_BYTES = 1 << 17
"""No request or answer is longer; ``mooncake_client`` sees to it."""

INVALID_PARAMS = -600
OBJECT_ALREADY_EXISTS = -705
HINT = "see that mooncake_master runs, and that tiers.options.master is its host:port"

CLOSE_LIMIT_S = 5
"""After which a process that cannot say goodbye ends without."""


def host_towards(master: str) -> str:
    """Find the address of this machine from which the master is reached; sends nothing."""
    host, _, port = master.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class Store:
    """The library's client, with the shared memory registered.

    Args:
        settings: Of ``mooncake_client``.

    Raises:
        RuntimeError: It cannot be set up; says why.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise RuntimeError(
                f"its library cannot be loaded: {error}; it needs libibverbs (Debian: libibverbs1)"
            ) from None
        self._library: Any = MooncakeDistributedStore()
        self._is_known = bool(settings["segment"]) or settings["metadata"] != "P2PHANDSHAKE"
        code = self._library.setup(
            settings["local_hostname"] or host_towards(settings["master"]),
            settings["metadata"],
            settings["segment"],
            0,  # of memory of its own for calls that we do not make
            settings["protocol"],
            settings["device"],
            settings["master"],
        )
        if code:
            hint = (
                HINT if settings["protocol"] == "tcp" else f"{HINT}, and tiers.options.device one of its own"
            )
            raise RuntimeError(f"setup ends with code {code}; {hint}")
        self._memory = mmap.mmap(settings["memory_fd"], settings["memory_bytes"])
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if code := self._library.register_buffer(self._address, settings["memory_bytes"]):
            raise RuntimeError(f"the staging buffer cannot be registered: code {code}")

    def answer(self, request: dict[str, Any]) -> list[int]:
        """Make the call that a request asks for; for each key the number that it ended with.

        A put of what is there ends with ``OBJECT_ALREADY_EXISTS``, a get with the bytes of the whole object,
        also when these are more than there is room for.
        """
        keys, places = request["keys"], [self._address + offset for offset in request.get("offsets", ())]
        match request["operation"]:
            case "exist":
                return list(self._library.batch_is_exist(keys))
            case "get":
                return self._got(keys, places, request["record_bytes"])
            case "put":
                return self._put(keys, places, request["record_bytes"])
            case "remove":
                return list(self._library.batch_remove(keys, False))
            case "expel":
                # Lease or not: whoever reads it meanwhile may find another object's bytes.
                return list(self._library.batch_remove(keys, True))
        raise ValueError(request["operation"])

    def _got(self, keys: list[str], places: list[int], record_bytes: int) -> list[int]:
        ends = list(self._library.batch_get_into(keys, places, [record_bytes] * len(keys)))
        for index, end in enumerate(ends):
            if end == INVALID_PARAMS and (size := self._library.get_size(keys[index])) > record_bytes:
                ends[index] = size
        return ends

    def _put(self, keys: list[str], places: list[int], record_bytes: int) -> list[int]:
        """Put what is not there: the library says OK, too, to a put that it left undone."""
        ends = list(self._library.batch_is_exist(keys))
        missing = [index for index, end in enumerate(ends) if end == 0]
        for index, end in enumerate(ends):
            ends[index] = OBJECT_ALREADY_EXISTS if end > 0 else end
        if missing:
            made = self._library.batch_put_from(
                [keys[index] for index in missing],
                [places[index] for index in missing],
                [record_bytes] * len(missing),
            )
            for index, end in zip(missing, made, strict=True):
                ends[index] = end
        return ends

    def close(self) -> None:
        """Take leave, a second's work, of whoever knows of memory here; no call is under way."""
        self._library.unregister_buffer(self._address)
        if self._is_known:
            self._library.close()


def serve(store: Store, channel: socket.socket) -> None:
    """Answer the requests of one channel, one after the other, until its other end is closed."""
    while request := channel.recv(MESSAGE_BYTES):
        answer: list[int] | str
        try:
            answer = store.answer(json.loads(request))
        except Exception as error:  # told to the parent, which knows what to do
            answer = f"{type(error).__name__}: {error}"
        try:
            channel.send(json.dumps(answer).encode())
        except OSError:
            return


def main() -> None:
    """Serve until the parent closes its end of the control socket, or has died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold KV cache
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control_fd"])
    channels = [socket.socket(fileno=fd) for fd in settings["channel_fds"]]
    try:
        store = Store(settings)
    except (RuntimeError, OSError) as error:
        control.send(json.dumps(str(error)).encode())
        os._exit(1)  # the library's threads are not waited for
    threads = [
        threading.Thread(target=serve, args=(store, channel), daemon=True, name=f"channel-{index}")
        for index, channel in enumerate(channels)
    ]
    for thread in threads:
        thread.start()
    control.send(b"null")
    control.recv(1)
    signal.alarm(CLOSE_LIMIT_S)
    for thread in threads:
        thread.join()
    store.close()
    os._exit(0)


if __name__ == "__main__":
    main()
