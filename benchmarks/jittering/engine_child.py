"""The inside of an engine process of ``jitter``: one vLLM engine, stepped, every token timed.

With kvtide or without is a matter of the engine's arguments; without, plain copies of the same bytes run
beside it: the requests themselves say what is due to be copied, and when. The loop is the same for both.
Runs in a process of its own, with both halves of the engine in it.
"""

import os
import resource
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmarks.frame.children import print_into
from benchmarks.frame.engine_child import Failed
from benchmarks.jittering.plain_copies import PlainCopies, PlainSettings
from benchmarks.jittering.vocabulary import TOKENS_PER_BLOCK, Moved, Other, Ready, Turn, TurnResult

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.request import Request

REST_WINDOW_S = 0.05
REST_CORES = 0.05  # an idle interpreter with its timers stays below
REST_LIMIT_S = 3.0


def serve(
    pipe: Connection, log: str, arguments: Mapping[str, Any], plain: PlainSettings | None = None
) -> None:
    """Start an engine, say ``Ready``, take turns until the other end of the pipe is closed.

    Args:
        pipe: To whoever asks.
        log: Path of a file that takes everything printed here.
        arguments: For vLLM's ``LLM``.
        plain: Of the copies that run beside it, None for none.
    """
    print_into(log)
    cores = os.sched_getaffinity(0)  # asked before the engine binds threads to some of them
    try:
        engine = SteppedEngine(arguments, plain, cores)
        pipe.send(engine.ready())
        while True:
            pipe.send(engine.run(pipe.recv()))
    except EOFError:
        return
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}"))
        raise


@dataclass(slots=True)
class _Running:
    """A request under way.

    Attributes:
        request: The engine's own; says how far it is.
        known_blocks: That it brings along: not to be stored again.
        seen: Whether it has been admitted.
    """

    request: "Request"
    known_blocks: int
    seen: bool = False


