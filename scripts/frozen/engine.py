"""One vLLM engine in a process of its own, kept under load: requests in, times to first token out.

Knows vLLM. Does not know disks, or what is compared with what.
"""

import multiprocessing
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.frame.children import environment, log_end, print_into
from benchmarks.frame.engines import ENVIRONMENT

from frozen.hooks import SCHEDULER_HOOKS, WORKER_HOOKS, HookClock, SlowCall

START_LIMIT_S = 300.0
IDLE_PAUSE_S = 0.001
"""What vLLM's own loop sleeps between steps that compute nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of which so many run or wait at any time.

    Attributes:
        prompts: Token ids.
        output_tokens: Of each.
        concurrency: The next comes when one has ended.
        limit_s: Seconds after which what has not ended counts as failed.
        settle: Whether to go on until the engine has nothing left to do: all is written below.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int
    concurrency: int
    limit_s: float
    settle: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of them.

    Attributes:
        ttft_ms: Of each request, from handing it over to its first token; None where none came.
        failed: Of each request, why it failed, "" where it did not.
        slowest: The slowest call of each hook.
        call_count: Calls of hooks.
        wall_s: Of the whole.
        metrics: kvtide's counters and gauges by ``name`` or ``name{label}``, at the end.
    """

    ttft_ms: tuple[float | None, ...]
    failed: tuple[str, ...]
    slowest: tuple[SlowCall, ...]
    call_count: int
    wall_s: float
    metrics: Mapping[str, float]


class EngineProcess:
    """An engine; closed by ``close``.

    Args:
        name: For messages.
        log: A file for what it prints.
        arguments: For vLLM's ``LLM``.
    """

    def __init__(self, name: str, log: Path, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(log), dict(arguments)), name=f"engine-{name}", daemon=True
        )
        with environment(ENVIRONMENT):
            self._process.start()
        theirs.close()

    @property
    def process_id(self) -> int:
        """Of the engine."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait for its start; called once, first."""
        self._answer(START_LIMIT_S)

    def run(self, load: Load) -> LoadResult:
        """Put a load on it and wait for its end."""
        self._pipe.send(load)
        answer = self._answer(load.limit_s + 60)
        assert isinstance(answer, LoadResult)
        return answer

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(20)
        self._process.kill()
        self._process.join()

    def _answer(self, limit_s: float) -> Any:
        if not self._pipe.poll(limit_s):
            raise RuntimeError(f"engine {self.name}: no answer within {limit_s:.0f} s{log_end(self._log)}")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"engine {self.name} has died{log_end(self._log)}") from None


def _serve(pipe: Connection, log: str, arguments: Mapping[str, Any]) -> None:
    print_into(log)
    engine = _Engine(arguments)
    pipe.send("ready")
    try:
        while True:
            pipe.send(engine.run(pipe.recv()))
    except EOFError:
        return


@dataclass(slots=True)
class _Asked:
    index: int
    began_s: float
    ttft_ms: float | None = None


@dataclass(slots=True)
class _Progress:
    ttft_ms: list[float | None]
    failed: list[str]
    running: dict[str, _Asked] = field(default_factory=dict)


class _Engine:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._llm = LLM(**arguments, disable_log_stats=False)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._clock = HookClock()
        self._clock.watch(self._scheduler.connector, "scheduler", SCHEDULER_HOOKS)
        self._clock.watch(get_kv_transfer_group(), "worker", WORKER_HOOKS)
        self._count = 0

    def run(self, load: Load) -> LoadResult:
        progress = _Progress([None] * len(load.prompts), ["not asked"] * len(load.prompts))
        waiting = deque(range(len(load.prompts)))
        began_s = time.perf_counter()
        self._clock.take()
        while waiting or progress.running:
            if time.perf_counter() - began_s > load.limit_s:
                self._give_up(progress)
                break
            while waiting and len(progress.running) < load.concurrency:
                self._ask(load, waiting.popleft(), progress)
            self._step(progress)
        wall_s = time.perf_counter() - began_s
        slowest, call_count = self._clock.take()
        if load.settle:
            self._settle(load.limit_s)
        return LoadResult(
            tuple(progress.ttft_ms),
            tuple(progress.failed),
            tuple(slowest),
            call_count,
            wall_s,
            self._metrics(),
        )

    def _ask(self, load: Load, index: int, progress: _Progress) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=load.output_tokens, ignore_eos=True, detokenize=False
        )
        self._count += 1
        name = f"request-{self._count}"
        progress.running[name] = _Asked(index, time.perf_counter())
        progress.failed[index] = "has not ended"
        self._engine.add_request(name, {"prompt_token_ids": list(load.prompts[index])}, params)

    def _step(self, progress: _Progress) -> None:
        outputs = self._engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            asked = progress.running.get(output.request_id)
            (completion,) = output.outputs
            if asked is None:
                continue
            if completion.token_ids and asked.ttft_ms is None:
                asked.ttft_ms = progress.ttft_ms[asked.index] = (now_s - asked.began_s) * 1e3
            if output.finished:
                reason = str(completion.finish_reason)
                progress.failed[asked.index] = "" if reason == "length" else reason
                del progress.running[output.request_id]
        if not outputs:
            time.sleep(IDLE_PAUSE_S)

    def _give_up(self, progress: _Progress) -> None:
        self._engine.abort_request(list(progress.running))
        progress.running.clear()

    def _settle(self, limit_s: float) -> None:
        """Step until the engine has nothing left to do, as a server's own loop would."""
        give_up_s = time.perf_counter() + limit_s
        while self._scheduler.has_requests():
            if time.perf_counter() > give_up_s:
                raise RuntimeError("chunks are still being written below")
            self._engine.step()
            time.sleep(IDLE_PAUSE_S)

    def _metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is None or not metric.name.startswith("vllm:kvtide_"):
                continue
            labels = [text for key, text in metric.labels.items() if key not in ("model_name", "engine")]
            label = "{" + ",".join(labels) + "}" if labels else ""
            found[metric.name.removeprefix("vllm:kvtide_") + label] = value
        return found
