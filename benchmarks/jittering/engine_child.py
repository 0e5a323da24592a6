"""The inside of an engine process of ``jitter``: one vLLM engine, stepped, every token timed.

With kvtide or without is a matter of the engine's arguments; without, plain copies of the same bytes run
beside it: the requests themselves say what is due to be copied, and when. The loop is the same for both.
Runs in a process of its own, with both halves of the engine in it.
"""

import os
import resource
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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
IDLE_PAUSE_S = 0.001  # vLLM's own after a step that computed nothing


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
        known_blocks: That are stored already.
    """

    request: "Request"
    known_blocks: int


class DueCopies:
    """What the requests give reason to copy, step by step; starts plain copies of it, if there are any.

    Where kvtide is not, what it would copy and when follows from how far each request is: what is known of a
    prompt is loaded when it comes, and it waits for that; a block of the prompt that is full is stored after
    its step, and what was generated when the request has ended.
    """

    def __init__(self, block_bytes: int, plain: PlainCopies | None) -> None:
        self._block_bytes = block_bytes
        self._plain = plain
        self._running: list[_Running] = []
        self.due = Moved()

    def load(self, shared_tokens: int) -> None:
        """Note that a request has come of whose prompt so much is known."""
        block_count = shared_tokens // TOKENS_PER_BLOCK
        self.due += Moved(loaded_bytes=block_count * self._block_bytes)
        if self._plain is not None and block_count:
            self._plain.load(block_count)

    @property
    def is_loading(self) -> bool:
        """Whether a request that has come has to wait; with kvtide that is the engine's affair."""
        return self._plain is not None and self._plain.is_loading

    def follow(self, request: "Request", shared_tokens: int) -> None:
        """Look after a request that has been handed to the engine."""
        self._running.append(_Running(request, shared_tokens // TOKENS_PER_BLOCK))

    def end_step(self) -> None:
        """Note what a step has brought about."""
        stores = 0
        for one in self._running:
            tokens = one.request.num_computed_tokens
            if not one.request.is_finished():
                # kvtide keeps what is generated in pieces of 256 tokens: here, at the end.
                tokens = min(tokens, one.request.num_prompt_tokens)
            full_blocks = tokens // TOKENS_PER_BLOCK
            if full_blocks > one.known_blocks:
                stores += full_blocks - one.known_blocks
                one.known_blocks = full_blocks
        self._running = [one for one in self._running if not one.request.is_finished()]
        stored_bytes = stores * self._block_bytes
        self.due += Moved(stored_bytes=stored_bytes, written_bytes=stored_bytes)
        if self._plain is not None and stores:
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


@dataclass(slots=True)
class _Seen:
    """What the outputs of a turn said, and when the gaps began."""

    began_cpu_s: float
    cached_tokens: dict[str, int] = field(default_factory=dict)  # of each other
    output_tokens: int = 0

    def end_step(self, outputs: list["RequestOutput"]) -> None:
        for output in outputs:
            self.output_tokens += len(output.outputs[0].token_ids)
            if output.request_id in self.cached_tokens:
                self.cached_tokens[output.request_id] = output.num_cached_tokens or 0


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
        gaps = Gaps(tuple(self._add(copies, prompt, turn.runner_tokens, 0) for prompt in turn.runners))
        seen = self._stepped(turn, copies, gaps)
        self._drain()
        rested = _rest()
        ended_cpu_s = _cpu_s()
        self._collect()
        counters = self._counted_up()
        prompt_tokens = sum(len(other.prompt) for other in turn.others)
        cached_tokens = sum(seen.cached_tokens.values())
        return TurnResult(
            tuple(gaps.gaps_us),
            gaps.ended_s - gaps.began_s,
            ended_cpu_s - seen.began_cpu_s,
            rested,
            gaps.step_count,
            prompt_tokens - cached_tokens,
            cached_tokens,
            seen.output_tokens,
            copies.due,
            self._moved_up(counters),
            counters,
        )

    def _stepped(self, turn: Turn, copies: DueCopies, gaps: Gaps) -> _Seen:
        """Let the others come when it is their turn, and step until nobody is left."""
        seen = _Seen(_cpu_s())
        to_come, here = deque(turn.others), deque[Other]()
        while to_come or here or self._engine.has_unfinished_requests():
            while to_come and gaps.tokens_each >= to_come[0].at_token:
                here.append(to_come.popleft())
                copies.load(here[-1].shared_tokens)
            while here and not copies.is_loading:
                other = here.popleft()
                name = self._add(copies, other.prompt, turn.other_tokens, other.shared_tokens)
                seen.cached_tokens[name] = 0
            if not self._engine.has_unfinished_requests():
                time.sleep(IDLE_PAUSE_S)
                continue
            had_begun = gaps.begun
            outputs = self._engine.step()
            gaps.end_step(outputs, time.perf_counter())
            copies.end_step()
            seen.end_step(outputs)
            if gaps.begun and not had_begun:
                seen.began_cpu_s = _cpu_s()
        return seen

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

    def _drain(self) -> None:
        """Step on, as a server does, until no half needs a step: the last stores go out here."""
        give_up_s = time.monotonic() + REST_LIMIT_S
        while self._core.scheduler.has_requests() and time.monotonic() < give_up_s:
            self._engine.step()
            time.sleep(IDLE_PAUSE_S)

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
