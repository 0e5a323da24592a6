"""Ghosts beside a real engine: what they say of it is what it hits."""

import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS
from engine.tiny_engine import BLOCK_TOKENS, TinyEngine, tiny_engine
from kvtide.adviser.process import ProcessAdviser
from kvtide.vllm import connector

START_AFTER = 6
PATIENCE_S = 60.0
PROMPT_BLOCKS = 6


def prompt_of(session: int, turn: int) -> list[int]:
    return [(7 * session + at * at) % 90 + 5 for at in range(BLOCK_TOKENS * (PROMPT_BLOCKS + turn) + 1)]


def heard(engine: TinyEngine, requests: int) -> dict[str, float]:
    """Wait until the ghosts have said of so many requests what they hit."""
    until_s = time.monotonic() + PATIENCE_S
    while engine.totals.get("ghost_requests|", 0) < requests:
        assert time.monotonic() < until_s, engine.totals
        time.sleep(0.05)
        if (stats := engine.scheduler.connector.get_kv_connector_stats()) is not None:
            engine.record(SimpleNamespace(kv_connector_stats=stats.data), None)
    return engine.totals


def test_ghosts_hit_what_the_engine_hits_and_their_death_is_nobody_s_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "ProcessAdviser", partial(ProcessAdviser, START_AFTER))
    with tiny_engine(models.llama(), POOL_BLOCKS, {"host_memory": "64MiB"}, dtype="float32") as engine:
        hits = 0
        for session in range(2):
            for turn in range(5):
                reply = engine.ask(prompt_of(session, turn), new_tokens=2)
                hits += reply.local_tokens + reply.loaded_tokens
        totals = heard(engine, 10)
        assert hits > 0
        # Everything fits: whatever its size, a ghost has what the engine's caches had between them.
        assert {totals[f"ghost_hit_tokens|host,{times}"] for times in ("0.5", "1", "2", "4")} == {hits}
        assert totals["ghost_queried_tokens|"] == 2 * BLOCK_TOKENS * sum(range(6, 11))
        assert totals["ghost_sampled_share|"] == 1.0
        assert "ghost_hit_points|host,2" not in totals  # of ten requests
        adviser = engine.deciding._advice._adviser
        os.kill(adviser.child_id, signal.SIGKILL)
        before = engine.ask(prompt_of(0, 0), new_tokens=2)
        assert engine.ask(prompt_of(0, 0), new_tokens=2).token_ids == before.token_ids
