"""One connection to a server that speaks the Redis protocol: what is sent, and answers as they come in.

Answers come from outside. No length in one is believed: what is not a payload has bounds, and a payload is
received into memory of the caller, who has held its length against what is due. Payloads are neither copied
nor joined on their way. Knows version 2 of the protocol; does not know commands, records or nodes.
"""

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

BUFFER_BYTES = 16 << 10
LINE_BYTES = 4 << 10
ANSWER_BYTES = 16 << 20
"""Of an answer that is not a record, all that is in it taken together."""
ITEM_BYTES = 64
"""What an answer within an answer takes at least."""
DEPTH = 5
NO_ANSWER = "does not answer as a Valkey or Redis server does"
PARTS_AT_ONCE = 256
"""The kernel takes no more than 1024 in one call."""


class BrokenWireError(Exception):
    """A connection of no more use: it has ended, or what came is no answer. Says why, without secrets."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, by the monotonic clock, at which to give up."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    def left_s(self) -> float:
        """Say how long there is; more than 0.

        Raises:
            TimeoutError: It is past.
        """
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("past its deadline")
        return left

    def share(self, count: int) -> "Deadline":
        """Cut what is left into ``count`` parts, and take the first."""
        now_s = time.monotonic()
        return Deadline(now_s + (self.at_s - now_s) / count)

    def at_most(self, seconds: float) -> "Deadline":
        """No later than so many seconds from now."""
        return Deadline(min(self.at_s, time.monotonic() + seconds))


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that says no.

    Attributes:
        code: Its first word: ``OOM``, ``MOVED``, ``ERR``.
        text: The rest, for deciding on. Never shown: it may repeat what was sent.
    """

    code: str
    text: str = field(default="", repr=False)


Answer = int | str | bytes | None | Refusal | list["Answer"]
"""A number, a status, a string, nothing, a refusal, or several."""


