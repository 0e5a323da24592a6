"""The judge of ``warm_start`` on planted samples, and one real start on a small folder."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks import warm_start as bench
from benchmarks.frame.registry import UnfitError
from benchmarks.storage import warm_child


def planted(warm_s: float = 2.0, hook_s: float = 0.003, found: int = bench.RECORDS) -> list[dict[str, Any]]:
    one = {"warm_s": warm_s, "slowest_hook_cpu_s": hook_s, "steps": 200, "found": found, "rows_s": 0.2}
    return [dict(one) for _ in range(bench.ROUNDS)]


def test_each_limit_alone_is_met_and_missed() -> None:
    assert [bar.met for bar in bench.judge(planted()).bars] == [True, True]
    assert [bar.met for bar in bench.judge(planted(warm_s=5.1)).bars] == [False, True]
    assert [bar.met for bar in bench.judge(planted(hook_s=0.0051)).bars] == [True, False]


def test_starts_that_found_too_little_are_no_measurement() -> None:
    with pytest.raises(UnfitError, match="without all"):
        bench.judge(planted(found=bench.RECORDS - 1))
    with pytest.raises(UnfitError):
        bench.judge(planted()[:-1])
    with pytest.raises(UnfitError, match="damaged"):
        bench.judge([{"found": bench.RECORDS}] * bench.ROUNDS)


def test_a_start_finds_every_record_of_every_prompt(tmp_path: Path) -> None:
    samples = warm_child.measure_starts(lambda text: None, str(tmp_path / "disk"), 700, 9, 2)
    assert [sample["found"] for sample in samples] == [700, 700]
    assert all(0 < sample["slowest_hook_cpu_s"] < sample["warm_s"] for sample in samples)
    assert not (tmp_path / "disk").exists()
