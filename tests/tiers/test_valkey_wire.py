"""The Redis protocol on one connection, against a peer that answers what it likes."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.tiers.base import Written
from kvtide.tiers.records import HEADER_BYTES
from kvtide.tiers.valkey_commands import Found, Given, Taken, count, get, put
from kvtide.tiers.valkey_options import Address
from kvtide.tiers.valkey_routes import slot_of, slot_ranges
from kvtide.tiers.valkey_wire import BrokenWireError, Deadline, Refusal, Wire, command

PAYLOAD_BYTES = 5000
RECORD_BYTES = HEADER_BYTES + PAYLOAD_BYTES


class Peer:
    """The other end: has said what it will say before it is asked, and keeps what it hears."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self.wire = Wire(ours, ours.close)
        self.heard = bytearray()
        self._threads: list[threading.Thread] = []

    def says(self, text: bytes, then_ends: bool = True) -> Wire:
        self._run(lambda: self._say(text, then_ends))
        return self.wire

    def listens(self) -> None:
        self._run(self._listen)

    def _say(self, text: bytes, then_ends: bool) -> None:
        try:
            self._theirs.sendall(text)
        except OSError:
            return  # nobody wanted to hear the rest
        if then_ends:
            self._theirs.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        while piece := self._theirs.recv(1 << 16):
            self.heard += piece

    def _run(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def close(self) -> None:
        self.wire.close()
        for thread in self._threads:
            thread.join()
        self._theirs.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def soon() -> Deadline:
    return Deadline.after(20.0)


def places(number: int = 1) -> list[Taken]:
    return [
        Taken(b"key-%d" % at, memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(PAYLOAD_BYTES)))
        for at in range(number)
    ]


def asked(wire: Wire, taken: list[Taken]) -> list[Found | Refusal | None]:
    found: list[Found | Refusal | None] = [None] * len(taken)
    get(wire, taken, found, soon())
    return found


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


# -- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (b"+OK\r\n", "OK"),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$4\r\na\r\nb\r\n", b"a\r\nb"),
        (b"*3\r\n:1\r\n$1\r\nx\r\n*1\r\n+y\r\n", [1, b"x", ["y"]]),
        (b"-OOM command not allowed\r\n", Refusal("OOM", "command not allowed")),
        (b"-hunter2 is unknown\r\n", Refusal("ERR", "is unknown")),
        (b"-\r\n", Refusal("ERR", "")),
    ],
)
def test_answers_are_understood(peer: Peer, said: bytes, meant: object) -> None:
    assert peer.says(said).answer(soon()) == meant


@given(cut=st.integers(1, 60))
def test_answers_may_come_in_pieces(cut: int) -> None:
    peer = Peer()
    text = b"*4\r\n:17\r\n$20\r\n" + bytes(range(20)) + b"\r\n+status\r\n$-1\r\n"
    try:
        peer.says(text[:cut], then_ends=False)
        peer._threads[0].join()
        peer.says(text[cut:])
        assert peer.wire.answer(soon()) == [17, bytes(range(20)), "status", None]
    finally:
        peer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b":\r\n",
        b":1_0\r\n",
        b": 1\r\n",
        b":+1\r\n",
        b":" + b"9" * 30 + b"\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"$99999999999\r\n",
        b"*99999999999\r\n",
        b"*1000000\r\n",
        b"*1\r\n" * 50,
        b"*4\r\n" + b"$1048576\r\n".join([b""] * 2),
        b"$2\r\nabc\r\n",
        b"$5\r\nab",
        b"+" + b"a" * 100_000,
        b"\x00" * 100_000,
    ],
)
def test_what_is_no_answer_breaks_the_connection_and_takes_no_memory(peer: Peer, said: bytes) -> None:
    with pytest.raises(BrokenWireError):
        peer.says(said).answer(soon())


@given(said=st.binary(max_size=200))
def test_whatever_comes_is_an_answer_or_a_broken_connection(said: bytes) -> None:
    peer = Peer()
    try:
        peer.says(said)
        with contextlib.suppress(BrokenWireError):
            peer.wire.answer(soon())
    finally:
        peer.close()


def test_a_refusal_does_not_show_what_it_repeats() -> None:
    assert "hunter2" not in repr(
        Refusal("ERR", "unknown command 'AUTH', with args beginning with: 'hunter2'")
    )


# -- records ------------------------------------------------------------------------------------


