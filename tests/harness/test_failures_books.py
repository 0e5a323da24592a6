"""Failures of the field, F10: leaks, and books that do not balance.

Each test has in ``failure_rules.py`` the line of the connector without which it fails.
"""

import mmap
from pathlib import Path

import pytest
from test_lives import PROMPT, Build, hit_tokens, run

from kvtide.testing import HeldDevice
from kvtide.vllm.testing import EngineShape, ModelEngine
from kvtide.vllm.testing.groups import GroupShape
from kvtide.vllm.testing.ranks import own_connector


def test_a_lookup_that_no_load_follows_leaves_nothing_behind(build: Build) -> None:
    # LMCache #1034: the engine finds the blocks on the device after all.
    harness = build(num_blocks=20)
    run(harness, "first", PROMPT)
    harness.scheduler.reset_prefix_cache()
    harness.add("loads", PROMPT, 1)
    for name in ("waits", "aborted"):
        harness.add(name, PROMPT, 1)
    for _ in range(4):
        harness.step()
    harness.abort("aborted")
    harness.drain()
    assert harness.outputs["waits"] == harness.outputs["loads"]
    assert hit_tokens(harness) == 28, "one load, and the others' hits are the engine's own"
    manager = harness.connector._deciding._manager
    assert manager.pinned_count == 0
    manager._evict(manager.capacity)
    assert manager.used_count == 0, "nothing is kept from leaving"


@pytest.mark.parametrize("rank_count", [1, 2, 4])
def test_the_budget_is_of_all_ranks_together(tmp_path: Path, rank_count: int) -> None:
    # SGLang #38156: it was per rank.
    assert pool_bytes(tmp_path, rank_count, 4, budget=100_000) <= 100_000


@pytest.mark.parametrize("tokens_per_block", [64, 80, 100])
def test_the_budget_is_not_rounded_up(tmp_path: Path, tokens_per_block: int) -> None:
    # vLLM #53042: an allocator rounded up to the next power of two.
    assert pool_bytes(tmp_path, 1, tokens_per_block, budget=10_000) <= 10_000


def pool_bytes(folder: Path, rank_count: int, tokens_per_block: int, budget: int) -> int:
    """Bytes of the pools of all ranks, in whole pages."""
    shape = EngineShape(
        groups=(GroupShape(("layers.0", "layers.1", "layers.2"), tokens_per_block),),
        rank_count=rank_count,
        settings={"host_memory": budget},
    )
    engine = ModelEngine(folder, shape, lambda _, direction: HeldDevice(direction))
    pools = [own_connector(rank)._worker._pool for rank in engine.ranks]
    taken = sum(-(-len(pool._map) // mmap.PAGESIZE) * mmap.PAGESIZE for pool in pools)
    assert taken >= budget // 2
    assert len(pools) == rank_count
    engine.close()
    return taken
