"""A real vLLM engine in this process: started, asked, stepped and ended.

Knows vLLM's engine and where kvtide's two halves hang in it. Does not know what an answer should be.
One at a time: vLLM keeps the worker's connector and its process groups in module globals.
"""

import gc
import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.models import VOCAB_SIZE
from kvtide.demo.exactness import Answer
from kvtide.jobs import Direction
from kvtide.testing import HeldDevice

BLOCK_TOKENS = 32
STEP_LIMIT = 20_000
"""Steps after which a test is taken to hang; the longest of them needs a few hundred.

Where the copying thread has to wait for a core, steps without work are many.
"""

IDLE_PAUSE_S = 0.001
"""What vLLM's own loop sleeps between steps that compute nothing."""


def prompt_of(seed: int, token_count: int) -> list[int]:
    """Draw a prompt; another seed shares no block with it. Ids below 3 have a meaning to the model."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(token_count)]


@dataclass(slots=True)
class Reply:
    """What came back for one request.

    Attributes:
        prompt: As asked.
        token_ids: Generated so far.
        logprobs: Of each of them, as ``float.hex()``.
        local_tokens: The engine's own hit, as vLLM counts it.
        loaded_tokens: What vLLM was promised by the connector.
        finish_reason: None while it runs.
    """

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    local_tokens: int = 0
    loaded_tokens: int = 0
    finish_reason: str | None = None

    def answer(self) -> Answer:
        """As the demo's judge wants it."""
        cached_tokens = self.local_tokens + self.loaded_tokens
        return Answer(
            len(self.prompt),
            cached_tokens,
            self.loaded_tokens,
            tuple(self.token_ids),
            tuple(self.logprobs),
        )


