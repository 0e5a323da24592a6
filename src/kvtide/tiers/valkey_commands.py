"""The few commands with which records are kept in a Valkey or Redis server, on one connection.

Each function talks about several keys in one go: first all the questions, then all the answers. Answers are
put down as they come, so that those that came before a connection broke are not lost. Knows how a record lies
in a string, header first; does not know nodes, or whether a record is the right one.
"""

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtide.tiers.base import Written
from kvtide.tiers.records import HEADER_BYTES
from kvtide.tiers.valkey_wire import BrokenWireError, Deadline, Refusal, Wire, command

DRAINED_BYTES = 4 << 20
"""Up to so long a value that is not what it should be is received and dropped; beyond, the connection is."""

ASKED_FIRST_BYTES = 32 << 10
"""From here on it is asked whether a record is there before it is sent: an answer costs less than a copy."""


class Found(Enum):
    """What lay under a key."""

    RECORD = auto()
    NOTHING = auto()
    OTHER_LENGTH = auto()


@dataclass(slots=True)
class Taken:
    """A record that is to be received: ``uint8[HEADER_BYTES]`` and ``uint8[n]``."""

    key: bytes
    header: memoryview
    payload: memoryview


@dataclass(slots=True)
class Given:
    """A record that is to be sent: ``uint8[n]``, and what makes its header, ``bytes[HEADER_BYTES]``."""

    key: bytes
    header: Callable[[], bytes]
    payload: memoryview


def get(
    wire: Wire, records: Sequence[Taken], found: MutableSequence[Found | Refusal | None], deadline: Deadline
) -> None:
    """Receive records straight into their places.

    Args:
        wire: To the node that has them.
        records: The places.
        found: As many; what is None at the end was not asked, since the connection is spent.
        deadline: For all of them.

    Raises:
        BrokenWireError: What came is no answer.
        OSError: It broke, or (``TimeoutError``) the deadline has passed.
    """
    wire.send([b"".join(command(b"GET", record.key) for record in records)], deadline)
    for index, record in enumerate(records):
        found[index] = _received(wire, record, deadline)
        if wire.spent:
            return


def _received(wire: Wire, record: Taken, deadline: Deadline) -> Found | Refusal:
    length = wire.string_bytes(deadline)
    if isinstance(length, Refusal):
        return length
    if length is None:
        return Found.NOTHING
    if length != HEADER_BYTES + record.payload.nbytes:
        if length > DRAINED_BYTES:
            wire.spent = True
            return Found.OTHER_LENGTH
        wire.skip(length, deadline)
        wire.end_string(deadline)
        return Found.OTHER_LENGTH
    wire.receive(record.header, deadline)
    wire.receive(record.payload, deadline)
    wire.end_string(deadline)
    return Found.RECORD


def put(
    wire: Wire,
    records: Sequence[Given],
    ttl_s: int,
    written: MutableSequence[Written | Refusal | None],
    deadline: Deadline,
) -> None:
    """Send records that are not there yet.

    Args:
        wire: To the node that keeps them.
        records: What is to be kept.
        ttl_s: After which they expire; 0: never.
        written: As many.
        deadline: For all of them.

    Raises:
        BrokenWireError: What came is no answer.
        OSError: It broke, or (``TimeoutError``) the deadline has passed.
    """
    large = [at for at, record in enumerate(records) if record.payload.nbytes >= ASKED_FIRST_BYTES]
    if large:
        wire.send([b"".join(command(b"EXISTS", records[at].key) for at in large)], deadline)
    headers = [record.header() for record in records]  # checksums, while the server looks
    if large:
        here: list[int | Refusal | None] = [None] * len(large)
        _counts(wire, here, deadline)
        for at, is_here in zip(large, here, strict=True):
            if isinstance(is_here, Refusal):
                written[at] = is_here
            elif is_here:
                written[at] = Written.THERE_ALREADY
    wanted = [at for at in range(len(records)) if written[at] is None]
    parts = [part for at in wanted for part in _set_command(records[at], headers[at], ttl_s)]
    if parts:
        wire.send(parts, deadline)
    for at in wanted:
        answer = wire.answer(deadline)
        if answer == "OK":
            written[at] = Written.NEW
        elif answer is None:
            written[at] = Written.THERE_ALREADY
        elif isinstance(answer, Refusal):
            written[at] = answer
        else:
            raise BrokenWireError("answers a SET with something else")


def _set_command(record: Given, header: bytes, ttl_s: int) -> list[bytes | memoryview]:
    """Write ``SET key value NX`` down around a payload, which is not copied."""
    value_bytes = len(header) + record.payload.nbytes
    options = [b"NX", b"EX", b"%d" % ttl_s] if ttl_s else [b"NX"]
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
        3 + len(options),
        len(record.key),
        record.key,
        value_bytes,
        header,
    )
    tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in options)
    return [head, record.payload, tail]


def count(
    wire: Wire,
    word: bytes,
    keys: Sequence[bytes],
    counts: MutableSequence[int | Refusal | None],
    deadline: Deadline,
) -> None:
    """Ask ``EXISTS`` or ``UNLINK`` of each key by itself: of how many it is true, 0 or 1.

    Args:
        wire: To the node that has them.
        word: The command.
        keys: Of records.
        counts: As many.
        deadline: For all of them.

    Raises:
        BrokenWireError: What came is no answer.
        OSError: It broke, or (``TimeoutError``) the deadline has passed.
    """
    wire.send([b"".join(command(word, key) for key in keys)], deadline)
    _counts(wire, counts, deadline)


def _counts(wire: Wire, counts: MutableSequence[int | Refusal | None], deadline: Deadline) -> None:
    for index in range(len(counts)):
        answer = wire.answer(deadline)
        if not isinstance(answer, int | Refusal):
            raise BrokenWireError("answers with something else than a number")
        counts[index] = answer
