"""What the hooks take with the adviser and without: two engines of ours in one process, taking turns.

A turn is the whole life of its requests: they come, are looked up, computed, stored, answered and end. The
ghosts' own process runs beside it, as it does beside a server. Knows in which order engines are built and
asked; who judges is ``adviser_judge.py``.
"""

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.frame.children import Tell
from benchmarks.frame.rounds import rounds
from benchmarks.scheduler.adviser_vocabulary import (
    ADVISER,
    CHAT_COUNT,
    CHAT_TOKENS,
    CHATS,
    ON,
    SWITCHES,
    WORKS,
)
from benchmarks.scheduler.engine import Engine
from benchmarks.scheduler.filling import Filler
from benchmarks.scheduler.prompts import joined
from benchmarks.scheduler.rows import CHAT_CHUNKS, SYSTEM_CHUNKS, SYSTEM_PROMPTS, rested, store_and_load
from benchmarks.scheduler.vocabulary import OURS, TOKENS_PER_BLOCK

SWITCH = "KVTIDE_ADVISER"
ANSWER_LIMIT_S = 20.0  # what was handed over is cut and written when nobody computes


def measure_adviser(tell: Tell, size: int, count: int) -> list[dict[str, Any]]:
    """Take all samples.

    Args:
        tell: Is told what is going on.
        size: Chunks of the pools, which are full.
        count: Rounds.
    """
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[str, Engine] = {}
        for switch in SWITCHES:
            tell(f"{switch}: filling")
            with _switched(switch == ON):
                engines[switch] = Engine(OURS, size, False, Path(folder))
            Filler(engines[switch]).fill(size)
            gc.freeze()
        for index, order in rounds(SWITCHES, count):
            tell(f"adviser, round {index + 1} of {count}")
            for work in WORKS:
                for switch in order:
                    engine = engines[switch]
                    before_us = _busy_us(engine)
                    taken = _chats(engine, index) if work == CHATS else _long(engine, index)
                    taken["busy_us"] = _busy_us(engine) - before_us
                    samples.append({"row": ADVISER, "arm": switch, "work": work, "round": index} | taken)
        rested(list(engines.values()))
        for switch, engine in engines.items():
            _await_answer(engine, ANSWER_LIMIT_S if switch == ON else 0.0)
            told = engine.clock.counted.get("ghost_requests|", 0.0)
            dropped = engine.clock.counted.get("ghost_dropped_requests|", 0.0)
            samples.append({"row": ADVISER, "arm": switch, "told": told, "dropped": dropped})
            engine.connector.shutdown()
    return samples


@contextmanager
def _switched(is_on: bool) -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = str(is_on).lower()
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def _await_answer(engine: Engine, limit_s: float) -> None:
    give_up_s = time.monotonic() + limit_s
    while True:
        engine.connector.get_kv_connector_stats()
        if engine.clock.counted.get("ghost_requests|") or time.monotonic() >= give_up_s:
            return
        time.sleep(0.1)


def _busy_us(engine: Engine) -> float:
    """Say how long all hooks have taken so far, by the smaller of each call's wall and processor time."""
    return sum(total_us for _, total_us, _ in engine.clock.calls.kinds.values())


def _chats(engine: Engine, index: int) -> dict[str, Any]:
    """Let chats come, be answered and end; half of them have come in the round before."""
    gc.freeze()
    engine.clock.take()
    stored = engine.stored_chunks
    for chat in range(CHAT_COUNT):
        session = (index + chat // (CHAT_COUNT // 2)) * CHAT_COUNT + chat % (CHAT_COUNT // 2)
        own = CHAT_CHUNKS - SYSTEM_CHUNKS + -(-CHAT_TOKENS // TOKENS_PER_BLOCK)
        found = joined([(f"system/{session % SYSTEM_PROMPTS}", SYSTEM_CHUNKS), (f"chat/{session}", own)])
        engine.add(f"chat/{index}/{chat}", found, CHAT_CHUNKS * TOKENS_PER_BLOCK, CHAT_TOKENS)
    engine.drain(limit=4 * CHAT_TOKENS)
    return _taken(engine) | {"stored_chunks": engine.stored_chunks - stored}


def _long(engine: Engine, index: int) -> dict[str, Any]:
    """Compute a long prompt, then ask for it again and load it."""
    stored = engine.stored_chunks
    hooks_us: dict[str, float] = {}
    asked = 0
    for sample in store_and_load(engine, f"long/{index}"):
        asked += sample["asked"]
        for hook, calls in sample["hooks_us"].items():
            hooks_us[hook] = hooks_us.get(hook, 0.0) + sum(calls)
        for hook, us in sample["after_us"].items():
            hooks_us[hook] = hooks_us.get(hook, 0.0) + us
    return {"hooks_us": hooks_us, "asked": asked, "stored_chunks": engine.stored_chunks - stored}


def _taken(engine: Engine) -> dict[str, Any]:
    calls_us, answers = engine.clock.take()
    engine.forget_device()
    engine.clock.take()
    return {"hooks_us": {hook: sum(calls) for hook, calls in calls_us.items()}, "asked": len(answers)}