def test_a_record_is_received_where_it_belongs(peer: Peer) -> None:
    taken = places(3)
    values = [bytes([at]) * HEADER_BYTES + bytes([at + 100]) * PAYLOAD_BYTES for at in range(3)]
    said = bulk(values[0]) + b"$-1\r\n" + bulk(values[2])
    assert asked(peer.says(said), taken) == [Found.RECORD, Found.NOTHING, Found.RECORD]
    for at in (0, 2):
        assert bytes(taken[at].header) + bytes(taken[at].payload) == values[at]
    assert not any(taken[1].payload)


@given(sizes=st.lists(st.integers(1, 6000), min_size=1, max_size=12))
def test_records_come_whole_in_whatever_pieces_they_come(sizes: list[int]) -> None:
    peer = Peer()
    taken = places(2)
    value = bytes(at * 7 & 255 for at in range(RECORD_BYTES))
    said = bulk(value) * 2

    def piecewise() -> None:
        cuts = [0, *itertools.accumulate(sizes), len(said)]
        for start, stop in itertools.pairwise(sorted(min(cut, len(said)) for cut in cuts)):
            if start < stop:
                peer._theirs.sendall(said[start:stop])

    try:
        peer._run(piecewise)
        assert asked(peer.wire, taken) == [Found.RECORD] * 2
        for each in taken:
            assert bytes(each.header) + bytes(each.payload) == value
    finally:
        peer.close()


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES, RECORD_BYTES - 1, RECORD_BYTES + 1, 1 << 20])
def test_nothing_of_a_value_of_another_length_reaches_the_slot(peer: Peer, length: int) -> None:
    taken = places(2)
    said = bulk(b"\xff" * length) + bulk(b"\x01" * RECORD_BYTES)
    assert asked(peer.says(said), taken) == [Found.OTHER_LENGTH, Found.RECORD]
    assert not any(taken[0].payload)
    assert not peer.wire.spent


def test_a_value_too_long_to_be_waited_for_ends_the_connection_and_what_was_not_asked_is_said(
    peer: Peer,
) -> None:
    taken = places(3)
    said = bulk(b"\x01" * RECORD_BYTES) + b"$536870912\r\nand so on"
    assert asked(peer.says(said), taken) == [Found.RECORD, Found.OTHER_LENGTH, None]
    assert peer.wire.spent
    assert not any(taken[1].payload)


@pytest.mark.parametrize(
    "said",
    [
        b":5\r\n",
        b"+OK\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$%d\r\n" % RECORD_BYTES + b"x" * 100,
        b"$%d\r\n" % RECORD_BYTES + b"x" * RECORD_BYTES,
        b"$%d\r\n" % RECORD_BYTES + b"x" * (RECORD_BYTES + 1) + b"\r\n",
    ],
)
def test_what_is_no_string_or_ends_early_breaks_the_connection(peer: Peer, said: bytes) -> None:
    with pytest.raises(BrokenWireError):
        asked(peer.says(said), places())


def test_answers_before_a_broken_one_are_kept(peer: Peer) -> None:
    found: list[Found | Refusal | None] = [None] * 3
    said = b"-WRONGTYPE Operation\r\n" + bulk(b"\x01" * RECORD_BYTES) + b"$!\r\n"
    with pytest.raises(BrokenWireError):
        get(peer.says(said), places(3), found, soon())
    assert found == [Refusal("WRONGTYPE", "Operation"), Found.RECORD, None]


# -- what is said -------------------------------------------------------------------------------


def header_of(number: int) -> bytes:
    return bytes([number]) * HEADER_BYTES


def given_records(number: int, payload_bytes: int) -> list[Given]:
    return [
        Given(b"key-%d" % at, partial(header_of, at), memoryview(bytearray([at + 65]) * payload_bytes))
        for at in range(number)
    ]


@pytest.mark.parametrize("ttl_s", [0, 60])
def test_small_records_are_sent_at_once_and_only_if_nothing_is_there(peer: Peer, ttl_s: int) -> None:
    peer.listens()
    written: list[Written | Refusal | None] = [None] * 3
    put(peer.says(b"+OK\r\n$-1\r\n-OOM full\r\n", False), given_records(3, 100), ttl_s, written, soon())
    assert written == [Written.NEW, Written.THERE_ALREADY, Refusal("OOM", "full")]
    expiry = [b"EX", b"60"] if ttl_s else []
    wanted = b"".join(
        command(b"SET", each.key, each.header() + bytes(each.payload), b"NX", *expiry)
        for each in given_records(3, 100)
    )
    peer.close()
    assert bytes(peer.heard) == wanted


