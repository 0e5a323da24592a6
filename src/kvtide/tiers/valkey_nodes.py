"""One server: its connections, and whether it is left out for a while.

A connection belongs to one call at a time and goes back only when that ended well. One that failed or was too
slow is closed: an answer that comes late must never be taken for the next one's. Knows how to get in and what
went wrong, in words for people; does not know keys or which node has them.
"""

import importlib
import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtide.errors import (
    CorruptRecordError,
    NodeUnavailableError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.valkey_options import Access, Address
from kvtide.tiers.valkey_wire import BrokenWireError, Deadline, Refusal, Wire, command

logger = logging.getLogger(__name__)

CONNECT_S = 1.0
"""For a connection and everything until it can be used."""

PATIENCE_S = 0.25
"""Who did not answer for so long does not answer; less is held against it only when it comes in a row."""

TROUBLE_LIMIT = 3
REST_S = 1.0
LONGEST_REST_S = 30.0

DOOR_CODES = frozenset({"LOADING", "MASTERDOWN", "NOAUTH", "WRONGPASS", "BUSY", "CLUSTERDOWN"})
"""With these a server says that it will refuse whatever comes next, too."""

HINTS = {
    "NOAUTH": "wants a password: give tiers.options.password_env or password_file",
    "WRONGPASS": "does not accept the password: see tiers.options.username, password_env and password_file",
    "NOPERM": "lets this user do too little: its ACL needs the keys ~PREFIX*, +@read +@write +ping +info, and"
    " in a cluster +cluster|slots +asking",
    "LOADING": "is still loading its data",
    "MASTERDOWN": "is a replica whose primary is gone",
    "BUSY": "is busy with a script",
    "CLUSTERDOWN": "says that its cluster is down",
    "MOVED": "is a node of a cluster: set tiers.options.cluster to true",
    "OOM": "is full and evicts nothing: raise its maxmemory, or set its maxmemory-policy to allkeys-lru",
    "READONLY": "is a replica and takes no writes: give the primary in tiers.options.url",
    "MISCONF": "takes no writes, since it cannot save them to its disk: see its log",
    "NOREPLICAS": "takes no writes, since too few replicas follow it",
}


class Node:
    """A server with a pool of connections and a breaker.

    Args:
        address: Of it.
        access: How one gets in.
        in_cluster: Others go on when this one is out: it raises ``NodeUnavailableError``.

    Attributes:
        trouble_count: Calls that failed or were too slow, those left out not counted.
        connection_count: Of connections that were made.
    """

    def __init__(self, address: Address, access: Access, in_cluster: bool = False) -> None:
        self.address = address
        self._access = access
        self._error = NodeUnavailableError if in_cluster else TierUnavailableError
        # The lane's own breaker rests longer and longer before a tier that is a single server.
        self._breaker = Breaker(TROUBLE_LIMIT, REST_S, LONGEST_REST_S if in_cluster else REST_S)
        self._changed = threading.Condition()
        self._idle: deque[Wire] = deque()
        self._lent_count = 0
        self._closed = False
        self._trouble = ""
        self._answered = False
        self.trouble_count = self.connection_count = 0

    def __repr__(self) -> str:
        return f"<Node {self.address}>"

    def is_out(self) -> bool:
        """Whether it is left out for now, or was and has not answered since."""
        with self._changed:
            return self._breaker.state(time.monotonic()) is not BreakerState.CLOSED

    @contextmanager
    def wire(self, deadline: Deadline, anyway: bool = False) -> Iterator[Wire]:
        """Lend a connection; whatever leaves the block by an exception ends the connection.

        Args:
            deadline: For what is done with it.
            anyway: Though the node is left out.

        Raises:
            TierUnavailableError: Or ``NodeUnavailableError``, when it is one of several: out, unreachable,
                refused, out of time.
        """
        self._enter(deadline, anyway)
        wire: Wire | None = None
        began_s = time.monotonic()
        ended_well = False
        try:
            wire = self._idle_wire() or self._connected(deadline.at_most(CONNECT_S))
            yield wire
            ended_well = True
        except (OSError, BrokenWireError) as error:
            raise self._failed(error, time.monotonic() - began_s) from None
        finally:
            self._leave(wire, ended_well)

    def error_of(self, refusal: Refusal) -> TierError:
        """Say what a refusal means for the call, and note what it means for the next ones."""
        code = refusal.code
        hint = HINTS.get(code, f"refuses with {code}")
        if code == "WRONGTYPE":
            return CorruptRecordError("no record lies here, but something else")
        if code == "READONLY":  # a name that leads to another server since then leads there again
            self._forget_connections()
        # All of these close the door for writes alone; reads go on.
        if code in ("OOM", "READONLY", "MISCONF", "NOREPLICAS") or (
            code == "NOPERM" and "'set'" in refusal.text.lower()
        ):
            return TierFullError(f"{self.address} {hint}")
        if code == "CLUSTERDOWN" and "slot" in refusal.text.lower():
            return self._error(f"{self.address}: nobody has this part of the cluster")
        if code in DOOR_CODES:
            self._note(f"{self.address} {hint}", TROUBLE_LIMIT)
        return self._error(f"{self.address} {hint}")

    def close(self, wait: bool = False) -> None:
        """End its connections, those that are lent when they come back.

        Args:
            wait: For those.
        """
        with self._changed:
            self._closed = True
            if wait:
                self._changed.wait_for(lambda: not self._lent_count)
        self._forget_connections()

    # -- inside -------------------------------------------------------------------------------------

    def _forget_connections(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, deque()
        for wire in idle:
            wire.close()

    def _enter(self, deadline: Deadline, anyway: bool) -> None:
        now_s = time.monotonic()
        with self._changed:
            if now_s >= deadline.at_s:  # whoever took the time, it was not this node
                raise self._error(f"{self.address} was not asked in time")
            if self._closed:
                raise self._error(f"{self.address} is not used any more")
            if not self._breaker.allows(now_s) and not anyway:
                raise self._error(f"{self.address} is left out for a while: {self._trouble}")
            self._lent_count += 1

    def _leave(self, wire: Wire | None, ended_well: bool) -> None:
        with self._changed:
            self._lent_count -= 1
            self._changed.notify_all()
            if ended_well:
                self._answered = True
                self._breaker.succeeded()
            if wire is not None and ended_well and not wire.spent and not self._closed:
                self._idle.append(wire)
                return
        if wire is not None:
            wire.close()

    def _idle_wire(self) -> Wire | None:
        while True:
            with self._changed:
                if not self._idle:
                    return None
                wire = self._idle.pop()
            if wire.is_quiet():
                return wire
            wire.close()  # the server has ended it meanwhile

    def _connected(self, deadline: Deadline) -> Wire:
        wire = connected(self.address, self._access, deadline)
        self.connection_count += 1
        try:
            _greet(wire, self._access, deadline)
        except BaseException:  # also an interrupt: the connection would stay open
            wire.close()
            raise
        return wire

    def _failed(self, error: Exception, waited_s: float) -> TierUnavailableError:
        """Note trouble; a time-out of a very short deadline alone does not say much."""
        trouble = f"{self.address} {in_words(error)}"
        if not self._answered:
            trouble += _first_hint(error, self._access.tls)
        hasty = isinstance(error, TimeoutError) and waited_s < PATIENCE_S
        self._note(trouble, 1 if hasty else TROUBLE_LIMIT)
        return self._error(trouble)

    def _note(self, trouble: str, weight: int) -> None:
        now_s = time.monotonic()
        with self._changed:
            self.trouble_count += 1
            self._trouble = trouble
            opened = [self._breaker.failed(now_s) for _ in range(weight)]
        if any(opened):
            logger.debug("%s", trouble)


def connected(address: Address, access: Access, deadline: Deadline) -> Wire:
    """Connect, with TLS where that is asked for; nothing has been said yet.

    Raises:
        OSError: It cannot be reached, or its certificate is not accepted.
        BrokenWireError: The client has another reason.
    """
    # Untyped for the most part, and not there for who does not need it.
    client, errors, retry, backoff = (
        importlib.import_module(f"redis.{name}") for name in ("connection", "exceptions", "retry", "backoff")
    )
    left_s = deadline.left_s()
    # The greeting is ours: with the client's own, each of up to five answers would have a time-out of its
    # own, and a server that echoes an unknown AUTH would have it in the text of an exception.
    kinds: dict[str, Any] = {
        "socket_timeout": left_s,
        "socket_connect_timeout": left_s,
        "redis_connect_func": lambda connection: None,
        "retry": retry.Retry(backoff.NoBackoff(), 0),
    }
    connection: Any
    if address.path:
        connection = client.UnixDomainSocketConnection(path=address.path, **kinds)
    elif access.tls:
        connection = client.SSLConnection(
            host=address.host,
            port=address.port,
            ssl_cert_reqs="required",
            ssl_check_hostname=True,
            ssl_ca_certs=access.ca_file,
            ssl_certfile=access.cert_file,
            ssl_keyfile=access.key_file,
            **kinds,
        )
    else:
        connection = client.Connection(host=address.host, port=address.port, **kinds)
    try:
        connection.connect()
    except errors.RedisError as error:
        reason = error.__context__  # what the system has said, before the client put it in its words
        if isinstance(reason, OSError):
            raise reason from None
        raise BrokenWireError(f"cannot be connected to: {type(error).__name__}") from None
    sock = connection._sock
    if not isinstance(sock, socket.socket):
        connection.disconnect()
        raise BrokenWireError("is behind a client of an unknown kind: see which versions of redis will do")
    return Wire(sock, connection.disconnect)


def _greet(wire: Wire, access: Access, deadline: Deadline) -> None:
    """Say who we are, and choose the database."""
    words = []
    if access.username or access.password:
        secret = access.password.get_secret_value() if access.password else ""
        user = [access.username.encode()] if access.username else []
        words.append(command(b"AUTH", *user, secret.encode()))
    if access.database:
        words.append(command(b"SELECT", b"%d" % access.database))
    if not words:
        return
    wire.send(words, deadline)
    answers = [wire.answer(deadline) for _ in words]
    for word, answer in zip(words, answers, strict=True):
        if answer == "OK":
            continue
        if not isinstance(answer, Refusal):
            raise BrokenWireError("does not answer as a Valkey or Redis server does")
        if answer.code in HINTS:
            raise BrokenWireError(HINTS[answer.code])
        if b"SELECT" in word[:20]:
            raise BrokenWireError(f"has no database {access.database}: see the end of tiers.options.url")
        raise BrokenWireError(
            "does not accept AUTH: if it has no password, leave out username, password_env and password_file"
        )


def _first_hint(error: Exception, tls: bool) -> str:
    """Say what it may be when a server has never answered: one side speaks TLS and the other does not."""
    if tls and isinstance(error, TimeoutError):
        return "; if the port does not speak TLS, give redis:// in tiers.options.url"
    if not tls and isinstance(error, BrokenWireError | ConnectionResetError | BrokenPipeError):
        return "; if the port speaks TLS, give rediss:// in tiers.options.url"
    return ""


def in_words(error: Exception) -> str:
    """Say what is wrong, behind an address, and what would do; without secrets."""
    if isinstance(error, BrokenWireError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not accepted, {error.verify_message}: see tiers.options.ca_file"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or type(error).__name__
        return (
            f"has no TLS for us ({reason}): see whether the port speaks TLS (rediss://, else redis://), and"
            " tiers.options.ca_file, cert_file and key_file"
        )
    if isinstance(error, socket.gaierror):
        return "is a host that nobody knows: see tiers.options.url"
    if isinstance(error, ConnectionRefusedError):
        return "refuses connections: is the server running, and is this its port? see tiers.options.url"
    if isinstance(error, FileNotFoundError):
        return "is not there: see tiers.options.url, ca_file, cert_file and key_file"
    return (
        f"cannot be reached: {error.strerror or type(error).__name__}" if isinstance(error, OSError) else "?"
    )
