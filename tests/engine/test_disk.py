"""What comes back from disk gives the very answers of the engine's own hits: after eviction, after a restart."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, ask_twice, assert_exact, prompts_of
from engine.tiny_engine import TinyEngine, tiny_engine

CHUNKS = STORED_TOKENS // 32


def settings_of(folder: Path, **others: object) -> dict[str, object]:
    return {
        "host_memory": "24MiB",
        "disk": str(folder / "disk"),
        "disk_limit": "256MiB",
        "disk_reserve": 0,
        **others,
    }


def wait_for_disk(engine: TinyEngine, chunks: int) -> None:
    """Step an idle engine until so many chunks are on disk."""
    give_up_s = time.monotonic() + 30
    while engine.totals.get("tier_stored_chunks|disk", 0) < chunks:
        assert time.monotonic() < give_up_s, f"not on disk: {engine.totals}"
        engine.step()
        time.sleep(0.01)


@pytest.mark.parametrize("model", [models.llama, models.qwen3], ids=["llama", "qwen3"])
def test_a_restarted_engine_answers_from_disk_like_a_hit(model: Callable[[], Path], tmp_path: Path) -> None:
    prompts = prompts_of(11)
    settings = settings_of(tmp_path)
    with tiny_engine(model(), POOL_BLOCKS, settings) as engine:
        hits = ask_twice(engine, prompts)
        wait_for_disk(engine, 3 * CHUNKS)
    with tiny_engine(model(), POOL_BLOCKS, settings) as engine:
        engine.drain()  # as an idle server does until it knows what is on disk
        loads = [engine.ask(prompt) for prompt in prompts]
        totals = engine.totals
    assert_exact(loads, hits)
    assert totals["tier_hit_chunks|disk"] == 3 * CHUNKS
    assert [load.local_tokens for load in loads] == [0, 0, 0]