def test_a_large_record_is_sent_only_when_it_is_not_there(peer: Peer) -> None:
    peer.listens()
    records = given_records(3, 100_000)
    written: list[Written | Refusal | None] = [None] * 3
    put(peer.says(b":1\r\n:0\r\n-LOADING\r\n+OK\r\n", False), records, 0, written, soon())
    assert written == [Written.THERE_ALREADY, Written.NEW, Refusal("LOADING", "")]
    peer.close()
    exists = b"".join(command(b"EXISTS", each.key) for each in records)
    value = records[1].header() + bytes(records[1].payload)
    assert bytes(peer.heard) == exists + command(b"SET", records[1].key, value, b"NX")


@pytest.mark.parametrize("said", [b"+QUEUED\r\n", b":1\r\n", b"*0\r\n"])
def test_a_write_whose_answer_is_another_breaks_the_connection(peer: Peer, said: bytes) -> None:
    with pytest.raises(BrokenWireError):
        put(peer.says(said), given_records(1, 10), 0, [None], soon())


def test_counts_are_numbers(peer: Peer) -> None:
    counts: list[int | Refusal | None] = [None] * 3
    with pytest.raises(BrokenWireError):
        count(peer.says(b":1\r\n-MOVED 1 a:2\r\n+OK\r\n"), b"EXISTS", [b"a", b"b", b"c"], counts, soon())
    assert counts == [1, Refusal("MOVED", "1 a:2"), None]


# -- deadlines ----------------------------------------------------------------------------------


def test_who_does_not_answer_is_waited_for_until_the_deadline(peer: Peer) -> None:
    with pytest.raises(TimeoutError):
        peer.wire.answer(Deadline.after(0.05))
    with pytest.raises(TimeoutError):
        peer.wire.answer(Deadline.after(-1.0))


def test_a_trickle_does_not_stretch_the_deadline(peer: Peer) -> None:
    ended = threading.Event()

    def trickle() -> None:
        peer._theirs.sendall(b"$%d\r\n" % RECORD_BYTES)
        while not ended.wait(0.005):
            peer._theirs.sendall(b"x")

    peer._run(trickle)
    try:
        with pytest.raises(TimeoutError):
            get(peer.wire, places(), [None], Deadline.after(0.1))
    finally:
        ended.set()


def test_who_does_not_listen_is_waited_for_until_the_deadline(peer: Peer) -> None:
    with pytest.raises(TimeoutError):
        peer.wire.send([memoryview(bytes(64 << 20))], Deadline.after(0.05))


def test_time_that_is_left_is_shared() -> None:
    whole = Deadline(time.monotonic() + 100.0)
    assert 20.0 < whole.share(4).left_s() <= 25.0
    assert whole.at_most(1.0).left_s() <= 1.0
    assert Deadline.after(0.5).at_most(100.0).left_s() <= 0.5


def test_a_connection_on_which_something_waits_is_not_quiet(peer: Peer) -> None:
    assert peer.wire.is_quiet()
    peer._theirs.sendall(b"+late\r\n")
    assert not peer.wire.is_quiet()
    assert peer.wire.answer(soon()) == "late"
    assert peer.wire.is_quiet()
    peer._theirs.shutdown(socket.SHUT_WR)
    assert not peer.wire.is_quiet()


# -- clusters -----------------------------------------------------------------------------------


def test_slots_are_those_of_the_specification() -> None:
    assert [slot_of(key) for key in (b"123456789", b"foo", b"bar")] == [12739, 12182, 5061]


def test_who_has_which_slots_is_read() -> None:
    answer = [
        [0, 99, [b"10.0.0.1", 7000, b"id", [b"hostname", b"x"]], [b"10.0.0.2", 7001, b"id"]],
        [100, 16383, [None, 7002, b"id"]],
    ]
    assert slot_ranges(answer, Address("seed", 1)) == [
        (0, 100, Address("10.0.0.1", 7000)),
        (100, 16384, Address("seed", 7002)),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "OK",
        [1],
        [[0, 16384, [b"a", 1]]],
        [[-1, 5, [b"a", 1]]],
        [[9, 5, [b"a", 1]]],
        [[0, 5, [b"a", 65536]]],
        [[0, 5, [b"a"]]],
        [[0, 5]],
        [[0, 5, [7, 7]]],
    ],
)
def test_what_does_not_say_who_has_which_slots_breaks_the_connection(answer: object) -> None:
    with pytest.raises(BrokenWireError):
        slot_ranges(answer, Address("seed", 1))  # type: ignore[arg-type]
