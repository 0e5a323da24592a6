"""The inside of an engine process: one real vLLM engine, batches in, measurements out.

Runs in a process of its own, with the engine's two halves in it (no further process), so that the
process's own processor time is the engine's: model, scheduler, connector and copies, all threads. Between
batches it blocks on its pipe and uses nothing. Does not know what is compared with what.
"""

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.frame.children import print_into

REST_WINDOW_S = 0.05
REST_CORES = 0.05  # an idle interpreter with its timers stays below
REST_LIMIT_S = 3.0


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
    """

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch took.

    Attributes:
        wall_s: From handing over the batch to the last token.
        cpu_s: Processor time of the process from the start of the batch until it has come to rest, so
            that copies which end after the last token are counted.
        idle_s: Time between the rest before this batch and its start.
        idle_cpu_s: Processor time of the process in it.
        page_faults: During the batch, those that needed no disk.
        output_tokens: Tokens generated.
        cached_tokens: Prompt tokens that were not computed, wherever they came from.
        rested: Whether the process has come to rest at all.
        counters: What vLLM's counters went up by during the batch, ``name`` or ``name{label value}``.
    """

    wall_s: float
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
        began_faults, began_cpu_s, began_s = _page_faults(), _cpu_s(), time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - began_s
        rested = self._rest()
        ended_cpu_s, page_faults = _cpu_s(), _page_faults() - began_faults
        idle_s, idle_cpu_s = began_s - self._rested_at_s, began_cpu_s - self._rested_at_cpu_s
        counted, self._counted = self._counted, self._counters()
        self._rested_at_s, self._rested_at_cpu_s = time.perf_counter(), _cpu_s()
        return BatchResult(
            wall_s,
            ended_cpu_s - began_cpu_s,
            idle_s,
            idle_cpu_s,
            page_faults,
            sum(len(output.outputs[0].token_ids) for output in outputs),
            sum(output.num_cached_tokens or 0 for output in outputs),
            rested,
            {name: value - counted.get(name, 0) for name, value in self._counted.items()},
        )

    @staticmethod
    def _rest() -> bool:
        """Wait until no thread of this process is at work; False when one does not stop."""
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
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
