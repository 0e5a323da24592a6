"""The modelled engine of a replay calls the scheduler half as vLLM's own scheduler does, block by block.

The same requests arrive before the same steps: once at vLLM's real ``Scheduler`` with its block pool around
the connector, once at ``kvtide.sim``. Copies take as many steps in both.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.sim.serving import ServingSetup, serve
from kvtide.sim.serving_queue import EngineLimits, EngineQueue
from kvtide.sim.serving_rates import EngineRates
from kvtide.sim.serving_result import ServingResult
from kvtide.sim.traces.request import TraceRequest
from kvtide.testing.workloads import chained_hashes
from kvtide.vllm.testing import Harness
from kvtide.vllm.testing.model import PatternModel

BLOCK = 4
TOKEN_BYTES = 10
# A step takes a second; a load is there when the step ends that has asked for it, a store a step later.
RATES = EngineRates(1e30, step_s=1.0, idle_s=1.0, store_bytes_per_s=1e9, load_bytes_per_s=1e30)

Calls = list[tuple[object, ...]]
Drawn = list[tuple[int, list[int], int]]
"""Requests: before which step, which tokens, how many new ones."""


def drawn(chance: random.Random, count: int) -> Drawn:
    step, sessions, requests = 0, [[1, 2, 3, 4, 5, 6]], []
    for number in range(count):
        step += chance.choice((0, 0, 1, 2, 7))
        if chance.random() < 0.4:
            sessions.append([*sessions[0][: chance.randrange(7)], 1000 + 50 * number])
        session = chance.choice(sessions)
        session += [1001 + 50 * number + at for at in range(chance.randrange(1, 20))]
        new_tokens = chance.choice((1, 2, 9, 20))
        requests.append((step, list(session[:60]), new_tokens))
        session += PatternModel.answer(session, new_tokens)[: chance.choice((0, 20))]
    return requests


def listening(patch: pytest.MonkeyPatch) -> Calls:
    """Note what is asked, answered and told: which request, how many tokens, which blocks."""
    calls: Calls = []
    half = OffloadingConnectorScheduler
    ask, admit, build = (
        half.get_num_new_matched_tokens,
        half.update_state_after_alloc,
        half.build_connector_meta,
    )

    def asked(self: Any, request: Any, own: int, now_s: float) -> Any:
        answer = ask(self, request, own, now_s)
        calls.append(("asked", request.request_id, own, answer))
        return answer

    def admitted(self: Any, request: Any, blocks: Any, loaded: int, now_s: float) -> None:
        calls.append(("admitted", request.request_id, loaded, [list(of_group) for of_group in blocks]))
        admit(self, request, blocks, loaded, now_s)

    def built(self: Any, step: Any, now_s: float) -> Any:
        told = build(self, step, now_s)
        jobs = [(job.direction, job.request_id, list(job.device_spec().block_ids)) for job in told.jobs]
        if jobs or step.num_scheduled_tokens:
            numbers = dict(step.num_scheduled_tokens)
            calls.append(("step", numbers, list(step.preempted_req_ids or ()), jobs, told.jobs_to_flush))
        return told

    patch.setattr(half, "get_num_new_matched_tokens", asked)
    patch.setattr(half, "update_state_after_alloc", admitted)
    patch.setattr(half, "build_connector_meta", built)
    return calls


def run_vllm(folder: Path, requests: Drawn, **shape: Any) -> int:
    """Run them through vLLM's scheduler; says how many slots host memory has."""
    engine = Harness(folder, tokens_per_block=BLOCK, defer_limit_s=0, eviction_policy="lru", **shape)
    engine.store.auto_finish = engine.load.auto_finish = True
    left, at = list(enumerate(requests)), 0
    while left or engine.busy:
        while left and left[0][1][0] <= at:
            number, (_, prompt, new_tokens) = left.pop(0)
            engine.add(str(number), prompt, new_tokens)
        if engine.scheduler.has_requests():
            engine.step()
            at += 1
        else:
            at = left[0][1][0]
    engine.check()
    return int(engine.connector._deciding._manager.capacity)


def run_model(requests: Drawn, setup: ServingSetup) -> ServingResult:
    trace = []
    for step, prompt, new_tokens in requests:
        names = names_of([*prompt, *PatternModel.answer(prompt, new_tokens)])
        whole = len(prompt) // BLOCK
        trace.append(
            TraceRequest(
                float(step), names[:whole], BLOCK, len(prompt), new_tokens, generated_hashes=names[whole:]
            )
        )
    return serve(trace, setup)


def names_of(tokens: list[int]) -> list[bytes]:
    whole = len(tokens) - len(tokens) % BLOCK
    blocks = [hash(tuple(tokens[at : at + BLOCK])) & 0xFFFFFFFF for at in range(0, whole, BLOCK)]
    return chained_hashes(blocks, 16)


def test_every_call_is_the_one_that_vllms_scheduler_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"loaded": 0, "preempted": 0, "in pieces": 0, "evicted": 0}
    for seed, budget_tokens, num_blocks, host_pages in (
        (1, 200, 26, 1),
        (5, 200, 26, 8),
        (8, 32, 26, 1),
        (3, 11, 40, 1),
    ):
        requests = drawn(random.Random(seed), 40)
        folder = tmp_path / str(seed)
        folder.mkdir()
        with monkeypatch.context() as patch:
            real = listening(patch)
            slots = run_vllm(
                folder, requests, num_blocks=num_blocks, budget_tokens=budget_tokens, host_pages=host_pages
            )
        limits = EngineLimits(num_blocks, budget_tokens, min(16, budget_tokens))
        setup = ServingSetup(TOKEN_BYTES, slots * BLOCK * TOKEN_BYTES, limits, RATES, defer_limit_s=0.0)
        with monkeypatch.context() as patch:
            modelled = listening(patch)
            # Several steps as one are told as one.
            patch.setattr(EngineQueue, "decode_more", lambda *_: None)
            result = run_model(requests, setup)
        pairs = enumerate(zip(modelled, real, strict=False))
        first = next((at for at, (one, other) in pairs if one != other), -1)
        assert first < 0, f"seed {seed}, call {first}: {modelled[first]}, vLLM: {real[first]}"
        assert len(modelled) == len(real)
        seen["loaded"] += result.hit_tokens["host"]
        seen["preempted"] += result.preemptions
        seen["in pieces"] += budget_tokens < 60
        seen["evicted"] += result.evicted_chunks["host"]
        assert result.request_count == len(requests)
    assert all(seen.values()), seen
