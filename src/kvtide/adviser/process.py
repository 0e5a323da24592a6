"""An adviser whose ghosts live in a process of their own, beside the server.

Requests go into a bounded queue; a thread starts the process once there were enough of them, writes what is
in the queue and reads the answers. What does not fit is dropped and counted. When the process ends, or was
never to be had, that is one line in the log and the end of ghosts; nothing else changes. Knows pipes and
threads; does not know what ghosts are.
"""

import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvtide.adviser.frames import Forget, FrameError, FrameReader, Message, answer_of, framed
from kvtide.advising import Adviser, Arrival, GhostPlan, Growth, HashView

logger = logging.getLogger(__name__)

START_AFTER = 256
"""Requests that wait for the process before it is started: a short life has none."""

QUEUE_BYTES = 4 << 20
"""Of what may wait; about fifty thousand chunks. Four hundred thousand made a full collection of garbage take
28 ms where the scheduler left the thread no time to cut them."""

HASH_BYTES = 80
"""That a hash takes as long as it waits, with its place in a list."""

MESSAGE_BYTES = 512
"""That a message takes beside its hashes."""

PIECE_HASHES = 512
"""Cut in one go, some ten microseconds: the thread then lets the scheduler have the interpreter's lock."""

MESSAGES_AT_ONCE = 16
"""Cut before it is looked again whether something can be written or read."""

POLL_S = 0.25
"""So often the queue is looked at. Whoever fills it wakes nobody: that takes a lock and a system call."""

READ_BYTES = 1 << 16

END_S = 1.0
"""So long the process may take to end by itself."""

_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def child_command() -> list[str]:
    """Say how the process is started; ``-P``: not with modules that happen to lie in the working folder."""
    return [sys.executable, "-P", "-m", "kvtide.adviser.child", str(os.getpid())]


