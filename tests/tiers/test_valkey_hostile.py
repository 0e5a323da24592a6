"""The valkey tier before servers that are none, or mean no good: it says what is wrong, and no secret."""

import logging
import socket
import threading
import traceback
from collections.abc import Callable, Iterator

import pytest

from kvtide.errors import CorruptRecordError, TierError, TierFullError, TierUnavailableError
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers import valkey_nodes
from kvtide.tiers.base import TierPlace
from kvtide.tiers.valkey import ValkeyTier
from kvtide.tiers.valkey_facts import line_of

SECRET = "correct horse"
PATIENCE_S = 20.0


class Impostor:
    """A server that answers each piece that it hears as a function says; None ends the connection."""

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        self._answer = answer
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.heard: list[bytes] = []
        self._guests: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._let_in)]
        self._threads[0].start()

    def _let_in(self) -> None:
        while True:
            try:
                guest, _ = self._door.accept()
            except OSError:
                return
            self._guests.append(guest)
            self._threads.append(threading.Thread(target=self._talk, args=(guest,)))
            self._threads[-1].start()

    def _talk(self, guest: socket.socket) -> None:
        with guest:
            try:
                while piece := guest.recv(1 << 16):
                    self.heard.append(piece)
                    answer = self._answer(piece)
                    if answer is None:
                        return
                    guest.sendall(answer)
            except OSError:
                return

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in list(self._threads):
            thread.join(PATIENCE_S)


Serving = Callable[..., ValkeyTier]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """Make a tier before an impostor that answers as a function says."""
    monkeypatch.setenv("STORE_PASSWORD", SECRET)
    open_things: list[ValkeyTier | Impostor] = []

    def serve(answer: Callable[[bytes], bytes | None], **options: object) -> ValkeyTier:
        impostor = Impostor(answer)
        url = f"redis://127.0.0.1:{impostor.port}"
        tier = ValkeyTier.build(TierPlace(IDENTITY, 0, 0, {"url": url, **options}))
        open_things.extend([impostor, tier])
        return tier

    yield serve
    for each in reversed(open_things):
        each.close()


