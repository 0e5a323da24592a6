"""What is read off a page of metrics, whoever wrote it."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.adviser import reading
from kvtide.adviser.reading import EngineEstimates, Estimate, TierEstimates, engines_on, is_ours, together
from kvtide.errors import ConfigError
from kvtide.metrics import BY_NAME, GHOST_TIMES

OWN = 'engine="0",model_name="tiny"'
PAGE = "\n".join(
    [
        f"vllm:kvtide_pool_budget_bytes{{{OWN}}} 1024",
        f"vllm:kvtide_ghost_requests_total{{{OWN}}} 2000",
        f"vllm:kvtide_ghost_judged_requests{{{OWN}}} 1500",
        *(
            f'vllm:kvtide_ghost_{name}_points{{{OWN},tier="host",times="{times}"}} {value}'
            for times, *values in (
                ("0.5", 20, -10, 0.5),
                ("1", 30, 0, 0),
                ("2", 40, 10, 0.5),
                ("4", 45, 15, 1),
            )
            for name, value in zip(("hit", "gain", "error"), values, strict=True)
        ),
        "",
    ]
)


def times_on(page: str) -> list[float]:
    (engine,) = engines_on(page)
    return [one.times for tier in engine.tiers for one in tier.estimates]


def test_every_series_that_is_read_is_one_that_is_written() -> None:
    for name in reading._ASKED_FOR:
        assert name.removesuffix("_total") in BY_NAME
    assert times_on(PAGE) == [float(one) for one in GHOST_TIMES]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-500", "1e400", "x", "", "1e30"])
@pytest.mark.parametrize("name", ["hit", "gain", "error"])
def test_a_figure_that_makes_no_sense_is_one_that_is_not_there(name: str, value: str) -> None:
    bad, count = re.subn(rf"(ghost_{name}_points.*times=\"2\"}}) .*", rf"\1 {value}", PAGE)
    assert count == 1
    assert times_on(bad) == [0.5, 1, 4]


def test_without_the_size_there_is_nothing_is_said_of_the_others() -> None:
    assert times_on(re.sub(r".*hit_points.*times=\"1\".*", "", PAGE)) == []
    assert not engines_on("\n".join(PAGE.splitlines()[:3]))[0].is_ready


@pytest.mark.parametrize(
    "garbage",
    [
        "\ufffd\x00vllm:kvtide_\x00",
        "vllm:kvtide_ghost_hit_points{" + 'a="' * 500,
        "vllm:kvtide_ghost_hit_points{" + "x" * 200_000 + "} 1",
        'vllm:kvtide_ghost_hit_points{tier="host",times="2",tier="host"} 1',
        'vllm:kvtide_ghost_hit_points{tier="host",times="7"} 1',
        "vllm:kvtide_ghost_hit_points} 1\n" * 100,
        "vllm:kvtide_ghost_requests_total{ 1\nvllm:kvtide_ghost_sampled_share{} \n",
    ],
)
def test_garbage_beside_the_figures_changes_nothing(garbage: str) -> None:
    clean = engines_on(PAGE)
    assert [one for one in engines_on(f"{garbage}\n{PAGE}{garbage}\n") if one.model] == clean


@settings(max_examples=30)
@given(
    st.text(max_size=60),
    st.sampled_from(("ghost_hit_points", "ghost_requests_total", "tier_capacity_bytes")),
    st.integers(0, len(PAGE)),
)
def test_no_text_whatever_is_more_than_not_understood(text: str, name: str, at: int) -> None:
    line = f"vllm:kvtide_{name}{text}"
    for page in (f"{PAGE[:at]}{line}\n{PAGE[at:]}", f"vllm:kvtide_{name}{{{text}}} {text}"):
        assert is_ours(page)
        for engine in together(engines_on(page)):
            for tier in engine.tiers:
                for one in tier.estimates:
                    assert all(map(math.isfinite, (one.hit_points, one.gain_points, one.error_points)))


def test_a_page_of_more_samples_than_any_server_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_SAMPLES", 10)
    with pytest.raises(ConfigError, match="more than 10 samples"):
        engines_on(PAGE)


def engine(number: str, tokens: float, gain: float, *times: float, size_bytes: int = 8) -> EngineEstimates:
    now = Estimate(1, 30, 0, 0, 1.0)
    others = tuple(Estimate(one, 30 + gain, gain, 0.3, 0.5) for one in times)
    tier = TierEstimates("host", size_bytes, (now, *others) if times else ())
    return EngineEstimates("m", (number,), 10, 1, 9, 0.5, tokens, (tier,))


def test_engines_are_weighed_by_what_they_were_asked_for() -> None:
    (found,) = together([engine("0", 300, 10, 2, 4), engine("1", 100, 2, 2)])
    assert (found.engines, found.requests, found.dropped_requests, found.judged_requests) == (
        ("0", "1"),
        20,
        2,
        18,
    )
    (tier,) = found.tiers
    # Four times the size is known of one of them alone, and compared with nothing.
    assert [one.times for one in tier.estimates] == [1, 2]
    assert tier.estimates[1].gain_points == pytest.approx(8)
    assert tier.estimates[1].error_points == pytest.approx(math.hypot(0.75 * 0.3, 0.25 * 0.3))
    assert tier.size_bytes == 8


def test_an_engine_that_says_nothing_yet_is_left_aside() -> None:
    (found,) = together([engine("0", 300, 10, 2), engine("1", 100, 2), engine("2", 0, 5, 2)])
    assert [one.gain_points for one in found.tiers[0].estimates] == [0, 10]
    (found,) = together([engine("0", 300, 10, 2), engine("1", 300, 10, 2, size_bytes=4)])
    assert found.tiers[0].size_bytes is None
    assert len(together([engine("0", 1, 1, 2), EngineEstimates("other", ("0",))])) == 2
    assert together([]) == []
