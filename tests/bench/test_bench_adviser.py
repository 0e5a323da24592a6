"""The judge of ``adviser`` on planted samples, and what ghosts say of a small trace beside its replays."""

from typing import Any

import pytest
from benchmarks import adviser as bench
from benchmarks.frame.registry import UnfitError

from kvtide.adviser import window
from kvtide.sim.accesses import Accesses, accesses_of
from kvtide.sim.traces.request import TraceRequest

Samples = list[dict[str, Any]]


def planted(sampled: bool = True) -> Samples:
    """Samples in which everything said is what a replay hits."""
    kinds = [(bench.WHOLE, 0), *((bench.SAMPLED, salt) for salt in bench.SALTS if sampled)]
    return [
        {
            "trace": trace,
            "kind": kind,
            "cell": f"{kind} {fraction} {salt}",
            "fraction": fraction,
            "times": times,
            "chunk_count": int(1000 * float(fraction)),
            "access_count": 50_000,
            "request_count": 5000,
            "judged_requests": 4500,
            "share": 1.0 if kind == bench.WHOLE else bench.SAMPLED_SHARE,
            "counted_points": 40.0,
            "shown_points": 42.0,
            "gain_points": 5.0,
            "error_points": 0.5,
            "replay_points": 40.0,
            "replay_gain_points": 5.0,
            "replay_late_points": 42.0,
            "cpu_us_per_request": 400.0,
        }
        for trace in bench.TRACES
        for kind, salt in kinds
        for fraction in bench.FRACTIONS
        for times in bench.OTHERS
    ]


def of(samples: Samples, **wanted: Any) -> dict[str, Any]:
    return next(one for one in samples if wanted.items() <= one.items())


def test_the_bars_are_those_that_were_promised() -> None:
    bars = bench.judge(planted()).bars
    assert [(bar.bar, bar.sense.value, bar.ratio) for bar in bars] == [(1.5, "at most", 0.0)] * 3
    assert len(bench.FRACTIONS) == 5
    assert bench.OTHERS == ("0.5", "2", "4")
    assert set(bench.TRACES) == {"conversation", "synthetic", "agentic"}


@pytest.mark.parametrize(("off", "met"), [(1.5, True), (-1.5, True), (1.51, False), (-1.51, False)])
@pytest.mark.parametrize("figure", ["counted_points", "shown_points"])
def test_the_worst_figure_at_the_worst_size_counts_on_either_side(figure: str, off: float, met: bool) -> None:
    samples = planted()
    of(samples, trace="agentic", kind=bench.WHOLE, fraction="0.08", times="4")[figure] += off
    bar = bench.judge(samples).bars[2]
    assert bar.name == "agentic: points between what is said and a replay, most at 4 times 8 %"
    assert (bar.ratio, bar.met) == (pytest.approx(abs(off)), met)


def test_a_forced_sample_is_told_and_not_judged() -> None:
    samples = planted()
    one = of(samples, trace="synthetic", kind=bench.SAMPLED)
    one["counted_points"], one["gain_points"] = 60.0, 6.01
    verdict = bench.judge(samples)
    assert all(bar.met for bar in verdict.bars)
    assert any(
        "synthetic: 30% of the sessions: hits off by 0.00 points (median), 20.00 (most);"
        " 29 of 30 gains within two standard errors" in note
        for note in verdict.notes
    )
    assert not any("30%" in note for note in bench.judge(planted(sampled=False)).notes)


def test_a_trace_that_is_not_there_is_named_and_the_others_are_judged() -> None:
    samples = [one for one in planted() if one["trace"] != "agentic"]
    verdict = bench.judge([*samples, {"trace": "agentic", "absent": "it is not in /x"}])
    assert len(verdict.bars) == 2
    assert verdict.notes[0] == "NOT MEASURED: agentic: it is not in /x"
    with pytest.raises(UnfitError, match="no trace"):
        bench.judge([{"trace": trace, "absent": "gone"} for trace in bench.TRACES])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shown_points": None}, "too few requests"),
        ({"access_count": 0}, "nothing was asked for"),
        ({"judged_requests": 5001}, "nothing was asked for"),
        ({"counted_points": "x"}, "damaged"),
    ],
)
def test_samples_of_something_else_are_refused(change: dict[str, Any], said: str) -> None:
    samples = planted()
    of(samples, kind=bench.WHOLE).update(change)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


def test_samples_that_are_missing_or_there_twice_are_refused() -> None:
    samples = planted()
    with pytest.raises(UnfitError, match="twice"):
        bench.judge([*samples, samples[0]])
    with pytest.raises(UnfitError, match=r"no sample of 0\.5 times 0\.02"):
        bench.judge(samples[1:])
    with pytest.raises(UnfitError, match="damaged"):
        bench.judge([{"trace": "conversation"}])


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> Accesses:
    """400 prompts: a block that all share and two of one of 200 chats; ghosts speak from 300 on."""
    monkeypatch.setattr(window, "LEAST_REQUESTS", 300)
    chats = [[f"{chat:03}{index}".encode() * 2 for index in range(2)] for chat in range(200)]
    return accesses_of(
        TraceRequest(float(at), [b"systemsy", *chats[at * 7 % 200 if at % 3 else at % 20]], 16, 50)
        for at in range(400)
    )


def test_what_is_said_of_every_session_is_what_a_replay_hits(chats: Accesses) -> None:
    said = bench._said(chats, bench.Cell(bench.WHOLE, 100))
    sizes = {"0.5": 50, "2": 200, "4": 400}
    found = {bench.Cell(bench.WHOLE, 100): said} | {
        bench.Cell("replay", size): bench._replayed(chats, size) for size in (*sizes.values(), 100)
    }
    points = set()
    for times in sizes:
        sample = bench._sample("chats", chats, "0.1", bench.Cell(bench.WHOLE, 100), times, found)
        assert (sample["share"], sample["access_count"]) == (1.0, 1200)
        assert sample["counted_points"] == pytest.approx(sample["replay_points"])
        assert sample["shown_points"] == pytest.approx(sample["replay_late_points"])
        points.add(round(sample["replay_points"]))
    assert len(points) == 3


def test_another_salt_draws_other_sessions(chats: Accesses) -> None:
    said = [bench._said(chats, bench.Cell(bench.SAMPLED, 100, salt)) for salt in (1, 2)]
    assert [one["share"] for one in said] == pytest.approx([bench.SAMPLED_SHARE] * 2, abs=0.01)
    assert said[0]["counted_points"] != said[1]["counted_points"]
