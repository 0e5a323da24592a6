"""The judge of ``policies`` on planted samples, and a small trace replayed."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import policies as bench
from benchmarks.frame.registry import Bench, UnfitError

Samples = list[dict[str, Any]]

HITS = {
    "lru": 3000,
    "arc": 3100,
    "s3fifo": 3200,
    "sieve": 9,
    "second_sight": 2000,
    "adaptive": 3200,
    "optimum": 5000,
}


def planted(**hits: int) -> Samples:
    """Samples of 10,000 blocks asked for, at every size the same."""
    return [
        {
            "trace": trace,
            "policy": policy,
            "fraction": fraction,
            "capacity": int(1000 * float(fraction)),
            "unique_count": 1000,
            "access_count": 10_000,
            "hit_count": count,
            "stored_count": 9000 if policy == "lru" else 2000,
            "evicted_count": 0,
        }
        for trace in bench.TRACES
        for policy, count in {**HITS, **hits}.items()
        for fraction in bench.FRACTIONS
    ]


def of(samples: Samples, **wanted: Any) -> dict[str, Any]:
    return next(one for one in samples if wanted.items() <= one.items())


def test_the_bars_are_those_that_were_promised() -> None:
    bars = bench.judge(planted()).bars
    assert [(bar.bar, bar.sense.value) for bar in bars] == [(-0.5, "at least"), (-1.5, "at least")] * 3
    assert [bar.ratio for bar in bars] == pytest.approx([2.0, 0.0] * 3)
    assert bench.RIVALS == ("lru", "arc", "s3fifo", "second_sight")
    assert [float(one) for one in bench.FRACTIONS] == [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4]


@pytest.mark.parametrize(("hits", "met"), [(2950, True), (2949, False)])
def test_the_size_at_which_it_is_worst_beside_lru_counts(hits: int, met: bool) -> None:
    samples = planted(s3fifo=3000, arc=3000)
    of(samples, trace="agentic", policy="adaptive", fraction="0.1")["hit_count"] = hits
    over_lru = bench.judge(samples).bars[4]
    assert over_lru.name == "agentic: hits of 100, adaptive less lru, least at 10 %"
    assert (over_lru.ratio, over_lru.met) == (pytest.approx((hits - 3000) / 100), met)


@pytest.mark.parametrize(("hits", "met"), [(3350, True), (3351, False)])
@pytest.mark.parametrize("rival", ["arc", "s3fifo", "second_sight"])
def test_the_size_at_which_it_is_worst_beside_the_best_counts(rival: str, hits: int, met: bool) -> None:
    samples = planted()
    of(samples, trace="synthetic", policy=rival, fraction="0.02")["hit_count"] = hits
    over_best = bench.judge(samples).bars[3]
    assert over_best.name == f"synthetic: hits of 100, adaptive less {rival}, the best of 4, least at 2 %"
    assert over_best.met is met


def test_a_policy_that_is_no_rival_is_shown_and_not_judged() -> None:
    verdict = bench.judge(planted(sieve=4999))
    assert all(bar.met for bar in verdict.bars)
    assert any("sieve" in note and "49.99" in note for note in verdict.notes)


def test_what_is_gained_of_the_gap_is_told_where_it_is_wide_and_writes_beside_lru() -> None:
    samples = planted()
    for one in samples:
        if one["policy"] == "optimum" and one["fraction"] != "0.05":
            one["hit_count"] = 3999
    notes = bench.judge(samples).notes
    assert "conversation: of what the optimum has over lru, adaptive gains +10% at 5 %" in notes
    assert "conversation: writes of 100: adaptive  " + "   20.0" * 7 in notes
    assert "conversation: writes of 100: lru       " + "   90.0" * 7 in notes
    flat = bench.judge(planted(optimum=3500)).notes
    assert any(note.endswith("nothing that would count: nowhere is it 10 points") for note in flat)


def test_a_trace_that_is_not_there_is_named_and_the_others_are_judged() -> None:
    samples = [one for one in planted() if one["trace"] != "agentic"]
    verdict = bench.judge([*samples, {"trace": "agentic", "absent": "it is not in /x"}])
    assert len(verdict.bars) == 4
    assert verdict.notes[0] == "NOT MEASURED: agentic: it is not in /x"
    assert len(verdict.plots) == 2


def change(**values: Any) -> Callable[[Samples], None]:
    return lambda samples: of(samples, trace="synthetic", fraction="0.1", policy="arc").update(values)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (change(policy="lru"), "synthetic, 0.1: lru twice"),
        (change(policy="other"), "synthetic, 0.1: no sample of arc"),
        (change(capacity=5), "synthetic, 0.1: the policies were not asked for the same"),
        (change(access_count=5), "synthetic, 0.1: the policies were not asked for the same"),
        (change(hit_count=5001), "synthetic, 0.1: arc hit more than is possible"),
        (change(fraction="0.3"), "a sample is damaged"),
        (change(hit_count=None), "a sample is damaged"),
        (lambda samples: samples[0].pop("trace"), "a sample is damaged"),
        (list.clear, "no sample of"),
        (
            lambda samples: samples.__setitem__(
                slice(None), [{"trace": trace, "absent": f"no {trace}"} for trace in bench.TRACES]
            ),
            "no trace could be replayed: no conversation; no synthetic; no agentic",
        ),
    ],
)
def test_samples_of_something_else_are_not_judged(plant: Callable[[Samples], None], said: str) -> None:
    samples = planted()
    plant(samples)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


def test_every_policy_is_replayed_on_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    with gzip.open(tmp_path / "mooncake" / "synthetic.jsonl.gz", "wt") as file:
        for number in range(60):
            blocks = [number % 3, 10 + number % 7, 20 + number % 7, 1000 + number]
            # Chained: a number means all before it as well.
            ids = [hash(tuple(blocks[: end + 1])) % (1 << 31) for end in range(len(blocks))]
            line = {"timestamp": number, "input_length": 2048, "output_length": 1, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    monkeypatch.setenv(bench.FOLDER_VARIABLE, str(tmp_path))
    told: list[tuple[str, int, int]] = []
    samples = bench.measure(Bench(tmp_path, None, lambda *what: told.append(what)))
    absent = [one for one in samples if "absent" in one]
    assert [one["trace"] for one in absent] == ["conversation", "agentic"]
    assert str(tmp_path) in absent[0]["absent"]
    taken = [one for one in samples if "absent" not in one]
    policies = {one["policy"] for one in taken}
    assert {*bench.RIVALS, "sieve", "lfu", "gdsf", bench.OPTIMUM} <= policies
    assert len(taken) == len(policies) * len(bench.FRACTIONS)
    assert {one["access_count"] for one in taken} == {240}
    largest = [one for one in taken if one["fraction"] == "0.4"]
    assert all(one["hit_count"] > 0 for one in largest)
    judged = bench.measure(Bench(tmp_path, None, lambda *what: None, alone=False))
    rivals = {one["policy"] for one in judged if "policy" in one}
    assert rivals == {bench.ADAPTIVE, *bench.RIVALS, bench.OPTIMUM}
    small = {None, *bench.FRACTIONS_AMONG_ALL}
    kept = [one for one in samples if one.get("policy") in {None, *rivals} and one.get("fraction") in small]
    assert kept == judged
    assert bench.judge(judged).bars
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert done[-1] <= 300
