"""The process that keeps a server's ghosts: ``python -m kvtide.adviser.child``.

Frames come in on standard input, answers go out on standard output, about one a second while anything
comes. It ends when its input does, and when whoever started it is gone. It takes processor time that nobody
else wants. Knows pipes and a clock; what is said is ``ghosts.py``'s business.
"""

import contextlib
import math
import os
import select
import signal
import sys
import time

from kvtide.adviser.frames import Forget, FrameReader, answer_frame, message_of
from kvtide.adviser.ghosts import GAUGES, Ghosts
from kvtide.advising import Arrival, GhostPlan, Growth

ANSWER_EVERY_S = 1.0
LOWEST = 19  # of priorities
READ_BYTES = 1 << 16


class Child:
    """Between two pipes.

    Args:
        source: Where frames come from.
        target: Where answers go to.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        self._reader = FrameReader()
        self._ghosts: Ghosts | None = None
        self._said: set[str] = set()  # gauges that are not said of themselves
        self._due_s = 0.0
        self._heard = False

    def serve(self, parent: int) -> None:
        """Go on until the input ends, or the process ``parent`` is no longer ours.

        Raises:
            FrameError: Something else than frames has come.
        """
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        while os.getppid() == parent:
            if poll.poll(1000 * ANSWER_EVERY_S):
                more = os.read(self._source, READ_BYTES)
                if not more:
                    return
                for frame in self._reader.frames(more):
                    self._take(frame)
                    self._answer()
            self._answer()

    def _take(self, frame: bytes) -> None:
        message = message_of(frame)
        self._heard = True
        if isinstance(message, GhostPlan):
            self._ghosts = Ghosts(message)
        elif self._ghosts is None:
            pass
        elif isinstance(message, Arrival):
            self._ghosts.feed(message)
        elif isinstance(message, Growth):
            self._ghosts.grown(message)
        elif isinstance(message, Forget):
            self._ghosts.forget()

    def _answer(self) -> None:
        now_s = time.monotonic()
        if self._ghosts is None or not self._heard or now_s < self._due_s:
            return
        answer = self._ghosts.answers()
        said = {key for key in answer if key.partition("|")[0] in GAUGES}
        # After a new plan there may be too little to say: then what was said is taken back.
        answer |= dict.fromkeys(self._said - said, math.nan)
        self._said = said
        write_all(self._target, answer_frame(answer))
        self._heard, self._due_s = False, now_s + ANSWER_EVERY_S


def write_all(target: int, data: bytes) -> None:
    """Write to a pipe that may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def main() -> None:
    """Serve whoever has started this process."""
    # Who interrupts a server from a terminal interrupts all processes of it; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(LOWEST)
    parent = int(sys.argv[1])
    with contextlib.suppress(BrokenPipeError):
        Child(0, 1).serve(parent)


if __name__ == "__main__":
    main()
