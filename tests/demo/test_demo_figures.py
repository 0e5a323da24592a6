"""Figures and bars of the demo."""

from dataclasses import replace

import pytest

from kvtide.demo.bars import Bar, Sense, bars_of
from kvtide.demo.figures import Spread, percentile, spread
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE
from kvtide.demo.report import Report
from kvtide.demo.scrape import Scrape, read, total

np = pytest.importorskip("numpy")


@pytest.mark.parametrize("count", [1, 2, 5, 48])
@pytest.mark.parametrize("percent", [0, 50, 95, 100])
def test_percentiles_are_numpys(count: int, percent: float) -> None:
    values = [(17 * i) % 48 * 1.5 for i in range(count)]
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_nothing_has_no_percentile() -> None:
    assert spread([]) == Spread(None, None)


def test_the_times_are_those_of_the_same_prompts(report: Report) -> None:
    ttft_ms = report.figures.ttft_ms
    assert [ttft_ms[name].p50 for name in ("recompute", "host_hit", "engine_hit")] == [644.0, 64.0, 62.0]


def test_prompt_tokens_are_computed_hit_or_loaded_and_first_turns_do_not_count(report: Report) -> None:
    sources = report.figures.sources
    assert (sources[KVTIDE].computed, sources[KVTIDE].engine_hit, sources[KVTIDE].loaded) == (900, 0, 57_600)
    assert (sources[REFERENCE].computed, sources[REFERENCE].engine_hit) == (900, 57_600)
    assert (sources[RECOMPUTE].computed, sources[RECOMPUTE].engine_hit) == (45 * 1268, 45 * 32)


def test_the_sample_meets_every_bar(report: Report) -> None:
    assert [bar.name for bar in report.bars if not bar.met] == []
    assert report.passed


@pytest.mark.parametrize(
    ("figure", "sense", "met"),
    [
        (1.0, Sense.AT_MOST, True),
        (1.01, Sense.AT_MOST, False),
        (1.0, Sense.AT_LEAST, True),
        (0.99, Sense.AT_LEAST, False),
        (None, Sense.AT_MOST, False),
        (None, Sense.AT_LEAST, False),
    ],
)
def test_a_bar_is_met_on_its_limit_and_never_without_a_figure(
    figure: float | None, sense: Sense, met: bool
) -> None:
    assert Bar("a bar", figure, sense, 1.0).met is met


def missed(report: Report, wall_s: float = 200.0, **changes: object) -> list[int]:
    bars = bars_of(replace(report.figures, **changes), wall_s)
    return [index for index, bar in enumerate(bars) if not bar.met]


def test_each_bar_can_be_missed_alone(report: Report) -> None:
    verdict, ttft_ms = report.figures.verdict, report.figures.ttft_ms
    assert missed(report) == []
    assert missed(report, verdict=replace(verdict, diverging_requests=1, exact=False)) == [0]
    assert missed(report, verdict=replace(verdict, compared_requests=39)) == [0]
    assert missed(report, verdict=replace(verdict, loaded_tokens=verdict.prompt_tokens * 79 // 100)) == [1]
    assert missed(report, ttft_ms={**ttft_ms, "recompute": Spread(64 * 5.9, 700.0)}) == [2]
    assert missed(report, ttft_ms={**ttft_ms, "engine_hit": Spread(64 / 1.16, 70.0)}) == [3]
    assert missed(report, host_bytes_used=1001) == [4]
    assert missed(report, wall_s=300.5) == [5]


def test_memory_without_a_budget_is_a_bar_missed(report: Report) -> None:
    assert missed(report, last=replace(report.figures.last, pool_budget_bytes=None)) == [4]
    assert missed(report, host_bytes_used=None) == [4]


PAGE = """\
# HELP vllm:kvtide_hit_tokens_total Prompt tokens brought back, by medium.
# TYPE vllm:kvtide_hit_tokens_total counter
vllm:kvtide_hit_tokens_total{engine="0",medium="host",model_name="m"} 1280.0
vllm:kvtide_hit_tokens_created{engine="0",medium="host",model_name="m"} 1.79e+09
vllm:kvtide_transfer_bytes_total{direction="store",engine="0"} 2e+06
vllm:kvtide_transfer_bytes_total{direction="load",engine="0"} 1.5e+06
vllm:kvtide_transfer_seconds_total{direction="load",engine="0"} 0.25
vllm:kvtide_pool_used_bytes{engine="0"} 300.0
vllm:kvtide_pool_budget_bytes{engine="0"} 1024.0
vllm:external_prefix_cache_hits_total{engine="0"} 77.0
up 1.0
"""


def test_a_metrics_page_is_read() -> None:
    assert read(PAGE) == Scrape(1280, 1_500_000, 2_000_000, 0.25, None, 300, 1024)


def test_without_kvtide_vllms_own_count_stands_in_and_the_rest_is_not_reported() -> None:
    others = "\n".join(line for line in PAGE.splitlines() if "kvtide" not in line)
    assert read(others) == Scrape(77, None, None, None, None, None, None)


def test_series_are_summed_over_what_is_not_asked_for() -> None:
    assert total('a{x="1",y="1"} 2\na{x="1",y="2"} 3\na{x="2"} 4\n', "a", {"x": "1"}) == 5
    assert total("a 1\n", "b") is None