class TinyEngine:
    """Wraps vLLM's ``LLMEngine`` with the engine core in this process.

    Attributes:
        llm: vLLM's engine.
        totals: kvtide's counters, ``"name|label"``, summed over the steps so far; gauges as last told.
        preemption_count: How often vLLM took a request's blocks away.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.totals: dict[str, float] = {}
        self.preemption_count = 0
        self._replies: dict[str, Reply] = {}
        self._names: dict[str, str] = {}
        self._count = 0
        self._get_output = llm.engine_core.get_output
        llm.engine_core.get_output = self._listen

    @property
    def core(self) -> Any:
        """vLLM's ``EngineCore``."""
        return self.llm.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def deciding(self) -> Any:
        """kvtide's scheduler half."""
        return self.scheduler.connector._scheduler

    @property
    def worker(self) -> Any:
        """kvtide's worker half."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def hold(self, patch: pytest.MonkeyPatch, direction: Direction) -> HeldDevice:
        """Put a copier that is told when to finish in the place of the real one."""
        held = HeldDevice(direction)
        patch.setattr(self.worker._handlers[direction], "_copier", held)
        return held

    def abort(self, name: str) -> None:
        """Abort a request, whatever it is doing."""
        self.llm.abort_request([name], internal=True)

    def submit(self, prompt: Sequence[int], new_tokens: int) -> str:
        """Queue a request; its name is the engine's own, internal one."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=1
        )
        self._count += 1
        given = f"request-{self._count}"
        name = str(self.llm.add_request(given, {"prompt_token_ids": list(prompt)}, params))
        self._replies[name] = Reply(list(prompt))
        self._names[given] = name
        return name

    def step(self) -> None:
        """Let vLLM make one step and note what it said."""
        for output in self.llm.step():
            self._note(output)

    def finish(self, names: Sequence[str]) -> list[Reply]:
        """Step until these have finished."""
        for _ in range(STEP_LIMIT):
            if all(self._replies[name].finish_reason for name in names):
                return [self._replies[name] for name in names]
            self.step()
        raise AssertionError(f"{len(names)} requests have not finished after {STEP_LIMIT} steps")

    def ask(self, prompt: Sequence[int], new_tokens: int = 16) -> Reply:
        """Put one request, alone, and step until the engine is idle."""
        (reply,) = self.finish([self.submit(prompt, new_tokens)])
        self.drain()
        return reply

    def drain(self) -> int:
        """Step until vLLM has nothing left to do, as its own loop would; counts the steps.

        The books must balance then.
        """
        steps = 0
        while self.scheduler.has_requests():
            assert steps < STEP_LIMIT, f"an engine without requests is still busy after {steps} steps"
            self.step()
            steps += 1
            time.sleep(IDLE_PAUSE_S)
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "an idle engine holds blocks"
        if self.scheduler.connector is not None:
            self.deciding.check_invariants()
            assert not len(self.deciding._jobs), "an idle engine has open jobs"
            assert not self.deciding._requests, "an idle engine remembers requests"
            assert not self.worker._open, "an idle engine has copies under way"
        return steps

    def reply(self, name: str) -> Reply:
        """What is known of a request so far."""
        return self._replies[name]

    def request(self, name: str) -> Any:
        """vLLM's own object, None once it is gone."""
        return self.scheduler.requests.get(name)

    def _listen(self) -> Any:
        outputs = self._get_output()
        for output in outputs.outputs:
            if (stats := output.prefill_stats) is not None and output.request_id in self._replies:
                reply = self._replies[output.request_id]
                reply.local_tokens = stats.num_local_cached_tokens
                reply.loaded_tokens = stats.num_external_cached_tokens
        return outputs

    def _note(self, output: Any) -> None:
        reply = self._replies[self._names[output.request_id]]
        (completion,) = output.outputs
        reply.token_ids = list(completion.token_ids)
        reply.logprobs = [
            float(choices[token_id].logprob).hex()
            for token_id, choices in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        reply.finish_reason = completion.finish_reason

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Take in what vLLM tells its statistics loggers after each step."""
        data = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        for key, value in data.items():
            if isinstance(value, list):
                self.totals[key] = self.totals.get(key, 0) + len(value)
            elif _is_gauge(key):
                self.totals[key] = value
            else:
                self.totals[key] = self.totals.get(key, 0) + value
        if iteration_stats is not None:
            self.preemption_count += iteration_stats.num_preempted_reqs


def _is_gauge(key: str) -> bool:
    from kvtide.metrics import BY_NAME, Kind

    return BY_NAME[key.partition("|")[0]].kind is Kind.GAUGE


@contextmanager
def tiny_engine(
    model: Path,
    pool_blocks: int,
    settings: dict[str, Any] | None = None,
    transfer: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[TinyEngine]:
    """Start an engine, and leave this process as it was.

    Args:
        model: Directory of the model.
        pool_blocks: Blocks of the engine's own pool; vLLM keeps one of them for itself.
        settings: kvtide's settings, None for an engine without kvtide.
        transfer: More of vLLM's ``kv_transfer_config``.
        options: More of vLLM's engine arguments.
    """
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    assert not has_kv_transfer_group(), "another engine runs in this process, or has not been ended"
    threads = _own_threads()
    arguments = _defaults(model, pool_blocks) | options
    if settings is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVTideConnector",
            "kv_role": "kv_both",
            # Machines are shared: a store that is slow for want of a core must not be cancelled by a step.
            "kv_connector_extra_config": {"flush_limit_s": 30.0, **settings},
        } | (transfer or {})
    with _left_as_it_was():
        engine = None
        try:
            engine = _started(arguments)
            if settings is not None:
                _wait_for_pool(engine)
            yield engine
        except BaseException:
            print("kvtide has counted:", engine.totals if engine is not None else "nothing")
            raise
        finally:
            if engine is not None:
                engine.llm.engine_core.shutdown()
            _forget_globals()
    assert _own_threads() <= threads, "an engine that has ended left threads"


def _started(arguments: dict[str, Any]) -> TinyEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor
    from vllm.v1.metrics.loggers import StatLoggerBase

    listeners: list[TinyEngine] = []

    class Listener(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            for listener in listeners:
                listener.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    config = EngineArgs(**arguments).create_engine_config()
    llm = LLMEngine(
        config,
        Executor.get_class(config),
        log_stats=True,
        stat_loggers=[Listener],
        multiprocess_mode=False,
    )
    listeners.append(TinyEngine(llm))
    return listeners[0]


@contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Undo what a start of vLLM does to its process, and keep it from doing more."""
    import torch
    import torch._dynamo.config

    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    log = logging.getLogger("vllm")
    level = log.level
    # vLLM collects garbage eight times in the life of an engine, each time through all that pytest has
    # loaded: most of the time that starting and ending one took. So what is here already is left out of it,
    # and stays so; and the engine, which vLLM leaves out while it runs, is not: it has to go when it ends.
    gc.collect()
    gc.freeze()
    # The sampler compiles one function when log-probabilities are asked for: seconds, and a C++ compiler.
    with torch._dynamo.config.patch(disable=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_DIST_IDENT", "")  # the worker writes it
        # Else a failure drowns in what vLLM says of itself.
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        log.setLevel(logging.ERROR)
        # The worker would bind threads to cores for good. One thread is plenty for these models: two that
        # wait for each other on a busy machine take a hundred times as long.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        set_num_threads(1)
        try:
            yield
        finally:
            log.setLevel(level)
            torch.set_num_threads = set_num_threads  # the worker replaces it
            set_num_threads(threads)


def _wait_for_pool(engine: TinyEngine) -> None:
    # Serving starts before the pool's pages are there, and what is computed by then is not stored: right for
    # a server, a matter of luck for a test.
    pool = engine.worker._pool
    give_up_s = time.monotonic() + 60
    while pool.ready_slots < pool.slot_count:
        assert time.monotonic() < give_up_s, f"{pool.ready_slots} of {pool.slot_count} slots are ready"
        time.sleep(0.01)


def _defaults(model: Path, pool_blocks: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 800,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": pool_blocks,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
    }


def _forget_globals() -> None:
    """What vLLM leaves behind, in particular after a start that has failed."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def _own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvtide")}
