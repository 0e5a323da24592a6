"""The check of exactness can fail: three faults planted in the worker, each reported.

They are planted from outside, in the plans of copies and in the pool: what is loaded is wrong, and nobody in
kvtide or vLLM notices.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, ask_twice, paired, prompts_of
from engine.tiny_engine import TinyEngine, tiny_engine
from kvtide.demo.exactness import Verdict, judge
from kvtide.jobs import CPULoadStoreSpec, Direction, Hop
from kvtide.transfer.plans import CopyPlan
from kvtide.transfer.pool import HostPool

LAYERS = 4
CHUNKS = STORED_TOKENS // 32


@pytest.fixture(scope="module")
def engine() -> Iterator[TinyEngine]:
    with tiny_engine(models.llama(), POOL_BLOCKS, {"host_memory": "24MiB"}) as started:
        yield started


def compare(engine: TinyEngine, seed: int, plant: Callable[[pytest.MonkeyPatch], None]) -> Verdict:
    """Compare loads with hits.

    Args:
        engine: Running.
        seed: Of the prompts.
        plant: Called between the two; what it patches is put right afterwards.
    """
    prompts = prompts_of(seed)
    hits = ask_twice(engine, prompts)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        loads = [engine.ask(prompt) for prompt in prompts]
    assert [load.loaded_tokens for load in loads] == [STORED_TOKENS] * 3
    return judge(paired(loads, hits))


def change_plans(
    engine: TinyEngine, patch: pytest.MonkeyPatch, change: Callable[[CopyPlan], CopyPlan]
) -> None:
    """Give the copier of loads other pieces than were worked out for it."""
    copier: Any = engine.worker._handlers[Direction.LOAD]._copier
    submit = copier.submit
    patch.setattr(copier, "submit", lambda job_id, plan, limit_s: submit(job_id, change(plan), limit_s))


def test_without_a_fault_the_same_way_reports_exact(engine: TinyEngine) -> None:
    plans: list[CopyPlan] = []

    def unchanged(plan: CopyPlan) -> CopyPlan:
        plans.append(plan)
        return plan

    verdict = compare(engine, 11, lambda patch: change_plans(engine, patch, unchanged))
    assert verdict.exact
    assert verdict.compared_requests == len(plans) == 3


def test_zeros_loaded_are_reported(engine: TinyEngine) -> None:
    zeros = np.zeros(1 << 20, dtype=np.uint8)

    def zeroed(plan: CopyPlan) -> CopyPlan:
        assert int(plan.size.max()) <= zeros.size
        return CopyPlan(np.full_like(plan.source, zeros.ctypes.data), plan.target, plan.size)

    verdict = compare(engine, 12, lambda patch: change_plans(engine, patch, zeroed))
    assert not verdict.exact
    assert verdict.diverging_requests == verdict.compared_requests == 3


def test_two_swapped_chunks_are_reported(engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of two prompts: attention asks no order of keys that know their position already, so two chunks of one
    # prompt in each other's place change no more than the order of a sum.
    slots: list[int] = []
    storing = engine.worker._handlers[Direction.STORE]
    transfer = storing.transfer_async

    def noted(job_id: int, hop: Hop, limit_s: float) -> None:
        assert isinstance(hop.target, CPULoadStoreSpec)
        slots.extend(hop.target.slots)
        transfer(job_id, hop, limit_s)

    def swap_in_the_pool(patch: pytest.MonkeyPatch) -> None:
        assert len(slots) == 3 * CHUNKS
        pool: HostPool = engine.worker._pool
        chunks = pool.view[: pool.byte_count].reshape(pool.slot_count, pool.slot_bytes)
        one, other = slots[CHUNKS // 2], slots[CHUNKS + CHUNKS // 2]
        chunks[[one, other]] = chunks[[other, one]]

    monkeypatch.setattr(storing, "transfer_async", noted)
    verdict = compare(engine, 13, swap_in_the_pool)
    assert not verdict.exact
    assert verdict.compared_requests == 3
    assert verdict.diverging_requests == 2, "two prompts lost a chunk to each other, the third did not"


def test_one_stale_layer_of_one_chunk_is_reported(engine: TinyEngine) -> None:
    def without_one_piece(plan: CopyPlan) -> CopyPlan:
        assert len(plan.size) == LAYERS * CHUNKS, "a piece is no longer one layer of one chunk"
        kept = np.arange(len(plan.size)) != LAYERS * CHUNKS // 2 + CHUNKS // 2
        return CopyPlan(plan.source[kept], plan.target[kept], plan.size[kept])

    verdict = compare(engine, 14, lambda patch: change_plans(engine, patch, without_one_piece))
    assert not verdict.exact
    assert verdict.diverging_requests == verdict.compared_requests == 3