class ProcessAdviser(Adviser):
    """Hands everything to a child.

    Args:
        start_after: Requests before it is started.
        queue_bytes: That may wait for it.
        command: How it is started; replaced in tests.
    """

    def __init__(
        self,
        start_after: int = START_AFTER,
        queue_bytes: int = QUEUE_BYTES,
        command: Sequence[str] | None = None,
    ) -> None:
        self._start_after = start_after
        self._queue_bytes = queue_bytes
        self._command = command
        self._plan: GhostPlan | None = None
        self._queue: deque[tuple[Message, HashView | None]] = deque()
        self._ready: deque[tuple[bytes, int]] = deque()  # frames, and what they count for in the queue
        # Each of the two is written by one thread alone.
        self._entered_bytes = self._left_bytes = 0
        self._arrived_count = self._dropped_count = self._told_dropped = 0
        self._answers: deque[dict[str, float]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.child_id: int | None = None

    # -- what is told; the scheduler's thread --------------------------------------------------------

    def planned(self, plan: GhostPlan) -> None:
        if self._plan is None:
            self._ready.appendleft((framed(plan), 0))  # what has come before it is of it, too
        elif plan != self._plan:
            self._put(plan)
        self._plan = plan

    def arrived(self, arrival: Arrival, chunks: HashView) -> None:
        self._arrived_count += 1
        if not self._enter(arrival, chunks):
            self._dropped_count += 1
        if self._thread is None and self._is_due:
            self._thread = threading.Thread(target=self._run, name="kvtide-adviser", daemon=True)
            self._thread.start()

    def grown(self, growth: Growth, chunks: HashView) -> None:
        self._enter(growth, chunks)

    def forget(self) -> None:
        self._put(Forget())

    def take(self) -> Sequence[Mapping[str, float]]:
        dropped = self._dropped_count - self._told_dropped
        if not (dropped or self._answers):
            return ()
        answers: list[Mapping[str, float]] = [self._answers.popleft() for _ in range(len(self._answers))]
        if dropped:
            self._told_dropped = self._dropped_count
            answers.append({"ghost_dropped_requests|": dropped})
        return answers

    def close(self) -> None:
        self.is_on = False
        self._closing = True
        if self._thread is not None:
            self._thread.join(2 * POLL_S + 2 * END_S)

    @property
    def _is_due(self) -> bool:
        """Whether the process is worth starting: requests have come, or lie about that are long."""
        if self._plan is None or not self.is_on:
            return False
        return self._arrived_count >= self._start_after or 4 * self._waiting_bytes > self._queue_bytes

    @property
    def _waiting_bytes(self) -> int:
        return self._entered_bytes - self._left_bytes

    def _enter(self, message: Arrival | Growth, chunks: HashView) -> bool:
        size = _size_of(chunks)
        if not self.is_on or self._waiting_bytes + size > self._queue_bytes:
            return False
        self._entered_bytes += size
        self._put(message, chunks)
        return True

    def _put(self, message: Message, chunks: HashView | None = None) -> None:
        """Queue a message for the thread; as long as there is none, as it is going to be written.

        Lists of hashes that are kept are walked, all of them, by every full collection of garbage.
        """
        if self._thread is None:
            self._ready.append(_frame(message, chunks, HashView.fingerprints))
        else:
            self._queue.append((message, chunks))

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "it was not started"
        child: subprocess.Popen[bytes] | None = None
        try:
            child = self._started()
            self.child_id = child.pid
            reason = self._serve(child)
        except (OSError, FrameError) as error:
            reason = str(error)
        except Exception:  # ours, but no request's trouble
            logger.exception("ghost caches failed in a way that was not foreseen")
        if not self._closing:
            logger.warning("ghost caches are off, serving goes on: %s", reason)
        self.is_on = False
        self._queue.clear()
        self._ready.clear()
        if child is not None:
            _end(child)

    def _started(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._command or child_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ALONE,
            bufsize=0,
        )

    def _serve(self, child: "subprocess.Popen[bytes]") -> str:
        """Write and read until there is an end to it; say why."""
        assert child.stdin is not None
        assert child.stdout is not None
        source, target = child.stdout.fileno(), child.stdin.fileno()
        os.set_blocking(target, False)
        reader, unsent = FrameReader(), memoryview(b"")
        # Not select(): a server has more than 1,024 descriptors.
        poll = select.poll()
        poll.register(source, select.POLLIN)
        while not self._closing:
            self._cut_some()
            if not unsent:
                unsent = self._next()
            poll.register(target, select.POLLOUT if unsent else 0)
            # One that is ready is not waited for: neither call below blocks.
            for descriptor, event in poll.poll(1000 * POLL_S):
                if descriptor == source:
                    more = os.read(source, READ_BYTES)
                    if not more:
                        return _ended(child)
                    self._answers.extend(map(answer_of, reader.frames(more)))
                elif event & select.POLLOUT:
                    unsent = unsent[os.write(target, unsent) :]
                else:
                    return _ended(child)
        return "it was closed"

    def _cut_some(self) -> None:
        """Make frames of what was told, also while the process does not take any: lists are not kept."""
        for _ in range(min(len(self._queue), MESSAGES_AT_ONCE)):
            self._ready.append(_frame(*self._queue.popleft(), _cut))

    def _next(self) -> memoryview:
        if not self._ready:
            return memoryview(b"")
        frame, size = self._ready.popleft()
        self._left_bytes += size
        return memoryview(frame)


def _frame(message: Message, chunks: HashView | None, cut: Callable[[HashView], bytes]) -> tuple[bytes, int]:
    """Make what is written of a message, and say what it counts for in the queue."""
    if chunks is None or not isinstance(message, Arrival | Growth):
        return framed(message), 0
    return framed(message._replace(chunks=cut(chunks))), _size_of(chunks)


def _cut(chunks: HashView) -> bytes:
    """Cut hashes, a few at a time: who waits for the interpreter's lock has it in between."""
    pieces = []
    for piece in chunks.pieces(PIECE_HASHES):
        pieces.append(piece.fingerprints())
        time.sleep(0)
    return b"".join(pieces) if all(pieces) else b""


def _size_of(chunks: HashView) -> int:
    return MESSAGE_BYTES + HASH_BYTES * chunks.chunk_count


def _ended(child: "subprocess.Popen[bytes]") -> str:
    try:
        return f"their process has ended with {child.wait(END_S)}"
    except subprocess.TimeoutExpired:
        return "their process has closed a pipe"


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Close its input, upon which it ends; if it does not, end it."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
