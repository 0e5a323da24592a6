"""Engines in processes of their own, asked one at a time.

Knows how to start, ask and end them. An engine that is not asked is blocked on its pipe: it takes no
processor time from the one that is. It ends with this process, however that ends: its pipe closes.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from benchmarks.frame.children import END_LIMIT_S, environment, log_end
from benchmarks.frame.engine_child import Batch, BatchResult, Failed, Ready, serve
from benchmarks.frame.registry import UnfitError

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # glibc learns from what a process happens to free whether it maps and unmaps activations anew in every
    # step: 95,000 to 430,000 page faults in a batch were seen, and engines that were told the same and stayed
    # several percent apart. With fixed thresholds (32 MiB is the largest glibc takes) there are almost none.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}
START_LIMIT_S = 180.0
BATCH_LIMIT_S = 300.0

Answer = TypeVar("Answer")


class EngineProcess:
    """One vLLM engine; a context manager that ends it.

    Args:
        name: For messages and the log.
        log: A file for what the engine prints.
        arguments: For vLLM's ``LLM``.
        inside: What runs in the process: ``serve`` answers batches; another one has to take the same
            arguments, be picklable, and end when its pipe is closed.

    Raises:
        UnfitError: (from all that waits for an answer) The engine failed, died or took too long; with
            the end of its log.
    """

    def __init__(
        self, name: str, log: Path, arguments: Mapping[str, Any], inside: Callable[..., None] = serve
    ) -> None:
        self.name = name
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=inside, args=(theirs, str(log), dict(arguments)), name=f"engine-{name}", daemon=True
        )
        # In place before the process is, since allocator and thread pool read them first of all.
        with environment(ENVIRONMENT):
            self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        # In the middle of a batch it would not notice before the batch has ended.
        if error is None:
            self._process.join(END_LIMIT_S)
        self._process.kill()
        self._process.join()

    def ready(self) -> Ready:
        """Wait until the engine has started; called once, first."""
        return self.first(Ready)

    def run(self, batch: Batch) -> BatchResult:
        """Run a batch to its end."""
        return self.ask(batch, BatchResult)

    def first(self, kind: type[Answer]) -> Answer:
        """Wait for what the process says when the engine has started; called once, first."""
        return self._answered(kind, START_LIMIT_S)

    def ask(self, question: object, kind: type[Answer]) -> Answer:
        """Hand over ``question`` and wait for its answer, of that kind."""
        self._pipe.send(question)
        return self._answered(kind, BATCH_LIMIT_S)

    def _answered(self, kind: type[Answer], limit_s: float) -> Answer:
        answer = self._answer(limit_s)
        if not isinstance(answer, kind):
            raise UnfitError(f"engine {self.name}: said {type(answer).__name__} instead of {kind.__name__}")
        return answer

    def _answer(self, limit_s: float) -> object:
        give_up_s = time.monotonic() + limit_s
        while not self._pipe.poll(1.0):
            if time.monotonic() > give_up_s:
                raise UnfitError(f"engine {self.name}: no answer within {limit_s:.0f} s{log_end(self._log)}")
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(END_LIMIT_S)
            code = self._process.exitcode
            raise UnfitError(f"engine {self.name}: ended with exit code {code}{log_end(self._log)}") from None
        if isinstance(answer, Failed):
            raise UnfitError(f"engine {self.name}: {answer.message}{log_end(self._log)}")
        return answer
