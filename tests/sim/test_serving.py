"""The whole path in virtual time: what comes out is worked out by hand, or by other code."""

import json
import random
from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.manager.lower import Demotion
from kvtide.sim.serving import ServingSetup, TierSetup, policy_names, serve
from kvtide.sim.serving_media import MediumRates
from kvtide.sim.serving_queue import EngineLimits
from kvtide.sim.serving_rates import EngineRates
from kvtide.sim.traces.request import TraceRequest
from kvtide.testing.workloads import chained_hashes

BLOCK = 16
TOKEN_BYTES = 10
CHUNK_BYTES = BLOCK * TOKEN_BYTES
RATES = EngineRates(
    prompt_tokens_per_s=1000.0, step_s=0.01, store_bytes_per_s=1e6, load_bytes_per_s=16_000.0, idle_s=0.001
)
LARGE = 1 << 20


def asked(arrival_s: float, blocks: list[int], output_tokens: int = 1, more_tokens: int = 1) -> TraceRequest:
    """Ask with blocks that are told apart by numbers; the prompt ends ``more_tokens`` behind them."""
    hashes = chained_hashes(blocks, 8)
    return TraceRequest(arrival_s, hashes, BLOCK, len(blocks) * BLOCK + more_tokens, output_tokens)


def setup_of(host_chunks: int = 100, engine_blocks: int = 100, **changes: object) -> ServingSetup:
    setup = ServingSetup(TOKEN_BYTES, host_chunks * CHUNK_BYTES, EngineLimits(engine_blocks), RATES)
    return replace(setup, **changes)  # type: ignore[arg-type]


def disk_of(chunks: int, **changes: object) -> TierSetup:
    disk = TierSetup("disk", chunks * (CHUNK_BYTES + 4096), MediumRates(1e6, call_s=0.0))
    return replace(disk, **changes)  # type: ignore[arg-type]


def test_a_cold_prompt_takes_a_step_and_its_tokens() -> None:
    result = serve([asked(5.0, [1, 2, 3])], setup_of())
    assert result.ttft_by_request_s == [pytest.approx(0.01 + 49 / 1000)]
    assert result.computed_tokens == 49
    assert result.hit_tokens == {"engine": 0, "host": 0}
    assert result.written_bytes == {"host": 3 * CHUNK_BYTES}


def test_a_prompt_that_the_engine_still_has_is_computed_from_its_last_block_on() -> None:
    result = serve([asked(0.0, [1, 2, 3]), asked(1.0, [1, 2, 3])], setup_of())
    assert result.hit_tokens == {"engine": 48, "host": 0}
    assert result.ttft_by_request_s[1] == pytest.approx(0.01 + 1 / 1000)
    assert result.computed_tokens == 49 + 1


def test_a_prompt_pushed_out_of_the_engine_is_loaded_at_the_pace_of_the_bus() -> None:
    # An engine of four blocks: the second prompt takes those of the first.
    trace = [asked(0.0, [1, 2, 3]), asked(1.0, [4, 5, 6]), asked(2.0, [1, 2, 3])]
    result = serve(trace, setup_of(engine_blocks=5))
    assert result.hit_tokens == {"engine": 0, "host": 48}
    # 480 bytes at 16,000 a second; then a step for the last token.
    assert result.ttft_by_request_s[2] == pytest.approx(0.03 + 0.01 + 0.001, abs=0.002)
    assert result.read_bytes == {"host": 3 * CHUNK_BYTES}


def test_what_host_memory_has_let_go_comes_from_disk_and_counts_as_such() -> None:
    trace = [asked(float(at), [at * 10 + part for part in range(3)]) for at in range(6)]
    trace.append(asked(10.0, [0, 1, 2]))
    setup = setup_of(host_chunks=8, engine_blocks=6, promotion_share=1.0)
    without = serve(trace, setup)
    assert without.hit_tokens == {"engine": 0, "host": 0}
    result = serve(trace, replace(setup, tiers=(disk_of(100),)))
    assert result.hit_tokens == {"engine": 0, "host": 0, "disk": 48}
    assert result.written_bytes["disk"] == 18 * CHUNK_BYTES
    assert result.read_bytes["disk"] == 3 * CHUNK_BYTES
    assert result.evicted_chunks["host"] > 0