def read(tier: ValkeyTier, number: int, deadline_s: float = PATIENCE_S) -> bytearray | None:
    payload = bytearray(PAYLOAD_BYTES)
    return payload if tier.read_into(name_of(number).key, memoryview(payload), deadline_s) else None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda heard: b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not answer as a Valkey or Redis server"),
        (lambda heard: b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer as a Valkey or Redis server"),
        (lambda heard: b":1\r\n", "does not answer as a Valkey or Redis server"),
        (lambda heard: None, "has closed the connection"),
        (lambda heard: b"-WRONGPASS invalid username-password pair\r\n", "does not accept the password"),
        (lambda heard: b"-NOAUTH Authentication required.\r\n", "password_env or password_file"),
        (
            lambda heard: (
                b"-ERR unknown command 'AUTH', with args beginning with: '" + SECRET.encode() + b"'\r\n"
            ),
            "if it has no password, leave out",
        ),
        (lambda heard: b"-" + SECRET.encode() + b"\r\n", "does not accept AUTH"),
    ],
    ids=["web", "ssh", "number", "ends", "wrong password", "no password", "echo", "echo as a code"],
)
def test_what_cannot_be_opened_says_why_and_no_secret(
    serving: Serving, answer: Callable[[bytes], bytes | None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tier = serving(answer, password_env="STORE_PASSWORD", username="me")
    for call in (tier.open, lambda: tier.ping(PATIENCE_S)):
        with pytest.raises(TierUnavailableError) as caught:
            call()
        assert said in str(caught.value)
        shown = (
            "".join(traceback.format_exception(caught.value)) + caplog.text + repr(tier) + repr(tier.nodes)
        )
        assert SECRET not in shown
        assert "127.0.0.1:" in str(caught.value)


def test_who_says_nothing_is_given_up_on(serving: Serving) -> None:
    tier = serving(lambda heard: b"")
    with pytest.raises(TierUnavailableError, match="did not answer in time"):
        tier.ping(0.3)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    tier = ValkeyTier.build(TierPlace(IDENTITY, 0, 0, {"url": f"redis://127.0.0.1:{port}"}))
    with pytest.raises(TierUnavailableError, match=r"refuses connections.*tiers\.options\.url"):
        tier.open()
    tier.close()
    tier = ValkeyTier.build(TierPlace(IDENTITY, 0, 0, {"url": "unix:///no/such/socket"}))
    with pytest.raises(TierUnavailableError, match=r"/no/such/socket is not there"):
        tier.open()
    tier.close()


def test_a_host_that_nobody_knows_is_named() -> None:
    tier = ValkeyTier.build(TierPlace(IDENTITY, 0, 0, {"url": "redis://no-such-host.invalid"}))
    with pytest.raises(TierUnavailableError, match=r"no-such-host\.invalid:6379 .*tiers\.options\.url"):
        tier.open()
    tier.close()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_nodes, "PATIENCE_S", PATIENCE_S)  # one time-out says nothing yet
    right = threading.Event()

    def answer(heard: bytes) -> bytes:
        # The first question is answered when its time is over, with a record; the second at once, with none.
        if not right.is_set():
            right.wait(PATIENCE_S)
            return b"$%d\r\n" % (256 + PAYLOAD_BYTES) + bytes(256 + PAYLOAD_BYTES) + b"\r\n"
        return b"$-1\r\n"

    tier = serving(answer)
    with pytest.raises(TierUnavailableError):
        read(tier, 1, 0.5)
    right.set()
    assert read(tier, 2) is None
    assert tier.nodes[0].connection_count == 2


def test_a_value_that_is_too_long_to_be_waited_for_ends_its_connection(serving: Serving) -> None:
    def answer(heard: bytes) -> bytes:
        if b"UNLINK" in heard:
            return b":1\r\n"
        gets.append(heard)
        return b"$536870912\r\n" if len(gets) == 1 else b"$-1\r\n"

    gets: list[bytes] = []
    tier = serving(answer)
    with pytest.raises(CorruptRecordError, match="another length"):
        read(tier, 1)
    assert read(tier, 2) is None
    assert tier.nodes[0].connection_count == 2
    assert tier.nodes[0].trouble_count == 0


def test_bytes_that_nobody_asked_for_are_not_taken_for_an_answer(serving: Serving) -> None:
    sent = threading.Event()

    def answer(heard: bytes) -> bytes:
        if b"EXISTS" in heard and not sent.is_set():
            sent.set()
            return b":0\r\n:1\r\n"  # one answer too many
        return b":0\r\n"

    tier = serving(answer)
    assert tier.contains([name_of(1).key], PATIENCE_S) == [False]
    assert tier.contains([name_of(2).key], PATIENCE_S) == [False]
    assert tier.nodes[0].connection_count == 2


@pytest.mark.parametrize(
    ("refusal", "error", "said"),
    [
        (b"OOM command not allowed when used memory > 'maxmemory'.", TierFullError, "allkeys-lru"),
        (b"READONLY You can't write against a read only replica.", TierFullError, "give the primary"),
        (b"MISCONF Redis is configured to save RDB snapshots", TierFullError, "its log"),
        (b"NOREPLICAS Not enough good replicas to write.", TierFullError, "too few replicas"),
        (b"NOPERM User me has no permissions to run the 'set' command", TierFullError, "ACL"),
        (b"NOPERM No permissions to access a key", TierUnavailableError, "ACL"),
        (b"LOADING Redis is loading the dataset in memory", TierUnavailableError, "loading"),
        (b"CLUSTERDOWN The cluster is down", TierUnavailableError, "down"),
        (b"CLUSTERDOWN Hash slot not served", TierUnavailableError, "nobody has this part"),
        (b"MOVED 7 10.0.0.1:7000", TierUnavailableError, "tiers.options.cluster"),
        (b"ASK 7 10.0.0.1:7000", TierUnavailableError, "ASK"),
        (b"NOAUTH Authentication required.", TierUnavailableError, "password_env"),
        (b"ERR max number of clients reached", TierUnavailableError, "ERR"),
        (b"\x1b[31mred", TierUnavailableError, "refuses with ERR"),
    ],
)
def test_refusals_have_their_meaning(
    serving: Serving, refusal: bytes, error: type[TierError], said: str
) -> None:
    tier = serving(lambda heard: b"-" + refusal + b"\r\n")
    with pytest.raises(error, match=said):
        tier.write(name_of(1), memoryview(payload_of(1)), PATIENCE_S)


def test_who_refuses_whatever_comes_is_left_out_at_once(serving: Serving) -> None:
    questions: list[bytes] = []

    def answer(heard: bytes) -> bytes:
        questions.append(heard)
        return b"-LOADING Redis is loading the dataset in memory\r\n"

    tier = serving(answer)
    for _ in range(20):
        with pytest.raises(TierUnavailableError, match="loading"):
            read(tier, 1)
    assert len(questions) < 20
    assert tier.nodes[0].is_out()


def test_what_refuses_one_thing_is_not_left_out_for_it(serving: Serving) -> None:
    tier = serving(lambda heard: b"-WRONGTYPE Operation against a key\r\n" if b"GET" in heard else b":1\r\n")
    for _ in range(5):
        with pytest.raises(CorruptRecordError, match="something else"):
            read(tier, 1)
    assert not tier.nodes[0].is_out()


def test_a_cluster_that_sends_in_circles_is_followed_once(serving: Serving) -> None:
    port: list[int] = []
    questions: list[bytes] = []

    def answer(heard: bytes) -> bytes:
        if b"SLOTS" in heard:
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port[0]
        questions.append(heard)
        return b"-MOVED 1 127.0.0.1:%d\r\n" % port[0]

    tier = serving(answer, cluster=True)
    port.append(int(repr(tier).rpartition(":")[2][:-1]))
    tier.open()
    with pytest.raises(TierUnavailableError, match="moving"):
        read(tier, 1)
    assert len(questions) == 2


def test_a_node_is_not_taken_from_a_refusal(serving: Serving) -> None:
    visited = threading.Event()

    def trap(heard: bytes) -> bytes:
        visited.set()
        return b"+OK\r\n"

    bait = Impostor(trap)
    port: list[int] = []

    def answer(heard: bytes) -> bytes:
        if b"SLOTS" in heard:
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%d\r\n" % port[0]
        return b"+OK\r\n" if b"AUTH" in heard else b"-ASK 1 127.0.0.1:%d\r\n" % bait.port

    tier = serving(answer, cluster=True, password_env="STORE_PASSWORD")
    port.append(int(repr(tier).rpartition(":")[2][:-1]))
    tier.open()
    with pytest.raises(TierUnavailableError):
        read(tier, 1)
    bait.close()
    assert not visited.is_set()


def test_what_servers_say_of_themselves_is_shown_in_one_form() -> None:
    full = {
        "redis_version": "7.2.4",
        "server_name": "valkey",
        "valkey_version": "8.1.4",
        "used_memory": str(12 << 30),
        "maxmemory": str(64 << 30),
        "maxmemory_policy": "allkeys-lru",
    }
    assert line_of([full], "a:1", False) == (
        "Valkey 8.1.4 at a:1, 12.0 GiB of 64.0 GiB used, maxmemory-policy allkeys-lru"
    )
    fixed = {**full, "maxmemory_policy": "noeviction"}
    assert line_of([full, fixed], "a:1", True) == (
        "Valkey 8.1.4 at a:1, 2 nodes, 24.0 GiB of 128.0 GiB used, maxmemory-policy noeviction"
        " (set allkeys-lru: else it refuses writes once it is full)"
    )
    forged = {"redis_version": "\x1b[2J", "used_memory": "9" * 5000, "maxmemory_policy": "\x1b]0;x\x07"}
    assert line_of([forged], "a:1", False) == (
        "Redis ? at a:1, 0.0 MiB used, no maxmemory (set one: it takes all there is)"
    )
    assert line_of([{}], "a:1", False).startswith("Redis ? at a:1")
    assert "a replica" in line_of([{**full, "role": "slave"}], "a:1", False)