class DueCopies:
    """What the requests give reason to copy, step by step; starts plain copies of it, if there are any.

    Where kvtide is not, what it would copy and when follows from how far each request is: a prefix that is
    not computed is loaded when the request is admitted, a block of the prompt that is full is stored after
    its step, and what was generated when the request has ended.
    """

    def __init__(self, block_bytes: int, plain: PlainCopies | None) -> None:
        self._block_bytes = block_bytes
        self._plain = plain
        self._running: list[_Running] = []
        self.due = Moved()

    def follow(self, request: "Request", shared_tokens: int) -> None:
        """Look after a request that has been handed to the engine."""
        self._running.append(_Running(request, shared_tokens // TOKENS_PER_BLOCK))

    def end_step(self) -> None:
        """Note what a step has brought about."""
        loads = stores = 0
        for one in self._running:
            tokens = one.request.num_computed_tokens
            if not one.request.is_finished():
                # kvtide keeps what is generated in pieces of 256 tokens: here, at the end.
                tokens = min(tokens, one.request.num_prompt_tokens)
            full_blocks = tokens // TOKENS_PER_BLOCK
            if full_blocks and not one.seen:
                one.seen = True
                loads += one.known_blocks
            if full_blocks > one.known_blocks:
                stores += full_blocks - one.known_blocks
                one.known_blocks = full_blocks
        self._running = [one for one in self._running if not one.request.is_finished()]
        stored_bytes = stores * self._block_bytes
        self.due += Moved(loads * self._block_bytes, stored_bytes, stored_bytes)
        if self._plain is not None:
            if loads:
                self._plain.load(loads)
            if stores:
                self._plain.store(stores)


class Gaps:
    """Times between two tokens of one request, for some requests; from when all have their first.

    Args:
        names: Of the requests.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._last_s: dict[str, float | None] = dict.fromkeys(names)
        self._missing = len(names)
        self.gaps_us: list[int] = []
        self.began_s = self.ended_s = 0.0
        self.step_count = 0

    @property
    def begun(self) -> bool:
        return not self._missing

    @property
    def tokens_each(self) -> int:
        """Each has so many, its first included."""
        return self.step_count + 1 if self.begun else 0

    def end_step(self, outputs: list["RequestOutput"], now_s: float) -> None:
        """Take what a step has brought."""
        was_begun, came = self.begun, False
        for output in outputs:
            if output.request_id not in self._last_s or not output.outputs[0].token_ids:
                continue
            came = True
            last_s, self._last_s[output.request_id] = self._last_s[output.request_id], now_s
            if last_s is None:
                self._missing -= 1
            elif was_begun:
                self.gaps_us.append(round((now_s - last_s) * 1e6))
        if self.begun and not was_begun:
            self.began_s = self.ended_s = now_s
        elif was_begun and came:
            self.step_count += 1
            self.ended_s = now_s


class SteppedEngine:
    """One engine and, if wanted, plain copies beside it."""

    def __init__(
        self, arguments: Mapping[str, Any], plain: PlainSettings | None, cores: Collection[int]
    ) -> None:
        from vllm import LLM

        # Counting is on, as in a server: what it costs belongs to both sides.
        self._llm = LLM(**arguments, disable_log_stats=False)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        books = self._core.scheduler.kv_cache_config
        from kvtide.vllm.layout import kv_bytes_of

        self._block_count, device_bytes = books.num_blocks, kv_bytes_of(books)
        self._block_bytes = device_bytes // self._block_count
        self._plain = None
        if plain is not None:
            self._plain = PlainCopies(plain, self._block_bytes, device_bytes, cores)
        self._request_count = 0
        self._moved = Moved()
        self._counted = self._counters()

    def ready(self) -> Ready:
        import torch

        vocabulary = self._engine.model_config.get_vocab_size()
        return Ready(vocabulary, torch.get_num_threads(), self._block_count, self._block_bytes)

    def run(self, turn: Turn) -> TurnResult:
        """Take a turn."""
        copies = DueCopies(self._block_bytes, self._plain)
        runners = tuple(self._add(copies, prompt, turn.runner_tokens, 0) for prompt in turn.runners)
        gaps = Gaps(runners)
        waiting = list(turn.others[::-1])
        cached: dict[str, int] = {}
        output_tokens, began_cpu_s = 0, _cpu_s()
        while waiting or self._engine.has_unfinished_requests():
            while waiting and self._has_come(waiting[-1], gaps):
                other = waiting.pop()
                cached[self._add(copies, other.prompt, turn.other_tokens, other.shared_tokens)] = 0
            was_begun = gaps.begun
            outputs = self._engine.step()
            gaps.end_step(outputs, time.perf_counter())
            copies.end_step()
            for output in outputs:
                output_tokens += len(output.outputs[0].token_ids)
                if output.request_id in cached:
                    cached[output.request_id] = output.num_cached_tokens or 0
            if gaps.begun and not was_begun:
                began_cpu_s = _cpu_s()
        rested = _rest()
        ended_cpu_s = _cpu_s()
        self._collect()
        counters = self._counted_up()
        prompt_tokens = sum(len(other.prompt) for other in turn.others)
        cached_tokens = sum(cached.values())
        return TurnResult(
            tuple(gaps.gaps_us),
            gaps.ended_s - gaps.began_s,
            ended_cpu_s - began_cpu_s,
            rested,
            gaps.step_count,
            prompt_tokens - cached_tokens,
            cached_tokens,
            output_tokens,
            copies.due,
            self._moved_up(counters),
            counters,
        )

    @staticmethod
    def _has_come(other: Other, gaps: Gaps) -> bool:
        return gaps.tokens_each >= other.at_token

    def _add(self, copies: DueCopies, prompt: tuple[int, ...], tokens: int, shared_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"request-{self._request_count}"
        self._request_count += 1
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        inside = self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        copies.follow(self._core.scheduler.requests[inside], shared_tokens)
        return name

    def _collect(self) -> None:
        """Take some steps without copies, so that what has ended is counted in this turn."""
        self._add(DueCopies(self._block_bytes, None), (1, 2, 3), 3, 0)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _moved_up(self, counters: Mapping[str, float]) -> Moved:
        if self._plain is None:
            return Moved(
                round(counters.get("vllm:kvtide_transfer_bytes{load}", 0)),
                round(counters.get("vllm:kvtide_transfer_bytes{store}", 0)),
                round(counters.get("vllm:kvtide_tier_bytes{disk,write}", 0)),
            )
        before, self._moved = self._moved, self._plain.finish()
        return self._moved - before

    def _counted_up(self) -> dict[str, float]:
        before, self._counted = self._counted, self._counters()
        return {name: value - before.get(name, 0) for name, value in self._counted.items()}

    def _counters(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import Counter

        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if not isinstance(metric, Counter):
                continue
            labels = {
                key: value for key, value in metric.labels.items() if key not in ("model_name", "engine")
            }
            name = metric.name + ("{" + ",".join(labels.values()) + "}" if labels else "")
            found[name] = found.get(name, 0) + metric.value
        return found


def _rest() -> bool:
    """Wait until no thread of this process is at work; False when one does not stop."""
    give_up_s = time.monotonic() + REST_LIMIT_S
    while time.monotonic() < give_up_s:
        before_cpu_s = _cpu_s()
        time.sleep(REST_WINDOW_S)
        if _cpu_s() - before_cpu_s <= REST_CORES * REST_WINDOW_S:
            return True
    return False


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