def test_a_disk_that_is_slower_than_computing_is_passed_over() -> None:
    trace = [asked(float(at), [at * 10 + part for part in range(3)], more_tokens=16) for at in range(6)]
    trace.append(asked(100.0, [0, 1, 2]))
    slow = disk_of(100, rates=MediumRates(100.0))
    result = serve(trace, setup_of(host_chunks=8, engine_blocks=6, promotion_share=1.0, tiers=(slow,)))
    assert result.hit_tokens["disk"] == 0
    assert result.passed_over_chunks == {"disk": 3}
    assert result.ttft_by_request_s[-1] == pytest.approx(0.01 + 49 / 1000)


@pytest.mark.parametrize("demotion", Demotion)
def test_each_way_to_write_on_ends_with_balanced_books(demotion: Demotion) -> None:
    chance = random.Random(5)
    tiers = (disk_of(30, demotion=demotion, eviction_policy="arc"), replace(disk_of(60), name="shelf"))
    result = serve(walk(chance, 150), setup_of(20, 40, tiers=tiers, promotion_share=0.5))
    assert result.hit_tokens["host"] > 0
    assert result.hit_tokens["disk"] + result.hit_tokens["shelf"] > 0


def test_requests_queue_behind_each_other_and_share_steps() -> None:
    rates = replace(RATES, decode_s=0.001)
    limits = EngineLimits(100, step_tokens=20)
    result = serve([asked(0.0, [1], 3), asked(0.0, [2], 3)], setup_of(engine=limits, rates=rates))
    # 17 tokens and 3 of the second prompt; the first decodes beside the other 14.
    first, second = result.ttft_by_request_s
    assert first == pytest.approx(0.01 + 20 / 1000)
    assert second - first == pytest.approx(0.01 + 14 / 1000 + 0.001)


def test_decode_steps_taken_as_one_take_the_time_of_all() -> None:
    rates = replace(RATES, decode_s=0.002, decode_pair_s=1e-5)
    long = asked(0.0, [1], 101)
    alone = serve([long], setup_of(rates=rates))
    # Each step looks at all tokens there are: 18 in the first of the hundred.
    expected_s = 0.01 + 17 / 1000 + sum(0.012 + 1e-5 * (18 + at) for at in range(100))
    assert alone.busy_s == pytest.approx(expected_s)
    # A neighbour who arrives meanwhile is let on between two of them.
    both = serve([long, asked(0.5, [7, 8])], setup_of(rates=rates))
    assert 0.012 < both.ttft_by_request_s[1] - (0.01 + 33 / 1000) < 0.012 + 0.015


def test_an_engine_without_room_preempts_the_last_and_all_end() -> None:
    # Two of 4 blocks that grow to 7 each, in 10 blocks.
    trace = [asked(0.0, [1, 2, 3], 60, 15), asked(0.0, [4, 5, 6], 60, 15)]
    result = serve(trace, setup_of(engine_blocks=11))
    assert result.preemptions > 0
    assert result.request_count == 2
    assert result.computed_tokens > 2 * 63


def test_what_an_answer_says_is_hit_where_the_trace_names_it() -> None:
    names = chained_hashes([1, 2, 3, 4], 8)
    first = TraceRequest(0.0, names[:1], BLOCK, 30, 40, generated_hashes=names[1:4])
    second = TraceRequest(100.0, names, BLOCK, 70, 1)
    for engine_blocks in (100, 8):
        between = asked(50.0, [9, 8, 7, 6, 5])
        result = serve([first, between, second], setup_of(engine_blocks=engine_blocks))
        # 30 + 40 tokens, the last of which has no KV: 4 blocks.
        assert sum(result.hit_tokens.values()) == 64
        assert (result.hit_tokens["engine"] == 64) == (engine_blocks == 100)


