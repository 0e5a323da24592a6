"""The judge of ``no_hit_overhead`` on planted samples: each bar alone is met and missed as it should."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import no_hit_overhead as bench
from benchmarks.frame.registry import UnfitError, discover
from benchmarks.frame.results import judged_again
from benchmarks.frame.rounds import rounds

TOKENS = 768
NOISE = (1.00, 0.99, 1.01, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00, 1.00)
THROUGHPUT, LOWER_BOUND, CPU = 0, 1, 2

Samples = list[dict[str, Any]]


def planted(
    slowdown: Callable[[int], float] = lambda index: 1.0, cost: float = 1.0, count: int = 12
) -> Samples:
    """Pairs in which kvtide takes ``slowdown(index)`` times as long and ``cost`` times the CPU."""
    samples = []
    for index, order in rounds(bench.ARMS, count):
        base_s = 4.0 * NOISE[index % len(NOISE)]
        for place, arm in enumerate(order):
            ours = arm == bench.WITH
            samples.append(
                {
                    "round": index,
                    "place": place,
                    "arm": arm,
                    "wall_s": base_s * (slowdown(index) if ours else 1.0),
                    "cpu_s": 2 * base_s * (cost if ours else 1.0),
                    "idle_s": 5.0,
                    "idle_cpu_s": 0.05,
                    "output_tokens": TOKENS,
                    "cached_tokens": 0,
                    "stored_chunks": 204.0 if ours else 0.0,
                    "evicted_chunks": 204.0 if ours else 0.0,
                    "others_cores": 0.02,
                    "stolen_cores": 0.0,
                }
            )
    return samples


def met(samples: Samples) -> list[bool]:
    return [bar.met for bar in bench.judge(samples).bars]


def test_equal_arms_meet_every_bar_with_a_ratio_of_one() -> None:
    bars = bench.judge(planted()).bars
    assert [bar.ratio for bar in bars] == pytest.approx([1, 1, 1])
    assert all(bar.met for bar in bars)


def test_the_bars_are_those_that_were_promised() -> None:
    assert [(bar.bar, bar.sense.value) for bar in bench.judge(planted()).bars] == [
        (0.97, "at least"),
        (0.94, "at least"),
        (1.03, "at most"),
    ]


def test_two_percent_slower_is_met_and_five_percent_slower_is_missed() -> None:
    assert met(planted(lambda index: 1 / 0.98)) == [True, True, True]
    assert met(planted(lambda index: 1 / 0.95)) == [False, True, True]
    assert met(planted(lambda index: 1 / 0.90)) == [False, False, True]


def test_the_known_ratio_comes_out() -> None:
    assert bench.judge(planted(lambda index: 1 / 0.9)).bars[THROUGHPUT].ratio == pytest.approx(0.9)
    assert bench.judge(planted(cost=1.25)).bars[CPU].ratio == pytest.approx(1.25)


def test_a_stall_in_some_pairs_is_seen_by_the_lower_bound_only() -> None:
    stalls = (1, 4, 6, 9, 11)
    assert met(planted(lambda index: 1.5 if index in stalls else 1.0)) == [True, False, True]


def test_four_percent_more_cpu_is_missed_and_two_are_met() -> None:
    assert met(planted(cost=1.02)) == [True, True, True]
    assert met(planted(cost=1.04)) == [True, True, False]


def test_a_disturbed_pair_does_not_count_whatever_it_says() -> None:
    samples = planted(lambda index: 3.0 if index < 2 else 1.0)
    for sample in samples:
        if sample["round"] < 2 and sample["arm"] == bench.WITHOUT:
            sample["others_cores"] = 0.5
    verdict = bench.judge(samples)
    assert [bar.ratio for bar in verdict.bars] == pytest.approx([1, 1, 1])
    assert verdict.notes[0] == "10 of 12 pairs were undisturbed and count"


def test_stolen_time_disturbs_as_well() -> None:
    samples = planted()
    for sample in samples[:4]:
        sample["stolen_cores"] = 0.5
    assert bench.judge(samples).notes[0].startswith("10 of 12")


def test_without_enough_quiet_pairs_all_count_and_the_reader_is_told() -> None:
    samples = planted(lambda index: 1 / 0.9)
    for sample in samples:
        sample["others_cores"] = 0.5
    verdict = bench.judge(samples)
    assert verdict.bars[THROUGHPUT].ratio == pytest.approx(0.9)
    assert verdict.notes[0].startswith("NOT A QUIET MACHINE: only 0 of 12")


def test_a_long_wait_with_its_timers_is_no_work() -> None:
    samples = planted()
    samples[0].update(idle_s=60.0, idle_cpu_s=0.6)
    assert len(bench.judge(samples).bars) == 3


def change(**values: Any) -> Callable[[Samples], None]:
    def apply(samples: Samples) -> None:
        first = next(sample for sample in samples if sample["arm"] == bench.WITH)
        first.update(values)

    return apply


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (change(cached_tokens=32), "32 tokens were hits"),
        (change(stored_chunks=0.0), "did not store and evict"),
        (change(evicted_chunks=0.0), "did not store and evict"),
        (change(output_tokens=TOKENS - 1), "not do the same work"),
        (change(idle_cpu_s=0.5), "while it was not asked"),
        (change(arm=bench.WITHOUT), "a sample of none too many"),
        (change(arm="stock"), "a sample of stock too many"),
        (list.pop, "no sample of"),
        (lambda samples: samples.__delitem__(slice(6, None)), "3 pairs; 10 are needed"),
        (list.clear, "0 pairs; 10 are needed"),
    ],
)
def test_samples_of_something_else_are_not_judged(plant: Callable[[Samples], None], said: str) -> None:
    samples = planted()
    plant(samples)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


def test_no_two_prompts_begin_alike_and_the_next_run_asks_the_same() -> None:
    def prompts() -> list[tuple[int, ...]]:
        source = bench._Prompts(bench.SPECIAL_TOKENS + 500, bench.SEED)
        return [prompt for _ in range(4) for prompt in source.batch().prompts]

    asked = prompts()
    assert len({prompt[:32] for prompt in asked}) == len(asked) == 4 * bench.BATCH_REQUESTS
    assert {len(prompt) for prompt in asked} == {bench.PROMPT_TOKENS}
    assert asked == prompts()


def test_the_pool_is_smaller_than_what_two_batches_store() -> None:
    """Otherwise nothing would be evicted, and the judge would refuse the samples after minutes."""
    kv_bytes_per_token = 23_040  # 30 layers x 3 heads x 64 numbers x (key and value) x 2 bytes
    batch_tokens = bench.BATCH_REQUESTS * (bench.PROMPT_TOKENS + bench.OUTPUT_TOKENS)
    pool_bytes = int(bench.HOST_MEMORY.removesuffix("MiB")) << 20
    assert pool_bytes < bench.WARM_UP_PAIRS * batch_tokens * kv_bytes_per_token


def test_the_requests_that_run_together_fit_the_primary_pool() -> None:
    """Preemptions would be measured otherwise."""
    blocks = -(-(bench.PROMPT_TOKENS + bench.OUTPUT_TOKENS) // bench.ENGINE["block_size"])
    assert bench.CONCURRENT_REQUESTS * blocks < bench.ENGINE["num_gpu_blocks_override"]


def test_the_kept_samples_still_give_the_bars_and_the_page_says_the_same() -> None:
    root = Path(bench.__file__).parents[1]
    kept = root / "benchmarks" / "results" / "no_hit_overhead.json"
    _, (result,) = judged_again(kept, discover())
    recorded = json.loads(kept.read_text())["benchmarks"][result.name]["bars"]
    assert [bar.record() for bar in result.bars] == recorded
    page = (root / "docs" / "benchmarks.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| two sessions of 16 pairs"))
    for bar in result.bars:
        assert f" {bar.ratio:.3f} " in row, bar.name
