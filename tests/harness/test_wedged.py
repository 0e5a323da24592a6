"""A load whose copy begins and does not end: its request is computed, nobody gets its blocks before that."""

import time

import pytest
from test_lives import PROMPT, Build, push_out, run

from kvtide.scheduler import quarantine
from kvtide.vllm.testing.model import PatternModel


@pytest.mark.parametrize("aborted", [False, True])
def test_a_wedged_load_costs_its_request_a_recomputation_and_its_late_bytes_reach_nobody(
    build: Build, monkeypatch: pytest.MonkeyPatch, aborted: bool
) -> None:
    monkeypatch.setattr(quarantine, "GRACE_S", 0.0)
    engine = build(transfer_deadline_s=0.05, num_blocks=65, host_pages=16)
    run(engine, "first", PROMPT)
    push_out(engine)
    engine.scheduler.reset_prefix_cache()
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.add("wedged", PROMPT, 4)
    for _ in range(3):
        engine.step()
    (job_id,) = engine.load.held
    engine.load.wedged.add(job_id)
    if aborted:
        engine.abort("wedged")
    time.sleep(0.06)
    engine.store.auto_finish = True
    for _ in range(20):
        engine.step()
    if not aborted:
        assert engine.outputs["wedged"] == PatternModel.answer(PROMPT, 4)
    assert engine.errors == []
    assert pool.get_num_free_blocks() == free - 7, "seven blocks are held for the copy"
    # Every other block is used and used again; then the copy writes after all.
    for number in range(12):
        run_alone(engine, f"later-{number}", [300 + 40 * number + i for i in range(30)])
    engine.load._open[job_id].cancelled = False
    engine.load.finish(job_id)
    engine.step()
    engine.step()
    assert pool.get_num_free_blocks() == free
    for number in range(12):
        run_alone(engine, f"again-{number}", [300 + 40 * number + i for i in range(30)])
    engine.check()


def run_alone(engine, request_id: str, prompt: list[int]) -> None:
    engine.add(request_id, prompt, 2)
    for _ in range(12):
        engine.step()
        for held in [job for job in engine.load.held if job not in engine.load.wedged]:
            engine.load.finish(held)
    assert engine.outputs[request_id] == PatternModel.answer(prompt, 2)