def command(*words: bytes) -> bytes:
    """Write a command down."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Wire:
    """A connection; used by one thread at a time.

    Any error but a timeout of ``Deadline`` before the first byte leaves it in the middle of something: it has
    to be closed then.

    Args:
        sock: Connected.
        close: Ends it.

    Attributes:
        spent: What comes next is not an answer: to be closed, not used again.
    """

    def __init__(self, sock: socket.socket, close: Callable[[], None]) -> None:
        self._sock = sock
        self._scatters = not isinstance(sock, ssl.SSLSocket)
        self.close = close
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of what has come and was not taken
        self.spent = False

    def is_quiet(self) -> bool:
        """Whether nothing has come that nobody asked for, its end included."""
        if self._start != self._end or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()):
            return False
        arrivals = select.poll()
        arrivals.register(self._sock, select.POLLIN)
        return not arrivals.poll(0)

    # -- sending ------------------------------------------------------------------------------------

    def send(self, parts: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        """Send ``parts``, each ``uint8[n]``, one after the other.

        Raises:
            OSError: It broke, or (``TimeoutError``) the deadline has passed.
        """
        left = [memoryview(part) for part in parts]
        first = 0
        while first < len(left):
            self._sock.settimeout(deadline.left_s())
            if self._scatters:
                sent = self._sock.sendmsg(left[first : first + PARTS_AT_ONCE])
            else:
                sent = self._sock.send(left[first])
            while first < len(left) and sent >= len(left[first]):
                sent -= len(left[first])
                first += 1
            if sent:
                left[first] = left[first][sent:]

    # -- receiving ----------------------------------------------------------------------------------

    def answer(self, deadline: Deadline) -> Answer:
        """Receive an answer that is not a record.

        Raises:
            BrokenWireError: It is none, or a longer one than any we ask for.
            OSError: It broke, or (``TimeoutError``) the deadline has passed.
        """
        return self._answer(deadline, DEPTH, [ANSWER_BYTES])

    def string_bytes(self, deadline: Deadline) -> int | Refusal | None:
        """Receive the beginning of a string: its length, None when there is none, or a refusal.

        The string has to be taken by ``receive`` or ``skip``, and then ``end_string``.

        Raises:
            BrokenWireError: It is no string.
            OSError: It broke, or (``TimeoutError``) the deadline has passed.
        """
        line = self._line(deadline)
        if line[:1] == b"-":
            return _refusal(line)
        if line[:1] != b"$":
            raise BrokenWireError("answers with something else than a string")
        return _length(line)

    def receive(self, target: memoryview, deadline: Deadline) -> None:
        """Fill ``target``, ``uint8[n]``.

        Raises:
            BrokenWireError: It has ended before.
            OSError: It broke, or (``TimeoutError``) the deadline has passed.
        """
        there = min(len(target), self._end - self._start)
        target[:there] = self._view[self._start : self._start + there]
        self._start += there
        target = target[there:]
        while len(target):
            self._start = self._end = 0
            self._sock.settimeout(deadline.left_s())
            if self._scatters:  # what is behind it comes along, and saves a call
                count = self._sock.recvmsg_into([target, self._view])[0]
            else:
                count = self._sock.recv_into(target)
            if not count:
                raise BrokenWireError("has closed the connection")
            self._end = max(0, count - len(target))
            target = target[count:]

    def skip(self, byte_count: int, deadline: Deadline) -> None:
        """Receive bytes, and drop them.

        Raises:
            BrokenWireError: It has ended before.
            OSError: It broke, or (``TimeoutError``) the deadline has passed.
        """
        while byte_count:
            if self._start == self._end:
                self._fill(deadline)
            there = min(byte_count, self._end - self._start)
            self._start += there
            byte_count -= there

    def end_string(self, deadline: Deadline) -> None:
        """Receive what stands behind a string.

        Raises:
            BrokenWireError: Something else stands there.
            OSError: It broke, or (``TimeoutError``) the deadline has passed.
        """
        if self._line(deadline):
            raise BrokenWireError("answers with a string that is longer than it says")

    # -- inside -------------------------------------------------------------------------------------

    def _answer(self, deadline: Deadline, depth: int, bytes_left: list[int]) -> Answer:
        line = self._line(deadline)
        kind = line[:1]
        if kind == b"+":
            return line[1:].decode("ascii", "replace")
        if kind == b"-":
            return _refusal(line)
        if kind == b":":
            return _number(line)
        if kind not in (b"$", b"*"):
            raise BrokenWireError(NO_ANSWER)
        length = _length(line)
        if length is None:
            return None
        bytes_left[0] -= length if kind == b"$" else ITEM_BYTES * length
        if bytes_left[0] < 0 or not depth:
            raise BrokenWireError("answers with more than there can be to say")
        if kind == b"$":
            string = bytearray(length)
            self.receive(memoryview(string), deadline)
            self.end_string(deadline)
            return bytes(string)
        return [self._answer(deadline, depth - 1, bytes_left) for _ in range(length)]

    def _line(self, deadline: Deadline) -> bytes:
        """Receive up to the end of a line, which is left aside."""
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > LINE_BYTES:
                raise BrokenWireError(NO_ANSWER)
            self._fill(deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _fill(self, deadline: Deadline) -> None:
        """Receive something behind what is there, which is moved to the front to make room."""
        if self._start:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._sock.settimeout(deadline.left_s())
        count = self._sock.recv_into(self._view[self._end :])
        if not count:
            raise BrokenWireError("has closed the connection")
        self._end += count


def _number(line: bytes) -> int:
    """Read a number strictly: Python's ``int`` takes spaces and underscores."""
    digits = line[1:].removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        raise BrokenWireError("answers with a number that is none")
    return int(line[1:])


def _length(line: bytes) -> int | None:
    length = _number(line)
    if length < -1:
        raise BrokenWireError("answers with a negative length")
    return None if length == -1 else length


def _refusal(line: bytes) -> Refusal:
    code, _, text = line[1:].decode("ascii", "replace").partition(" ")
    known = code.isascii() and code.isalnum() and code.isupper() and len(code) <= 24
    return Refusal(code if known else "ERR", text)
