"""A piece of a measurement in a process of its own.

What it leaves in memory, imports or pins ends with it, and what others left is not in its way. Knows how to
start, listen to and end such a process; does not know what is measured in it.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.frame.registry import UnfitError

END_LIMIT_S = 20.0
LOG_LINES = 15

Tell = Callable[[str], None]
"""Takes a sentence on what is going on."""


@dataclass(frozen=True, slots=True)
class _Done:
    answer: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    trace: str


def in_child(
    function: str,
    arguments: tuple[Any, ...],
    log: Path,
    tell: Tell,
    limit_s: float,
    changes: Mapping[str, str] | None = None,
) -> Any:
    """Call ``function(tell, *arguments)`` in a fresh process.

    Args:
        function: ``module:function``, imported there only: what it imports is not imported here.
        arguments: Picklable, as is what it returns.
        log: A file for what it prints.
        tell: Is told what the function tells.
        limit_s: Seconds after which the process is ended.
        changes: Of the environment.

    Raises:
        UnfitError: It failed, died or took too long; with what it raised or the end of its log.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, str(log), function, arguments), name=function, daemon=True
    )
    with environment(changes or {}):
        process.start()
    theirs.close()
    try:
        answer = _answer(pipe, function, log, tell, limit_s)
        process.join(END_LIMIT_S)
    finally:
        pipe.close()
        _end(process)
    return answer


def _answer(pipe: Connection, name: str, log: Path, tell: Tell, limit_s: float) -> Any:
    give_up_s = time.monotonic() + limit_s
    while True:
        if not pipe.poll(1.0):
            if time.monotonic() > give_up_s:
                raise UnfitError(f"{name}: no answer within {limit_s:.0f} s{log_end(log)}")
            continue
        try:
            said = pipe.recv()
        except EOFError:
            raise UnfitError(f"{name}: its process has died{log_end(log)}") from None
        if isinstance(said, _Done):
            return said.answer
        if isinstance(said, _Failed):
            raise UnfitError(f"{name}: {said.trace}")
        tell(said)


def _end(process: BaseProcess) -> None:
    """End it if it has not ended; what it had started it ends before."""
    process.terminate()
    process.join(END_LIMIT_S)
    process.kill()
    process.join()


def _serve(pipe: Connection, log: str, function: str, arguments: tuple[Any, ...]) -> None:
    print_into(log)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    try:
        module, _, name = function.partition(":")
        answer = _Done(getattr(importlib.import_module(module), name)(pipe.send, *arguments))
    except Exception:
        pipe.send(_Failed(traceback.format_exc()))
        raise
    pipe.send(answer)


def print_into(log: str) -> None:
    """Let everything this process prints go into a file."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


def log_end(log: Path) -> str:
    """Quote the last lines of a log, for a message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "".join(f"\n  {line}" for line in [f"the end of {log}:", *lines[-LOG_LINES:]])


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment while a process is started."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
