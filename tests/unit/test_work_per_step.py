"""What one step does at most, what it does not do again, and in which pieces what is generated is stored."""

import pytest
from fakes import FakeRequest, FakeStep

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import (
    Direction,
    HopResult,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    PoolReport,
    ReqContext,
)
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.scheduler import scheduler as scheduler_module
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig

GROUP = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 1, 4)
PIECE_TOKENS = 16  # four chunks


class Half:
    """The scheduler half, with one rank that has copied whatever it was told by the next step."""

    def __init__(self, slots: int = 4096, **limits) -> None:
        self.manager = CPUOffloadingManager(LRUPolicy())
        config = SchedulerOffloadConfig(KVGeometry((GROUP,)), generated_store_tokens=PIECE_TOKENS, **limits)
        self.scheduler = OffloadingConnectorScheduler(config, self.manager, MetricsDelta())
        self.answer(OffloadingWorkerMetadata(pools={0: PoolReport(slots, slots, 64)}))
        self._blocks = 1

    def answer(self, answers: OffloadingWorkerMetadata | None) -> None:
        self.scheduler.update_connector_output(answers, 0.0)

    def admit(self, name: str, tokens: list[int], **fields) -> FakeRequest:
        request = FakeRequest(name, tokens, **fields)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0, 0.0)[0] is not None
        table = [list(range(self._blocks, self._blocks + 64))]
        self._blocks += 64
        self.scheduler.update_state_after_alloc(request, tuple(table), 0, 0.0)
        return request

    def step(self, **scheduled: int) -> OffloadingConnectorMetadata:
        return self.scheduler.build_connector_meta(FakeStep(scheduled), 0.0)

    def ready(self, request: FakeRequest) -> int:
        chunks = len(request.block_hashes)
        return self.manager.lookup(GROUP.run(request.block_hashes, 0, chunks), ReqContext("?")).ready_count


def done(step: OffloadingConnectorMetadata) -> OffloadingWorkerMetadata:
    return OffloadingWorkerMetadata(results={(job.job_id, 0): {0: HopResult.DONE} for job in step.jobs})


def stored_chunks(step: OffloadingConnectorMetadata) -> list[int]:
    return [len(job.hops[0].target.slots) for job in step.jobs if job.direction is Direction.STORE]


def decode(half: Half, request: FakeRequest) -> OffloadingConnectorMetadata:
    """One token: its KV is computed in this step, the next one is known after it."""
    step = half.step(**{request.request_id: 1})
    request.num_computed_tokens += 1
    tokens = [*request.tokens, 7]
    grown = FakeRequest(request.request_id, tokens)
    request.tokens, request.block_hashes = tokens, grown.block_hashes
    return step


def test_a_prompt_is_stored_as_it_is_computed_and_what_is_generated_in_pieces_and_at_the_end() -> None:
    half = Half()
    request = half.admit("a", list(range(11)))
    assert stored_chunks(half.step(a=11)) == [2]
    request.num_computed_tokens = 11
    found = [stored_chunks(decode(half, request)) for _ in range(26)]
    # Chunks 2 to 5 are whole with token 24, which is computed by the 13th step; 6 to 9 would be by the 29th.
    assert [index for index, chunks in enumerate(found) if chunks] == [13]
    assert found[13] == [4]
    half.scheduler.request_finished_all_groups(request, (list(range(1, 11)),), 0.0)
    assert stored_chunks(half.step()) == [3], "37 tokens are computed: nine chunks"


def test_generated_tokens_that_are_not_to_be_stored_are_not_looked_at_again() -> None:
    half = Half(offload_prompt_only=True)
    request = half.admit("a", list(range(9)))
    assert stored_chunks(half.step(a=9)) == [2]
    request.num_computed_tokens = 9
    assert not any(stored_chunks(decode(half, request)) for _ in range(40))
    half.scheduler.request_finished_all_groups(request, (list(range(1, 14)),), 0.0)
    assert stored_chunks(half.step()) == []


@pytest.fixture
def three_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "STORES_PER_STEP", 3)


