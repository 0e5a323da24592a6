"""A short simulation, and whether one can fail: what is broken on purpose has to be found."""

from typing import Any

import pytest

from kvtide.jobs import Direction
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.scheduler.fences import Fences
from kvtide.scheduler.lookup import Found
from kvtide.scheduler.open_jobs import TransferJobStatus
from kvtide.transfer.engine import OffloadingWorker
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.vllm.testing import sim
from kvtide.vllm.testing.configuration import CONFIGURATIONS, Configuration
from kvtide.vllm.testing.walk import Walk

SMALL = [one for one in CONFIGURATIONS if one.small and one.policy == "lru"][::4]


def found(configurations: list[Configuration], steps: int = 600) -> set[str]:
    """Kinds of failure of one walk through each."""
    failures = [sim.walk(one.name, 1, steps)[1] for one in configurations]
    return {failure.kind for failure in failures if failure is not None}


def test_a_short_simulation_breaks_no_promise() -> None:
    some = CONFIGURATIONS[::4]
    total = sim.simulate(sim.plan(some, 1, 150 * len(some), 150), 1)
    assert total.failures == []
    report = total.report
    assert report.token_steps >= 0.6 * report.steps
    assert report.loads > 100
    assert report.hit_tokens > 1000


def test_a_walk_is_repeated_by_its_seed() -> None:
    name = "async/v2/2/small/arc"
    one, other = sim.walk(name, 5, 300), sim.walk(name, 5, 300)
    assert one == other
    assert one[0].happened != sim.walk(name, 6, 300)[0].happened


def test_blocks_reused_under_a_copy_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fences, "conflicts", lambda self, block_ids: set())
    assert "wrong bytes" in found(SMALL)


def test_a_failed_store_taken_for_a_good_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = CPUOffloadingManager.complete_store

    def believe(self: Any, run: Any, spec: Any, ctx: Any, success: bool) -> None:
        complete(self, run, spec, ctx, success=True)

    monkeypatch.setattr(CPUOffloadingManager, "complete_store", believe)
    assert "wrong bytes" in found(SMALL)


def test_the_first_rank_speaking_for_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: TransferJobStatus, hop_index: int, results: dict[int, Any]) -> bool:
        return True

    monkeypatch.setattr(TransferJobStatus, "answer", answer)
    assert "wrong bytes" in found([one for one in SMALL if one.rank_count > 1])


def test_a_pin_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUOffloadingManager, "complete_load", lambda self, run, spec, ctx: None)
    assert "leaks" in found(SMALL)


def test_a_load_that_is_never_begun_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = OffloadingWorker._submit

    def lose(self: OffloadingWorker, job: Any) -> None:
        if job.direction is not Direction.LOAD or job.job_id % 5:
            submit(self, job)

    monkeypatch.setattr(OffloadingWorker, "_submit", lose)
    assert "hangs" in found(SMALL)


def test_a_cache_that_is_only_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvtide.scheduler.scheduler.look_up",
        lambda state, geometry, manager, computed_tokens: Found(computed_tokens, later=False),
    )
    assert found(SMALL) == {"leaks"}


def test_a_hook_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = SingleDirectionOffloadingHandler.wait

    def again_and_again(self: Any, job_ids: Any, timeout_s: float) -> bool:
        while not wait(self, job_ids, timeout_s):
            pass
        return True

    monkeypatch.setattr(SingleDirectionOffloadingHandler, "wait", again_and_again)
    assert found(SMALL) == {"hangs"}


def test_a_step_that_computes_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(self: Walk, pause_s: float) -> None:
        while True:
            pass

    monkeypatch.setattr(Walk, "_turn", turn)
    monkeypatch.setattr(sim, "STEP_CPU_S", 0.2)
    _, failure = sim.walk(SMALL[0].name, 1, 100)
    assert failure is not None
    assert failure.kind == "hangs"
    assert "computed for" in failure.text
