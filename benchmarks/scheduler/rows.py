"""What is timed inside vLLM's scheduler: a load, a store, a decode step, a step of waiting requests.

Each function lets one engine do it once and returns samples: the wall time of every hook call, that of the
whole step, and what work was done, so that a judge can see that both arms did the same.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from benchmarks.scheduler.engine import Engine
from benchmarks.scheduler.filling import Filler
from benchmarks.scheduler.prompts import hashes, joined
from benchmarks.scheduler.vocabulary import (
    CHAT_REQUESTS,
    DECODE,
    FILLER_CHUNKS,
    FILLING_A_CHUNK,
    LOAD,
    LONG_CHUNKS,
    SHARED_CHUNKS,
    STORE,
    TOKENS_PER_BLOCK,
    WAITING,
    WAITING_CHANGED,
    WAITING_REQUESTS,
)

REST_TOKENS = 8  # beyond the last whole block: a hit never covers the last token
CHAT_CHUNKS = 127  # 2,032 tokens of prompt
SYSTEM_PROMPTS = 4
SYSTEM_CHUNKS = 120
CHAT_LIMIT_TOKENS = 1024

Sample = dict[str, Any]


def store_and_load(engine: Engine, name: str) -> Iterator[Sample]:
    """Compute a prompt of 131,072 tokens that nobody has, then ask for it once more and load it.

    The pool is full: storing evicts as many chunks as are stored.
    """
    tokens = LONG_CHUNKS * TOKENS_PER_BLOCK + REST_TOKENS
    for row in (STORE, LOAD):
        found = hashes(name, LONG_CHUNKS)
        engine.clock.take()
        evicted = engine.evicted_chunks()
        engine.clock.take()
        # Two tokens, so that the request does not end within the step that is measured.
        gc.freeze()
        engine.add(f"{name}/{row}", found, tokens, max_tokens=2)
        engine.step()
        sample = _taken(engine, row)
        sample["evicted_chunks"] = engine.evicted_chunks() - evicted
        engine.clock.take()
        engine.drain()
        sample["after_us"] = {hook: sum(calls) for hook, calls in engine.clock.take()[0].items()}
        engine.forget_device()
        yield sample


class Waiting:
    """64 requests of 32,768 tokens wait for a prefix that one more request is loading.

    Args:
        engine: Idle; no step of it has computed anything yet, or kvtide would know how fast it computes
            and not let anybody wait.
        filler: Of its pool.
    """

    def __init__(self, engine: Engine, filler: Filler) -> None:
        self._engine = engine
        self._filler = filler
        tokens = SHARED_CHUNKS * TOKENS_PER_BLOCK + REST_TOKENS
        filler.store(hashes("shared", SHARED_CHUNKS))
        engine.hold_loads = True
        engine.add("loading", hashes("shared", SHARED_CHUNKS), tokens)
        engine.step()
        self._ids = [f"waiting-{index}" for index in range(WAITING_REQUESTS)]
        for request_id in self._ids:
            engine.add(request_id, hashes("shared", SHARED_CHUNKS), tokens)
        engine.step()

    def steps(self, changed: bool, count: int) -> Iterator[Sample]:
        """Step, with everybody still waiting.

        Args:
            changed: Whether others have stored something since the step before.
            count: Steps.
        """
        for _ in range(count):
            if changed:
                self._filler.fill(FILLER_CHUNKS)
            gc.freeze()
            self._engine.clock.take()
            self._engine.step()
            yield _taken(self._engine, WAITING_CHANGED if changed else WAITING)

    def end(self) -> None:
        """Let the load end, and everybody go."""
        self._engine.abort(self._ids)
        self._engine.forget_device()


class Chat:
    """256 running requests of 2,032 to 2,287 tokens, of which 16 fill a chunk in each step.

    One came in each step, as in a server, so that whatever is done once in so many tokens falls evenly on the
    steps. They share four system prompts of 1,920 tokens, so that all of them fit a pool of 10,000 chunks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = [f"chat-{index}" for index in range(CHAT_REQUESTS)]
        for index in range(CHAT_REQUESTS):
            self._add(index)
            engine.step()

    def _add(self, index: int) -> None:
        own_chunks = CHAT_CHUNKS - SYSTEM_CHUNKS + CHAT_LIMIT_TOKENS // TOKENS_PER_BLOCK
        found = joined([(f"system/{index % SYSTEM_PROMPTS}", SYSTEM_CHUNKS), (f"chat/{index}", own_chunks)])
        tokens = CHAT_CHUNKS * TOKENS_PER_BLOCK
        self._engine.add(self._ids[index], found, tokens, CHAT_LIMIT_TOKENS)

    def steps(self, count: int) -> Iterator[Sample]:
        """Generate a token for each request, ``count`` times."""
        gc.freeze()
        for _ in range(count):
            self._engine.clock.take()
            planned = self._engine.step()
            yield _taken(self._engine, DECODE) | {"running": len(planned.num_scheduled_tokens)}

    def end(self) -> None:
        """End them, a few in each step: their last chunks are stored."""
        while self._ids:
            ending, self._ids = self._ids[:FILLING_A_CHUNK], self._ids[FILLING_A_CHUNK:]
            self._engine.scheduler.finish_requests(ending, RequestStatus.FINISHED_ABORTED)
            self._engine.step()
        self._engine.drain()
        self._engine.forget_device()


def _taken(engine: Engine, row: str) -> Sample:
    hooks_us, answers = engine.clock.take()
    return {
        "row": row,
        "hooks_us": hooks_us,
        "schedule_us": engine.schedule_us,
        "update_us": engine.update_us,
        "asked": len(answers),
        "later": answers.count(None),
        "matched_tokens": sum(answer or 0 for answer in answers),
        "stored_chunks": sum(engine.jobs.stored_chunks),
        "stores": len(engine.jobs.stored_chunks),
        "loaded_chunks": sum(engine.jobs.loaded_chunks),
    }


def rested(engines: Sequence[Engine]) -> None:
    """Check that nothing is left of what was measured.

    Raises:
        RuntimeError: Something is.
    """
    for engine in engines:
        if engine.scheduler.has_requests() or engine.connector.has_pending_push_work():
            raise RuntimeError(f"{engine.arm}: not idle between measurements")
