"""Our end of Mooncake's client: the process that holds it, and the memory between the two.

A call is a message on one of several channels; its bytes lie in a stretch of shared memory. A call that is
not answered in time is given up here, and keeps channel and stretch until the answer comes; a process that
has not answered for long, or has died, is ended and replaced by the next call. Knows processes and deadlines;
does not know records.
"""

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtide.errors import TierUnavailableError
from kvtide.tiers.mooncake_child import CLOSE_LIMIT_S, HINT, MESSAGE_BYTES
from kvtide.tiers.mooncake_options import MooncakeOptions
from kvtide.tiers.mooncake_staging import Staging, rounded

CHANNELS = 16
"""Calls at once."""

KEYS_AT_ONCE = 256
"""In one message, so that no message is longer than ``MESSAGE_BYTES``."""

STUCK_S = 15.0
"""A call that has not been answered for so long will not be."""

START_LIMIT_S = 30.0
"""For the library to be loaded and to have found the master."""

LOOK_S = 0.1
"""Between looks whether a late answer has come, while somebody waits for its place."""

DEFAULT_VARIABLES = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""The library's own patience is half a minute and more, and it logs all it does. What the user set stays."""


def environment_of_child(environment: Mapping[str, str]) -> dict[str, str]:
    """Tell the environment in which the library is loaded: ours, with less patience and the same modules."""
    return {
        **DEFAULT_VARIABLES,
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _told(message: bytes) -> object:
    """Read what the other process says; its memory is open to others, so it may be anything."""
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        return b""


class Berth:
    """A channel and a stretch of memory, for one call.

    Attributes:
        offset: Of the stretch.
    """

    def __init__(self, child: "Child", channel: socket.socket, offset: int, byte_count: int) -> None:
        self._child, self.channel = child, channel
        self.offset, self.byte_count = offset, byte_count
        self.asked_s: float | None = None  # since when an answer is due

    def bytes_at(self, offset: int, byte_count: int) -> npt.NDArray[np.uint8]:
        """``uint8[byte_count]`` of the shared memory, ``offset`` counted from the stretch's beginning."""
        start = self.offset + offset
        return self._child.memory[start : start + byte_count]

    def call(
        self,
        operation: str,
        keys: Sequence[str],
        until_s: float,
        offsets: Sequence[int] = (),
        record_bytes: int = 0,
    ) -> list[int]:
        """Make a call of ``mooncake_child``.

        Args:
            operation: One of its ``OPERATIONS``.
            keys: At most ``KEYS_AT_ONCE``.
            until_s: By ``time.monotonic``.
            offsets: Of the records, counted from the stretch's beginning.
            record_bytes: Of each.

        Returns:
            What the library says, for each key.

        Raises:
            TierUnavailableError: Not answered in time, or by a process that has gone.
        """
        request = {
            "operation": operation,
            "keys": list(keys),
            "offsets": [self.offset + offset for offset in offsets],
            "record_bytes": record_bytes,
        }
        self.asked_s = time.monotonic()
        try:
            self.channel.settimeout(max(0.001, until_s - self.asked_s))
            self.channel.send(json.dumps(request).encode())
            answer = self.channel.recv(MESSAGE_BYTES)
        except TimeoutError:
            raise TierUnavailableError(f"{self._child.where} does not answer in time") from None
        except OSError as error:
            raise self._child.lost(type(error).__name__) from None
        if not answer:
            raise self._child.lost("it has closed the channel")
        self.asked_s = None
        ends = _told(answer)
        if isinstance(ends, str):
            raise TierUnavailableError(f"{self._child.where}: {ends}")
        if not (isinstance(ends, list) and len(ends) == len(keys) and all(type(end) is int for end in ends)):
            raise self._child.lost("it does not answer what was asked")
        return ends

    @property
    def is_late(self) -> bool:
        """Whether an answer is still due: the library may yet read or write the stretch."""
        if self.asked_s is None:
            return False
        self.channel.settimeout(0)
        try:
            answered = self.channel.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return True  # it has died: the place is of no use to anybody
        if answered:
            self.asked_s = None
        return not answered


class Child:
    """The other process, and the memory it shares with this one.

    Args:
        options: Of the tier.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        self.where = f"mooncake at {options.master}"
        self.is_lost = False
        self._ready = False
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._staging = Staging(options.buffer)
        self._late: list[Berth] = []
        self._under_way = 0
        self._started_s = time.monotonic()
        memory_fd = os.memfd_create("kvtide-mooncake", os.MFD_CLOEXEC)
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(CHANNELS)]
        self._control, self._idle = control, [ours for ours, _ in pairs]
        self._channels = list(self._idle)
        theirs = [their_control, *(one for _, one in pairs)]
        try:
            os.ftruncate(memory_fd, self._staging.byte_count)
            self.memory = np.frombuffer(mmap.mmap(memory_fd, self._staging.byte_count), np.uint8)
            settings = {
                **options.model_dump(),
                "memory_fd": memory_fd,
                "memory_bytes": self._staging.byte_count,
                "control_fd": their_control.fileno(),
                "channel_fds": [one.fileno() for one in theirs[1:]],
            }
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvtide.tiers.mooncake_child", json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[memory_fd, *(one.fileno() for one in theirs)],
                env=environment_of_child(os.environ),
            )
        except OSError as error:
            for one in (control, *self._channels):
                one.close()
            raise TierUnavailableError(f"{self.where}: its client cannot be started: {error}") from None
        finally:
            os.close(memory_fd)
            for one in theirs:
                one.close()

    @property
    def pid(self) -> int:
        """Of the other process."""
        return self._process.pid

    @property
    def room_bytes(self) -> int:
        """What the calls that are under way at one time may hold together."""
        return self._staging.byte_count

    def wait_ready(self, until_s: float) -> None:
        """Wait until the library has found the master.

        Raises:
            TierUnavailableError: Not in time, or not at all: then it is lost.
        """
        if not self._starting.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise self._connecting()
        try:
            if self._ready:
                return
            self._control.settimeout(max(0.001, until_s - time.monotonic()))
            try:
                word = self._control.recv(MESSAGE_BYTES)
            except TimeoutError:
                if time.monotonic() > self._started_s + START_LIMIT_S:
                    raise self.lost("it does not get ready") from None
                raise self._connecting() from None
            except OSError as error:
                raise self.lost(type(error).__name__) from None
            if not word or (trouble := _told(word)):
                raise self.lost(str(trouble) if word else "it does not start")
            self._ready = True
        finally:
            self._starting.release()

    @contextmanager
    def berth(self, byte_count: int, until_s: float) -> Iterator[Berth]:
        """A place for a call, with a stretch of ``byte_count`` bytes.

        Raises:
            TierUnavailableError: None came free in time, or the process is lost.
        """
        berth = self._taken(byte_count, until_s)
        try:
            yield berth
        finally:
            with self._changed:
                self._under_way -= 1
                if berth.asked_s is None:
                    self._free(berth)
                else:
                    self._late.append(berth)
                self._changed.notify_all()

    def lost(self, why: str) -> TierUnavailableError:
        """End the process, which is of no more use; the error says why."""
        self.is_lost = True
        self._process.kill()
        code = self._process.wait()
        how = f"; signal {-code}" if code < 0 and code != -9 else ""
        return TierUnavailableError(f"{self.where}: {why}{how} (its client process is ended)")

    def close(self) -> None:
        """End the process; no call is under way when it returns."""
        with self._changed:
            if not self.is_lost:
                self._changed.wait_for(lambda: not self._under_way, STUCK_S)
                if self._under_way or any(late.is_late for late in self._late):
                    self._process.kill()
            self.is_lost = True
            for one in (self._control, *self._channels):
                one.close()
        try:
            self._process.wait(CLOSE_LIMIT_S + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # -- inside -----------------------------------------------------------------------------------

    def _connecting(self) -> TierUnavailableError:
        return TierUnavailableError(f"{self.where}: still connecting; {HINT}")

    def _taken(self, byte_count: int, until_s: float) -> Berth:
        with self._changed:
            while True:
                self._look_at_late()
                if self.is_lost:
                    raise TierUnavailableError(f"{self.where}: its client process has gone")
                if self._idle and (offset := self._staging.take(byte_count)) is not None:
                    self._under_way += 1
                    return Berth(self, self._idle.pop(), offset, byte_count)
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise TierUnavailableError(f"{self.where}: earlier calls have not been answered")
                self._changed.wait(min(left_s, LOOK_S))

    def _look_at_late(self) -> None:
        """Take back what late answers have set free; end a process that does not answer any more."""
        still_late = []
        for berth in self._late:
            if berth.is_late:
                still_late.append(berth)
            else:
                self._free(berth)
        self._late = still_late
        if still_late and not self.is_lost and self._process.poll() is not None:
            raise self.lost("it has died")
        now_s = time.monotonic()
        if any(berth.asked_s is not None and now_s > berth.asked_s + STUCK_S for berth in still_late):
            raise self.lost(f"a call has not been answered for {STUCK_S:.0f} s")

    def _free(self, berth: Berth) -> None:
        self._idle.append(berth.channel)
        self._staging.give_back(berth.offset, berth.byte_count)


class MooncakeClient:
    """The process that serves at present; started when a call needs one.

    Args:
        options: Of the tier.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._closed = False

    def child(self, until_s: float) -> Child:
        """A process that is ready, started if there is none.

        Raises:
            TierUnavailableError: Not in time.
        """
        with self._lock:
            if self._closed:
                raise TierUnavailableError("mooncake: closed")
            if self._child is not None and self._child.is_lost:
                self._child.close()
                self._child = None
            child = self._child = self._child or Child(self._options)
        child.wait_ready(until_s)
        return child

    @contextmanager
    def berth(self, byte_count: int, until_s: float) -> Iterator[Berth]:
        """A place for a call of a process that is ready.

        Raises:
            TierUnavailableError: There is none in time, or the bytes never fit.
        """
        if rounded(byte_count) > self._options.buffer:
            raise TierUnavailableError(
                f"tiers.options.buffer = {self._options.buffer}: a record takes {byte_count} bytes; "
                "give several times as much"
            )
        with self.child(until_s).berth(byte_count, until_s) as berth:
            yield berth

    def close(self) -> None:
        """End the process; no call is under way when it returns."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.close()
