"""The inside of an engine process: one real vLLM engine, batches in, measurements out.

Runs in a process of its own, with the engine's two halves in it, so that the processor time of this process
and of what it has started is the engine's: model, scheduler, connector and copies, all threads. Between
batches it blocks on its pipe and uses nothing. Does not know what is compared with what.
"""

import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.frame.children import print_into

REST_WINDOW_S = 0.05
REST_CORES = 0.05  # an idle interpreter with its timers stays below
REST_LIMIT_S = 3.0
IDLE_PAUSE_S = 0.001
DRAIN_LIMIT_S = 30.0
T = TypeVar("T")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has started.

    Attributes:
        vocabulary: Token ids are below this.
        threads: Of the model's thread pool.
    """

    vocabulary: int
    threads: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests handed to the engine at once; it runs as many together as it may.

    Attributes:
        prompts: Token ids of each request.
        output_tokens: How many each generates, exactly.
        forget: Empty the engine's own prefix cache before; what a connector keeps stays.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int
    forget: bool = False


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch took.

    Attributes:
        wall_s: From handing over the batch to the last token.
        ttft_s: Of each request, from handing it over to its first token.
        cpu_s: Processor time of the process and its children from the start of the batch until they have
            come to rest, so that copies which end after the last token are counted.
        idle_s: Time between the rest before this batch and its start.
        idle_cpu_s: Processor time of the process in it.
        page_faults: During the batch, those that needed no disk.
        output_tokens: Tokens generated.
        cached_tokens: Prompt tokens that were not computed, wherever they came from.
        rested: Whether the process has come to rest at all.
        counters: What vLLM's counters went up by during the batch, ``name`` or ``name{label value}``.
    """

    wall_s: float
    ttft_s: tuple[float, ...]
    cpu_s: float
    idle_s: float
    idle_cpu_s: float
    page_faults: int
    output_tokens: int
    cached_tokens: int
    rested: bool
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """What went wrong inside."""

    message: str


def serve(pipe: Connection, log: str, arguments: Mapping[str, Any]) -> None:
    """Start an engine, say ``Ready``, answer batches until the other end of the pipe is closed.

    Args:
        pipe: To whoever asks.
        log: Path of a file that takes everything printed here.
        arguments: For vLLM's ``LLM``.
    """
    print_into(log)
    try:
        engine = _Engine(arguments)
        pipe.send(engine.ready())
        while True:
            pipe.send(engine.run(pipe.recv()))
    except EOFError:
        return
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}"))
        raise


class _Engine:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import LLM

        # Counting is on, as in a server: what it costs belongs to both sides.
        self._llm = LLM(**arguments, disable_log_stats=False)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._step, self._core.step_fn = self._core.step_fn, self._paced_step
        self._rest()
        self._counted = self._counters()
        self._rested_at_s, self._rested_at_cpu_s = time.perf_counter(), _cpu_s()

    def ready(self) -> Ready:
        import torch

        vocabulary = self._llm.llm_engine.model_config.get_vocab_size()
        return Ready(vocabulary, torch.get_num_threads())

    def run(self, batch: Batch) -> BatchResult:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": list(prompt)} for prompt in batch.prompts]
        sampling = SamplingParams(
            temperature=0, max_tokens=batch.output_tokens, ignore_eos=True, detokenize=False
        )
        if batch.forget and not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine's own cache could not be emptied: blocks are in use")
        began_faults, began_cpu_s, began_s = _page_faults(), _cpu_s(), time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - began_s
        self._drain()
        rested = self._rest()
        ended_cpu_s, page_faults = _cpu_s(), _page_faults() - began_faults
        idle_s, idle_cpu_s = began_s - self._rested_at_s, began_cpu_s - self._rested_at_cpu_s
        counted, self._counted = self._counted, self._counters()
        self._rested_at_s, self._rested_at_cpu_s = time.perf_counter(), _cpu_s()
        return BatchResult(
            wall_s,
            tuple(output.metrics.first_token_latency for output in outputs),
            ended_cpu_s - began_cpu_s,
            idle_s,
            idle_cpu_s,
            page_faults,
            sum(len(output.outputs[0].token_ids) for output in outputs),
            sum(output.num_cached_tokens or 0 for output in outputs),
            rested,
            {name: value - counted.get(name, 0) for name, value in self._counted.items()},
        )

    def _paced_step(self) -> tuple[Any, bool]:
        """Step as vLLM's own loop does in a server: a pause after a step that computed nothing."""
        outputs, executed = self._step()
        if not executed and self._core.scheduler.has_requests():
            time.sleep(IDLE_PAUSE_S)
        return outputs, executed

    def _drain(self) -> None:
        """Step on until nobody needs a step any more, as a server would: last stores go out here."""
        give_up_s = time.monotonic() + DRAIN_LIMIT_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"without requests the engine is busy for {DRAIN_LIMIT_S:.0f} s")
            self._llm.llm_engine.step()

    @staticmethod
    def _rest() -> bool:
        """Wait until no thread of this process or its children is at work; False when one does not stop."""
        give_up_s = time.monotonic() + REST_LIMIT_S
        while time.monotonic() < give_up_s:
            before_cpu_s = _cpu_s()
            time.sleep(REST_WINDOW_S)
            if _cpu_s() - before_cpu_s <= REST_CORES * REST_WINDOW_S:
                return True
        return False

    def _counters(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import Counter

        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if not isinstance(metric, Counter):
                continue
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            name = metric.name + ("{" + ",".join(labels.values()) + "}" if labels else "")
            found[name] = found.get(name, 0) + metric.value
        return found


def _cpu_s() -> float:
    """Return processor seconds of this process and of its children, those that have ended as well."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + living_children_s(os.getpid())


def living_children_s(pid: int) -> float:
    """Return processor seconds of a process's living descendants, to the kernel's tick."""
    used_s = 0.0
    for task in _unless_gone(lambda: list(Path(f"/proc/{pid}/task").iterdir()), []):
        for child in _unless_gone((task / "children").read_text, "").split():
            # The name in brackets may hold spaces and brackets; what follows the last one does not.
            fields = _unless_gone(Path(f"/proc/{child}/stat").read_text, "").rpartition(")")[2].split()
            # proc(5): utime stime cutime cstime
            used_s += sum(map(int, fields[11:15])) / _TICKS_PER_S + living_children_s(int(child))
    return used_s


def _unless_gone(read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except (FileNotFoundError, ProcessLookupError):
        return otherwise


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
