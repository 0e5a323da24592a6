"""LRU as vLLM has it and as kvtide has it, on one trace: the replay's figures are not a habit of ours."""

import random

import pytest
from traced import Prompt, traced
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvtide.sim.accesses import Accesses
from kvtide.sim.manager_only import manager_of, replay

POINT = 0.01


def replayed_by_vllm(accesses: Accesses, capacity: int) -> float:
    """The hit ratio of vLLM's own manager, called as its scheduler calls it for one request after another."""
    manager = CPUOffloadingManager(capacity, "lru")
    hits = 0
    for visit, (_, hashes) in enumerate(accesses.prompts()):
        keys, ctx = [OffloadKey(one + bytes(4)) for one in hashes], ReqContext(str(visit))
        manager.on_new_request(ctx)
        ready = 0
        while ready < len(keys) and manager.lookup(keys[ready], ctx) is LookupResult.HIT:
            ready += 1
        hits += ready
        manager.touch(keys, ctx)
        output = manager.prepare_store(keys, ctx)
        if output is not None:
            manager.complete_store(output.keys_to_store, ctx)
        manager.on_request_finished(ctx)
    return hits / accesses.access_count


def chats() -> list[Prompt]:
    """Turns of sessions that share beginnings and come back at times far apart."""
    chance = random.Random(11)
    sessions = [
        [chance.randrange(4), *chance.choices(range(9_999), k=chance.randrange(8))] for _ in range(300)
    ]
    asked = []
    for _ in range(1_500):
        session = sessions[int(chance.random() ** 1.5 * len(sessions))]
        session += chance.choices(range(9_999), k=chance.randrange(4))
        if len(session) > 40:
            del session[chance.randrange(1, 9) :]
        asked.append(tuple(session))
    return asked


def test_lru_hits_in_vllm_what_it_hits_here_to_the_block() -> None:
    trace = chats()
    accesses = traced(trace)
    ratios = []
    for share in (0.02, 0.05, 0.1, 0.2, 0.4):
        capacity = int(share * accesses.unique_count)
        assert capacity > max(map(len, trace))
        ours = replay(accesses, manager_of("lru", capacity)).hit_ratio
        assert ours == replayed_by_vllm(accesses, capacity), f"{share:.0%} of the blocks"
        ratios.append(ours)
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.15 < 0.5 < ratios[-1], "the trace tells sizes apart"


def test_where_a_prompt_does_not_fit_vllm_stores_none_of_it_and_the_difference_is_small() -> None:
    trace = chats()
    accesses = traced(trace)
    capacity = max(map(len, trace)) * 3 // 4
    ours = replay(accesses, manager_of("lru", capacity)).hit_ratio
    assert ours == pytest.approx(replayed_by_vllm(accesses, capacity), abs=0.5 * POINT)
