"""The kinds of frozen trials, and what is shown of what came out."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import frozen_trial
from frozen.kinds import CONTROLS, DISKS, KINDS, STORES
from frozen.shown import lines, table


def report(**changes: object) -> dict[str, object]:
    slowest = {"hook": "worker.wait_for_save", "wall_ms": 4.0, "own_ms": 3.0, "cpu_ms": 1.0}
    return {
        "kind": "valkey-frozen",
        "medium": "a server",
        "passed": True,
        "requests": {"tier": 320, "without": 320},
        "p50_ms": {"tier": 200.0, "without": 210.0},
        "p95_ms": {"tier": 400.0, "without": 410.0},
        "ttft_ratio": 0.976,
        "slowest": slowest,
        "call_count": 12_345,
        "failures": [],
        "left_out_after": 0,
        "counted": {"tier_hit_chunks{valkey}": 7.0},
        "quiet_rounds": 3,
        "rounds": [{"index": index} for index in range(4)],
        **changes,
    }


def shown(*reports: dict[str, object]) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(table(reports))
    return capture.get()


def test_a_table_says_of_each_kind_whether_its_bars_are_met() -> None:
    text = shown(report(), report(kind="valkey-slow", passed=False, ttft_ratio=1.234))
    met, missed = text.splitlines()[-2:]
    assert met.split() == ["valkey-frozen", "320", "400", "410", "0.976", "3.00", "ms", "0", "met"]
    assert missed.split()[-1] == "MISSED"
    assert "1.234" in missed


def test_a_trial_that_was_not_judged_says_why_and_is_no_figure() -> None:
    unfit = {"kind": "valkey-half", "unfit": "only 3 chunks are below"}
    assert lines(unfit) == ["valkey-half: could not be judged: only 3 chunks are below"]
    assert shown(unfit).splitlines()[-1].split() == ["valkey-half", "not", "judged"]


def test_what_came_all_the_same_is_told() -> None:
    assert any("brought back all the same 7," in line for line in lines(report()))


def test_a_noisy_machine_is_told_of() -> None:
    noisy = report(quiet_rounds=1)
    assert any("NOT A QUIET MACHINE: 1 of 4" in line for line in lines(noisy))
    assert not any("NOT A QUIET MACHINE" in line for line in lines(report()))


def test_kinds_are_named_or_all_stores() -> None:
    assert frozen_trial.arguments([]).kinds == list(STORES)
    assert frozen_trial.arguments(["disks", "valkey-slow"]).kinds == [*DISKS, "valkey-slow"]
    assert frozen_trial.arguments(["nothing"]).kinds == ["nothing"]
    assert set(KINDS) == {*DISKS, *STORES, *CONTROLS}


def test_a_kind_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        frozen_trial.arguments(["valkey-molten"])
    assert "there is no valkey-molten: there are disk-frozen" in capsys.readouterr().err


def test_a_medium_that_cannot_be_had_is_a_report(tmp_path: Path) -> None:
    def missing(folder: Path) -> None:
        raise RuntimeError("redis-server does not start")

    options = frozen_trial.arguments(["--out", str(tmp_path)])
    kind = frozen_trial.Kind(missing, "nothing")  # type: ignore[arg-type]
    report = frozen_trial.tried("nothing", kind, options, tmp_path)
    assert report == {"kind": "nothing", "unfit": "redis-server does not start"}
    assert json.loads((tmp_path / "nothing" / "report.json").read_text()) == report