def test_what_a_trace_does_not_name_is_not_kept() -> None:
    result = serve([asked(0.0, [1], 200)], setup_of())
    assert result.written_bytes == {"host": CHUNK_BYTES}


def test_a_burst_for_one_prefix_loads_it_once() -> None:
    trace = [asked(0.0, [1, 2, 3]), asked(1.0, [4, 5, 6, 7])]
    trace += [asked(2.0, [1, 2, 3, 10 + number]) for number in range(4)]
    result = serve(trace, setup_of(engine_blocks=24))
    crowded = serve(trace, setup_of(engine_blocks=8))
    assert result.hit_tokens["engine"] + result.hit_tokens["host"] == 4 * 48
    assert crowded.request_count == 6
    assert result.read_bytes["host"] <= 3 * CHUNK_BYTES


def test_a_bus_that_is_stuck_costs_hits_and_no_request() -> None:
    rates = replace(RATES, load_bytes_per_s=1.0)
    trace = [asked(0.0, [1, 2, 3]), asked(1.0, list(range(10, 17))), asked(2.0, [1, 2, 3])]
    result = serve(trace, setup_of(engine_blocks=9, rates=rates, transfer_deadline_s=10.0))
    # 480 s for the copy: given up when it is overdue, and computed in other blocks.
    assert result.request_count == 3
    assert 10.0 < result.ttft_by_request_s[2] < 20.0
    assert result.hit_tokens["host"] == 0


def test_no_host_memory_to_speak_of_is_as_good_as_none() -> None:
    trace = [asked(0.0, [1, 2, 3]), asked(1.0, [4, 5, 6]), asked(2.0, [1, 2, 3])]
    result = serve(trace, setup_of(host_chunks=1, engine_blocks=6))
    assert result.hit_tokens["host"] <= BLOCK


def walk(chance: random.Random, count: int) -> list[TraceRequest]:
    """Draw sessions that go on and begin anew."""
    now_s, sessions, trace = 0.0, [[1], [2]], []
    for number in range(count):
        now_s += chance.choice((0.0, 0.01, 0.1, 1.0))
        if chance.random() < 0.2:
            sessions.append([*sessions[0][:1], 100 + number])
        session = chance.choice(sessions)
        session += [1000 + number * 10 + part for part in range(chance.randrange(3))]
        del session[12:]
        trace.append(asked(now_s, session, chance.choice((0, 1, 5, 60)), chance.randrange(BLOCK)))
    return trace