@pytest.mark.usefixtures("three_per_step")
def test_a_step_plans_a_bounded_number_of_stores_and_the_next_one_the_others() -> None:
    half = Half()
    requests = [half.admit(f"r{index}", [index] * 9) for index in range(8)]
    step = half.step(**{request.request_id: 9 for request in requests})
    assert stored_chunks(step) == [2, 2, 2]
    for request in requests:
        request.num_computed_tokens = 9
    assert stored_chunks(half.step(**{request.request_id: 1 for request in requests})) == [2, 2, 2]
    assert stored_chunks(half.step(**{request.request_id: 1 for request in requests})) == [2, 2]


@pytest.mark.usefixtures("three_per_step")
def test_a_step_makes_a_bounded_number_of_stores_ready_and_the_engine_is_kept_awake_for_the_others() -> None:
    half = Half()
    requests = [half.admit(f"r{index}", [index] * 9) for index in range(8)]
    half.step(**{request.request_id: 1 for request in requests})
    for request in requests:
        # The end of a request plans its store whatever the step has room for.
        request.num_computed_tokens = 9
        half.scheduler.request_finished_all_groups(request, (list(range(1, 4)),), 0.0)
    step = half.step()
    assert len(step.jobs) == 8
    half.answer(done(step))
    assert sum(half.ready(request) == 2 for request in requests) == 3
    assert not half.scheduler._jobs.fences.job_ids(), "the copies have ended: their blocks are free"
    assert half.scheduler.has_pending_push_work(0.0)
    half.answer(None)
    half.answer(None)
    assert all(half.ready(request) == 2 for request in requests)
    assert not half.scheduler.has_pending_push_work(0.0)
    half.scheduler.check_invariants()


@pytest.mark.usefixtures("three_per_step")
def test_a_reset_before_copied_stores_are_made_ready_forgets_them() -> None:
    half = Half(slots=64)
    requests = [half.admit(f"r{index}", [index] * 9) for index in range(8)]
    half.step(**{request.request_id: 1 for request in requests})
    for request in requests:
        request.num_computed_tokens = 9
        half.scheduler.request_finished_all_groups(request, (list(range(1, 4)),), 0.0)
    half.answer(done(half.step()))
    half.scheduler.reset_cache()
    for _ in range(3):
        half.answer(None)
    assert not any(half.ready(request) for request in requests)
    assert half.manager.used_count == 0
    half.scheduler.check_invariants()


def test_who_waits_for_anothers_load_is_told_so_without_asking_the_catalog() -> None:
    half = Half()
    tokens = list(range(41))
    half.admit("first", tokens)
    step = half.step(first=41)
    half.answer(done(step))
    loading = FakeRequest("loading", tokens)
    half.scheduler.on_new_request(loading)
    assert half.scheduler.get_num_new_matched_tokens(loading, 0, 0.0) == (40, True)
    half.scheduler.update_state_after_alloc(loading, (list(range(600, 610)),), 40, 0.0)
    load = half.step()
    waiting = FakeRequest("waiting", tokens)
    half.scheduler.on_new_request(waiting)
    assert half.scheduler.get_num_new_matched_tokens(waiting, 0, 0.0) == (None, False)

    asked = []
    half.manager.lookup = lambda run, ctx: asked.append(run)  # type: ignore[method-assign]
    half.manager.residency_epoch += 1  # others store meanwhile
    assert half.scheduler.get_num_new_matched_tokens(waiting, 0, 0.1) == (None, False)
    assert not asked
    del half.manager.lookup
    # Its patience ends by the clock, and with the load.
    assert half.scheduler.get_num_new_matched_tokens(waiting, 0, 99.0) == (0, False)
    half.answer(done(load))
    assert half.scheduler.get_num_new_matched_tokens(waiting, 0, 99.0) == (40, True)


