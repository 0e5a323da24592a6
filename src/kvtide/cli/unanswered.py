"""Questions to file systems and stores that may never be answered, and what is said then.

Knows deadlines and mounts. Does not know what is asked.
"""

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

Answer = TypeVar("Answer")

MOUNTS = Path("/proc/self/mountinfo")


class UnansweredError(Exception):
    """No answer within the time that was given; whoever was asked may still be at it."""


def within(limit_s: float, ask: Callable[[], Answer]) -> Answer:
    """Return what ``ask`` returns, or raise what it raises.

    It is called in a thread that is left behind when it does not come back: a call into a file system that is
    frozen cannot be interrupted.

    Raises:
        UnansweredError: It takes longer than ``limit_s``.
    """
    answer: Future[Answer] = Future()

    def call() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        # One that was raised by ``ask`` is its own.
        if answer.done():
            raise
        raise UnansweredError from None


def mount_of(path: str, mounts: Path = MOUNTS) -> str | None:
    """Say on which mount a path is, for people, without a look at the path itself.

    Args:
        path: Whatever is or is not there; links in it are not followed.
        mounts: As ``/proc/self/mountinfo`` (proc(5)).

    Returns:
        ``/mnt/kv (nfs4 from server:/export)``; None where it cannot be told.
    """
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    asked = os.path.abspath(path)
    found: tuple[str, str] | None = None
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields[6:-2]:
            continue
        point = _unescaped(fields[4])
        kind, source = fields[fields.index("-", 6) + 1 :][:2]
        # Of two on the same folder the later one hides the other.
        if os.path.commonpath((point, asked)) == point and (found is None or len(point) >= len(found[0])):
            found = point, f"{point} ({kind} from {_unescaped(source)})"
    return None if found is None else found[1]


def _unescaped(text: str) -> str:
    r"""Read what stands for blanks and the like in it, such as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