class NaiveEngineCache:
    """What an engine alone hits that is asked one thing at a time: blocks in the order of their release."""

    def __init__(self, block_count: int) -> None:
        self._size = block_count
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, request: TraceRequest) -> int:
        names = list(request.block_hashes)
        hits = 0
        for name in names[: (request.prompt_tokens - 1) // BLOCK]:
            if name not in self._kept:
                break
            hits += 1
        last = request.prompt_tokens + max(1, request.output_tokens) - 1
        others = -(-last // BLOCK) - len(names)
        for name in names:
            self._kept.pop(name, None)
        while len(self._kept) + len(names) + others > self._size:
            self._kept.popitem(last=False)
        for name in reversed(names):
            self._kept[name] = None
        return hits * BLOCK


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(20, 60))
def test_one_at_a_time_the_engines_own_hits_are_those_of_a_naive_cache(
    chance: random.Random, block_count: int
) -> None:
    # A prompt that ends with a block computes that again, beside the one that is there: a block more.
    trace = [
        replace(one, arrival_s=at * 1000.0, prompt_tokens=len(one.block_hashes) * BLOCK + 1)
        for at, one in enumerate(walk(chance, 40))
    ]
    # Host memory that takes nothing: its only slot is not worth a load.
    result = serve(trace, setup_of(1, block_count + 1, store_threshold=64))
    naive = NaiveEngineCache(block_count)
    assert [own for own, _ in result.hit_tokens_by_request] == [naive.ask(one) for one in trace]


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_asked_all_end_and_all_books_balance(chance: random.Random) -> None:
    trace = walk(chance, 60)
    tiers = tuple(
        disk_of(
            chance.choice((2, 20, 200)),
            name=name,
            rates=MediumRates(chance.choice((1e3, 1e6)), chance.choice((0.0, 0.01)), chance.choice((1, 4))),
            demotion=chance.choice(list(Demotion)),
            queue_bytes=chance.choice((5000, 1 << 30)),
        )
        for name in ("disk", "shelf")[: chance.randrange(3)]
    )
    setup = setup_of(
        chance.choice((1, 5, 30, 300)),
        engine=EngineLimits(chance.choice((20, 50)), chance.choice((7, 32, 500)), chance.choice((1, 2, 20))),
        tiers=tiers,
        policy=chance.choice(policy_names()),
        blocks_per_chunk=chance.choice((1, 1, 2)),
        store_queue=chance.choice((CHUNK_BYTES * 2, 1 << 30)),
        rates=replace(RATES, load_bytes_per_s=chance.choice((50.0, 1e4, 1e7))),
        transfer_deadline_s=chance.choice((0.5, 30.0)),
    )
    try:
        result = serve(trace, setup)
    except ConfigError as error:
        assert error.setting == "host_memory"  # noqa: PT017 - two blocks a chunk, room for one
        return
    assert result.request_count == len(trace)
    assert all(seconds > 0 for seconds in result.ttft_by_request_s)
    prompt_tokens = sum(one.prompt_tokens for one in trace)
    if not result.preemptions and setup.rates.load_bytes_per_s > 100:
        assert result.computed_tokens + sum(result.hit_tokens.values()) == prompt_tokens
    assert result.computed_tokens >= len(trace)
    assert json.loads(json.dumps(result.as_json()))["request_count"] == len(trace)


def test_the_same_twice_is_the_same() -> None:
    trace = walk(random.Random(3), 80)
    setup = setup_of(20, 40, tiers=(disk_of(50),))
    one, other = serve(trace, setup), serve(trace, setup)
    assert one == other


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"policy": "mru"}, "policy"),
        ({"host_memory": 10}, "host_memory"),
        ({"tiers": (disk_of(1, capacity_bytes=9),)}, "disk"),
        ({"tiers": (disk_of(1, eviction_policy=""),)}, "disk.eviction_policy"),
        ({"engine": EngineLimits(3)}, "engine_blocks"),
        ({"engine": EngineLimits(1)}, "engine_blocks"),
        ({"bytes_per_token": 0}, "bytes_per_token"),
        ({"arrival_factor": float("nan")}, "arrival_factor"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, object], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve([asked(0.0, [1, 2, 3])], setup_of(**changes))
    assert caught.value.setting == setting


def test_traces_of_nothing_or_of_two_kinds_of_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        serve([], setup_of())
    other = TraceRequest(0.0, (), 512, 3)
    with pytest.raises(ConfigError, match=r"blocks of \[16, 512\] tokens"):
        serve([asked(0.0, [1]), other], setup_of())


def test_arrivals_further_apart_wait_less() -> None:
    trace = [asked(at * 0.01, [at]) for at in range(20)]
    rushed, relaxed = serve(trace, setup_of()), serve(trace, setup_of(arrival_factor=10.0))
    assert relaxed.ttft_s["p99"] < rushed.ttft_s["p99"]


def test_a_prompt_without_a_whole_block_is_served() -> None:
    result = serve([TraceRequest(0.0, (), BLOCK, 3, 40), TraceRequest(0.0, (), BLOCK, 1, 0)], setup_of())
    assert result.request_count == 2
    assert serve([TraceRequest(0.0, (), BLOCK, 0, 3)], setup_of()).request_count == 1
    assert result.token_hit_ratio == result.block_hit_ratio == 0