def test_a_store_that_never_ends_is_waited_for_no_longer_than_its_deadline() -> None:
    # vLLM #49829: every request whose prefix reached that chunk was deferred, for ever.
    half = Half(transfer_deadline_s=10.0)
    tokens = list(range(41))
    half.admit("first", tokens)
    store = half.step(first=41)

    def ask(name: str, now_s: float) -> tuple[int | None, bool]:
        request = FakeRequest(name, tokens)
        half.scheduler.on_new_request(request)
        return half.scheduler.get_num_new_matched_tokens(request, 0, now_s)

    assert ask("early", 1.0) == (None, False)
    half.scheduler.build_connector_meta(FakeStep({}), 14.0)
    assert ask("in time", 14.0) == (None, False), "the worker's answer may still be on its way"
    half.scheduler.build_connector_meta(FakeStep({}), 16.0)
    assert ask("late", 16.0) == (0, False)
    assert half.scheduler._jobs.fences.job_ids(), "what may still be read is not given away"
    used = half.manager.used_count
    assert used == 10

    # It can be stored anew meanwhile; when the first copy ends after all, its slots are free.
    again = half.admit("again", [*tokens, 1])
    assert sum(stored_chunks(half.step(again=41))) == 10
    half.answer(done(store))
    assert half.manager.used_count == 10
    assert half.ready(again) == 0
    half.scheduler.check_invariants()


def test_a_store_that_ended_is_never_overdue() -> None:
    half = Half(transfer_deadline_s=10.0)
    request = half.admit("first", list(range(41)))
    half.answer(done(half.step(first=41)))
    half.scheduler.build_connector_meta(FakeStep({}), 1000.0)
    assert half.ready(request) == 10


class FakePool:
    """References on blocks, as the engine's pool counts them."""

    def __init__(self, count: int) -> None:
        self.blocks = list(range(count))
        self.held = [0] * count

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.held[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.held[block] -= 1


def test_a_load_that_never_ends_is_given_up_and_nobody_gets_its_blocks_before_it_has() -> None:
    half, pool = Half(transfer_deadline_s=10.0), FakePool(700)
    half.scheduler.bind_block_pool(pool)
    tokens = list(range(41))
    half.admit("first", tokens)
    half.answer(done(half.step(first=41)))
    request = FakeRequest("loading", tokens)
    half.scheduler.on_new_request(request)
    assert half.scheduler.get_num_new_matched_tokens(request, 0, 0.0) == (40, True)
    half.scheduler.update_state_after_alloc(request, (list(range(600, 610)),), 40, 0.0)
    load = half.step()
    (job,) = load.jobs
    assert not half.scheduler.build_connector_meta(FakeStep({}), 14.0).jobs_to_give_up
    assert half.scheduler.build_connector_meta(FakeStep({}), 16.0).jobs_to_give_up == {job.job_id}
    assert [block for block in range(700) if pool.held[block]] == list(range(600, 610))
    # The request asks anew, is not offered another load and waits for nobody; nor does anyone else.
    assert half.scheduler.get_num_new_matched_tokens(request, 0, 17.0) == (0, False)
    other = FakeRequest("other", tokens)
    half.scheduler.on_new_request(other)
    assert half.scheduler.get_num_new_matched_tokens(other, 0, 17.0) == (40, True)
    assert half.manager.pinned_count == 10, "its source stays, too"
    half.scheduler.check_invariants()
    # It ends after all.
    half.answer(OffloadingWorkerMetadata(results={(job.job_id, 0): {0: HopResult.FAILED}}))
    assert not any(pool.held)
    assert half.manager.pinned_count == 0
    half.scheduler.check_invariants()
    assert not half.scheduler.build_connector_meta(FakeStep({}), 99.0).jobs_to_give_up


def test_an_idle_engine_does_not_wait_for_ever_for_a_reset_that_no_tier_makes_durable() -> None:
    half = Half()
    half.answer(OffloadingWorkerMetadata(generations={0: 0}))
    half.scheduler.reset_cache()
    assert half.scheduler.has_pending_push_work(0.0)
    half.step()
    assert half.scheduler.has_pending_push_work(60.0)
    assert not half.scheduler.has_pending_push_work(200.0)
