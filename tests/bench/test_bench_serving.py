"""The judge of ``serving`` on planted samples, its prompts, and the yardstick's copies byte by byte."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from benchmarks import serving as bench
from benchmarks.frame.engine_child import living_children_s
from benchmarks.frame.registry import UnfitError
from benchmarks.frame.rounds import rounds
from benchmarks.serve import vocabulary as words
from benchmarks.serve.prompts import Prompts
from benchmarks.serve.vocabulary import (
    COLD,
    CONNECTED,
    HALF,
    LOADS,
    LONG,
    MOST,
    NO_HITS,
    STOCK,
    WARM,
    WITH,
    WITHOUT,
)

from kvtide.config import KVTideConfig
from kvtide.spec import cpu_copiers

NOISE = (1.00, 0.99, 1.01, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00, 1.00)
THROUGHPUT, LOWER_BOUND, CPU, WARM_TTFT, WARM_SPEED, LONG_TTFT, LONG_SPEED = range(7)

Samples = list[dict[str, Any]]
Factor = Callable[[str, int], float]
"""How much longer kvtide takes, by part and round."""


def one(part: str, share: int, index: int, arm: str, place: int, wall_s: float) -> dict[str, Any]:
    load = LOADS[part]
    prefix_tokens = 0 if arm == WITHOUT else load.prefix_tokens(share)
    return {
        "part": part,
        "share": share,
        "session": 0,
        "round": index,
        "place": place,
        "arm": arm,
        "wall_s": wall_s,
        "ttft_s": [wall_s / 4 * (1 + request) for request in range(load.requests)],
        "cpu_s": 2 * wall_s,
        "idle_s": 5.0,
        "idle_cpu_s": 0.05,
        "output_tokens": load.requests * load.output_tokens,
        "cached_tokens": load.requests * prefix_tokens,
        "preemptions": 0.0,
        "stored_chunks": 204.0 if arm == WITH else 0.0,
        "evicted_chunks": 204.0 if arm == WITH else 0.0,
        "others_cores": 0.02,
        "stolen_cores": 0.0,
    }


def planted(longer: Factor = lambda part, index: 1.0, stock: float = 1.2, count: int = 12) -> Samples:
    """Samples in which kvtide takes ``longer`` times what none, or a ``stock``-th of stock, takes."""
    samples = []
    for part, share, arms in (
        (COLD, NO_HITS, words.COLD_ARMS),
        (WARM, MOST, CONNECTED),
        (LONG, MOST, CONNECTED),
    ):
        for index, order in rounds(arms, count):
            base_s = 4.0 * NOISE[index % len(NOISE)]
            factors = {WITH: longer(part, index), STOCK: stock, WITHOUT: 1.0}
            samples += [
                one(part, share, index, arm, place, base_s * factors[arm]) for place, arm in enumerate(order)
            ]
    return samples


def met(samples: Samples) -> list[bool]:
    return [bar.met for bar in bench.judge(samples).bars]


def slower(part: str, factor: float) -> Factor:
    return lambda of, index: factor if of == part else 1.0


def test_equal_arms_have_a_ratio_of_one_and_miss_only_what_promises_more() -> None:
    bars = bench.judge(planted(stock=1.0)).bars
    assert [bar.ratio for bar in bars] == pytest.approx([1] * 7)
    assert [bar.met for bar in bars] == [True] * 6 + [False]


def test_the_bars_are_those_that_were_promised() -> None:
    assert [(bar.bar, bar.sense.value) for bar in bench.judge(planted()).bars] == [
        (0.98, "at least"),
        (0.95, "at least"),
        (1.02, "at most"),
        (0.98, "at least"),
        (0.98, "at least"),
        (0.98, "at least"),
        (1.1, "at least"),
    ]


def test_the_known_ratios_come_out() -> None:
    bars = bench.judge(planted(lambda part, index: {COLD: 1.25, WARM: 0.8, LONG: 0.5}[part], stock=1.2)).bars
    assert [bar.ratio for bar in bars] == pytest.approx([0.8, 0.8, 1.25, 1.5, 1.5, 2.4, 2.4])


@pytest.mark.parametrize(
    ("longer", "missed"),
    [
        (slower(COLD, 1 / 0.99), set()),
        (slower(COLD, 1 / 0.97), {THROUGHPUT, CPU}),
        (slower(COLD, 1 / 0.94), {THROUGHPUT, LOWER_BOUND, CPU}),
        (slower(WARM, 1.22), set()),
        (slower(WARM, 1.23), {WARM_TTFT, WARM_SPEED}),
        (slower(LONG, 1.09), set()),
        (slower(LONG, 1.1), {LONG_SPEED}),
        (slower(LONG, 1.23), {LONG_TTFT, LONG_SPEED}),
    ],
)
def test_each_bar_is_missed_where_it_should_be(longer: Factor, missed: set[int]) -> None:
    assert {index for index, fine in enumerate(met(planted(longer))) if not fine} == missed


def test_a_slow_first_token_alone_is_seen() -> None:
    samples = planted()
    for sample in samples:
        if sample["part"] == WARM and sample["arm"] == WITH:
            sample["ttft_s"] = [1.3 * seconds for seconds in sample["ttft_s"]]
    assert met(samples) == [True, True, True, False, True, True, True]


def test_more_processor_time_alone_is_seen() -> None:
    samples = planted()
    for sample in samples:
        if sample["part"] == COLD and sample["arm"] == WITH:
            sample["cpu_s"] *= 1.03
    assert met(samples) == [True, True, False, True, True, True, True]


def test_a_stall_in_some_pairs_is_seen_by_the_lower_bound_only() -> None:
    stalls = (1, 4, 6, 9, 11)
    samples = planted(lambda part, index: 1.5 if part == COLD and index in stalls else 1.0)
    assert met(samples)[:2] == [True, False]


def test_a_disturbed_round_does_not_count_whatever_it_says() -> None:
    samples = planted(lambda part, index: 3.0 if index < 2 else 1.0)
    for sample in samples:
        if sample["round"] < 2 and sample["arm"] == WITH:
            sample["others_cores"] = 0.5
    verdict = bench.judge(samples)
    assert [bar.ratio for bar in verdict.bars] == pytest.approx([1, 1, 1, 1.2, 1.2, 1.2, 1.2])
    assert sum("10 of 12" in note for note in verdict.notes) == 3


def test_without_enough_quiet_rounds_all_count_and_the_reader_is_told() -> None:
    samples = planted(slower(WARM, 1.5))
    for sample in samples:
        if sample["part"] == WARM:
            sample["stolen_cores"] = 0.5
    verdict = bench.judge(samples)
    assert verdict.bars[WARM_SPEED].ratio == pytest.approx(0.8)
    assert [note for note in verdict.notes if note.startswith("NOT A QUIET MACHINE")] == [
        "NOT A QUIET MACHINE: short prompts: only 0 of 12 rounds were undisturbed, so all count;"
        " a missed bar may be the neighbours'"
    ]


def test_fewer_hits_are_shown_and_judged_by_nobody() -> None:
    samples = planted()
    bars = bench.judge(samples).bars
    for part in (WARM, LONG):
        samples += [one(part, NO_HITS, 0, arm, place, 9.0) for place, arm in enumerate(words.ARMS)]
        samples += [one(part, HALF, 0, arm, place, 6.0) for place, arm in enumerate(CONNECTED)]
    verdict = bench.judge(samples)
    assert verdict.bars == bars
    assert len(verdict.plots) == 5
    assert "short prompts, 50 % hits, stock: TTFT 5,250 ms, 32 tokens/s, 62.5 CPU ms a token" in verdict.notes


def change(of: str, **values: Any) -> Callable[[Samples], None]:
    def apply(samples: Samples) -> None:
        next(one for one in samples if one["part"] == of and one["arm"] == WITH).update(values)

    return apply


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (change(COLD, cached_tokens=32), "32 tokens were hits; none may be"),
        (change(COLD, stored_chunks=0.0), "did not store and evict"),
        (change(COLD, evicted_chunks=0.0), "did not store and evict"),
        (change(COLD, output_tokens=383), "not do the same work"),
        (change(COLD, idle_cpu_s=0.5), "while it was not asked"),
        (change(COLD, arm=WITHOUT), "a sample of none too many"),
        (change(COLD, part="lukewarm"), "no part of this benchmark"),
        (change(WARM, cached_tokens=5152), "5152 tokens were hits; 5184 should be"),
        (change(WARM, output_tokens=191), "not do the same work"),
        (change(WARM, ttft_s=[0.1] * 5), "5 requests; 6 were asked"),
        (change(LONG, preemptions=1.0), "lost their blocks"),
        (change(LONG, idle_cpu_s=0.5), "while it was not asked"),
        (change(LONG, share=HALF), "tokens were hits; 128000 should be"),
        (lambda samples: samples.pop(), "no sample of"),
        (lambda samples: samples.__delitem__(slice(6, 24)), "3 pairs; 10 are needed"),
        (lambda samples: samples.__delitem__(slice(30, 48)), "short prompts: 3 rounds; 10 are needed"),
        (list.clear, "0 pairs; 10 are needed"),
    ],
)
def test_samples_of_something_else_are_not_judged(plant: Callable[[Samples], None], said: str) -> None:
    samples = planted()
    plant(samples)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


# -- what is asked ------------------------------------------------------------------------------------


def test_no_two_prompts_begin_alike_and_the_next_run_asks_the_same() -> None:
    def asked() -> list[tuple[int, ...]]:
        source = Prompts(LOADS[COLD], 512, 2)
        return [prompt for _ in range(4) for prompt in source.fresh().prompts]

    prompts = asked()
    assert len({prompt[: words.BLOCK_TOKENS] for prompt in prompts}) == len(prompts) == 24
    assert {len(prompt) for prompt in prompts} == {512}
    assert prompts == asked()


@pytest.mark.parametrize("part", [WARM, LONG])
@pytest.mark.parametrize("share", [HALF, MOST])
def test_a_share_is_one_of_whole_blocks(part: str, share: int) -> None:
    load = LOADS[part]
    assert load.prefix_tokens(share) % words.BLOCK_TOKENS == 0
    assert load.prefix_tokens(share) * 100 == share * load.prompt_tokens


@pytest.mark.parametrize("share", [HALF, MOST])
def test_a_hit_has_exactly_its_share_in_common_with_what_was_kept(share: int) -> None:
    load, source = LOADS[WARM], Prompts(LOADS[WARM], 512, 2)
    kept, first, second = source.keep(MOST), source.hits(share), source.hits(share)
    tokens = load.prefix_tokens(share)
    block = slice(tokens, tokens + words.BLOCK_TOKENS)
    for stored, one, other in zip(kept.prompts, first.prompts, second.prompts, strict=True):
        assert len(stored) >= load.prefix_tokens(MOST) + words.BLOCK_TOKENS
        assert len(one) == load.prompt_tokens
        assert stored[:tokens] == one[:tokens] == other[:tokens]
        assert len({stored[block], one[block], other[block]}) == 3
    assert first.forget, "else the engine's own cache would answer"


def test_the_pool_without_hits_is_smaller_than_what_two_batches_store() -> None:
    """Otherwise nothing would be evicted, and the judge would refuse the samples after minutes."""
    kv_bytes_per_token = 23_040  # 30 layers x 3 heads x 64 numbers x (key and value) x 2 bytes
    load = LOADS[COLD]
    batch_tokens = load.requests * (load.prompt_tokens + load.output_tokens)
    assert load.host_memory_mib << 20 < 2 * batch_tokens * kv_bytes_per_token


@pytest.mark.parametrize(("part", "kv_bytes_per_token"), [(WARM, 23_040), (LONG, 256)])
def test_a_round_does_not_push_out_what_its_hits_need(part: str, kv_bytes_per_token: int) -> None:
    load = LOADS[part]
    # What is kept, and a round with fewer hits: all new, half new, a tenth new.
    round_tokens = load.requests * (load.prefix_tokens(MOST) + 2 * load.prompt_tokens)
    assert round_tokens * kv_bytes_per_token < load.host_memory_mib << 20


@pytest.mark.parametrize("part", [COLD, WARM, LONG])
def test_the_requests_that_run_together_fit_the_engine_s_pool_and_no_others(part: str) -> None:
    """Preemptions would be measured otherwise, or at long contexts no queue."""
    load, arguments = LOADS[part], words.engine_arguments(part)
    blocks = arguments["num_gpu_blocks_override"] - 1  # vLLM keeps one
    assert load.prompt_tokens + load.output_tokens <= arguments["max_model_len"]
    assert blocks >= load.concurrent * load.context_blocks
    if part == LONG:
        prompt_blocks = load.prompt_tokens // words.BLOCK_TOKENS
        assert blocks < (load.concurrent + 1) * prompt_blocks
    else:
        assert load.requests == load.concurrent == arguments["max_num_seqs"]


def test_both_connectors_are_told_the_same() -> None:
    ours, stock = (words.connector(LONG, arm) or {} for arm in CONNECTED)
    of_ours, of_stock = ours["kv_connector_extra_config"], stock["kv_connector_extra_config"]
    assert of_ours["host_memory"] == f"{of_stock['cpu_bytes_to_use'] >> 20}MiB"
    for name in ("eviction_policy", "offload_prompt_only"):
        assert of_ours[name] == of_stock[name]
    assert words.connector(LONG, WITHOUT) is None


# -- the yardstick's copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_what_the_yardstick_stores_it_loads_into_other_blocks_byte_by_byte(blocks_per_chunk: int) -> None:
    import torch
    from benchmarks.serve.stock import SameCopiesWorker, regions_of
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    pages = [np.random.default_rng(layer).integers(-128, 128, (16, 48), dtype=np.int8) for layer in range(2)]
    before = [page.copy() for page in pages]
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(torch.from_numpy(page), 48) for page in pages],
        [[base.CanonicalKVCacheRef(index, 48) for index in range(2)]],
    )
    worker = SameCopiesWorker(
        regions_of(caches, blocks_per_chunk),
        8,
        blocks_per_chunk,
        cpu_copiers(KVTideConfig(host_memory=1 << 20), rank_count=1),
    )
    stored, loaded = [3, 1, 8, 9], [10, 15, 2, 0]
    chunks = CPULoadStoreSpec([5, 0, 7, 2][: 4 // blocks_per_chunk])
    assert worker.submit_store(1, base.GPULoadStoreSpec(stored, [4], [0]), chunks)
    worker.wait({1})
    for page in pages:
        page[stored] = 0
    # With two blocks in a chunk the load begins in the middle of the first.
    first = blocks_per_chunk - 1
    assert worker.submit_load(2, chunks, base.GPULoadStoreSpec(loaded[first:], [4 - first], [first]))
    worker.wait({2})
    ended = worker.get_finished()
    worker.shutdown()
    assert [(end.job_id, end.success, end.transfer_size) for end in ended] == [
        (1, True, 4 * 2 * 48),
        (2, True, (4 - first) * 2 * 48),
    ]
    for page, was in zip(pages, before, strict=True):
        assert (page[loaded[first:]] == was[stored[first:]]).all()


# -- processor time -----------------------------------------------------------------------------------


def test_processor_time_of_a_living_grandchild_counts() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ninput()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    before_s = living_children_s(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        used_s = living_children_s(os.getpid()) - before_s
        process.communicate("\n")
    assert used_s >= 0.18, "0.2 s, to the kernel's tick"
    assert living_children_s(os.getpid()) <= before_s + 0.01


def test_a_process_that_is_gone_has_no_children() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert living_children_s(process.pid) == 0
