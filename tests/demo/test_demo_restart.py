"""What the restart demo makes of what was asked; planted, without a server."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtide.cli.main import app
from kvtide.demo import restart, restart_picture, restart_report, run, table
from kvtide.demo.ask import Reply
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE, Exchange, Script
from kvtide.demo.report import write_json
from kvtide.demo.restart_report import RestartReport
from kvtide.demo.servers import Plan

CHECK_EXACT = Path(__file__).parents[2] / "scripts" / "check_exact.py"
USERS = 8
GIB = 1 << 30


def reply(ttft_ms: float, cached_tokens: int, **changes: Any) -> Reply:
    logprobs = tuple((-token_id / 8).hex() for token_id in (5, 6, 7))
    return replace(Reply(ttft_ms, 0.5, 1300, cached_tokens, (5, 6, 7), logprobs), **changes)


def exchange(
    user: int, loaded_tokens: int = 1280, disk_ms: float = 80.0, changes: Mapping[str, Any] | None = None
) -> Exchange:
    replies = {
        KVTIDE: reply(disk_ms + user, loaded_tokens, **(changes or {})),
        RECOMPUTE: reply(700.0 + user, 32),
        REFERENCE: reply(58.0 + user, 1280),
    }
    return Exchange(user, 2, "Why?", replies, loaded_tokens)


def report_of(*exchanges: Exchange, **changes: Any) -> RestartReport:
    report = RestartReport(
        script=Script(USERS, 3, 0, 3),
        plans=[Plan(KVTIDE, 128), Plan(RECOMPUTE, 128), Plan(REFERENCE, 864)],
        connector="KVTideConnector",
        exchanges=exchanges or [exchange(user) for user in range(USERS)],
        restart_s=31.5,
        disk_bytes_used=300 << 20,
        disk_bytes_limit=2 * GIB,
        disk_chunks=320,
        versions={"python": "3", "vllm": "0.32.0"},
        machine={"cores": "2"},
        setup_s=0.0,
        wall_s=200.0,
    )
    return replace(report, **changes)


def missed(report: RestartReport) -> set[str]:
    return {bar.name for bar in report.bars if not bar.met}


EQUAL, LOADED, FIRST, DISK, WALL = (bar.name for bar in report_of().bars)


def test_a_warm_restart_meets_every_bar() -> None:
    report = report_of()
    assert report.passed
    assert report.verdict.compared_requests == USERS


def test_the_bars_are_those_that_were_promised() -> None:
    limits = {bar.name: (bar.sense.value, bar.limit) for bar in report_of().bars}
    assert limits[FIRST] == ("at most", 1 / 5)
    assert limits[EQUAL] == ("at least", USERS)
    assert limits[WALL] == ("at most", 300)


@pytest.mark.parametrize(("disk_ms", "met"), [(135.0, True), (145.0, False)])
def test_a_fifth_of_recomputation_is_the_bar(disk_ms: float, met: bool) -> None:
    report = report_of(*(exchange(user, disk_ms=disk_ms) for user in range(USERS)))
    assert (FIRST not in missed(report)) is met


def test_a_cold_restart_meets_no_bar_of_its_own() -> None:
    """Nothing loaded: nothing is compared, and the times to first token are of nothing."""
    report = report_of(*(exchange(user, loaded_tokens=0, disk_ms=700.0) for user in range(USERS)))
    assert missed(report) == {EQUAL, LOADED, FIRST}
    assert report.ttft_ms[KVTIDE].p50 is None


def test_one_user_whose_conversation_is_gone_is_one_too_many() -> None:
    report = report_of(*(exchange(user, loaded_tokens=0 if user == 3 else 1280) for user in range(USERS)))
    assert missed(report) == {EQUAL}


def test_one_bit_of_one_answer_is_enough() -> None:
    planted = {"logprobs": (*reply(1, 1).logprobs[:2], (-0.8750000000000001).hex())}
    report = report_of(*(exchange(user, changes=planted if user == 5 else None) for user in range(USERS)))
    assert missed(report) == {EQUAL}
    assert not report.verdict.exact


@pytest.mark.parametrize("used", [None, 2 * GIB + 1])
def test_a_disk_that_is_not_bounded_or_not_there_is_missed(used: int | None) -> None:
    assert missed(report_of(disk_bytes_used=used)) == {DISK}


def test_a_demo_that_takes_too_long_is_missed() -> None:
    assert missed(report_of(wall_s=301.0)) == {WALL}


def test_the_tables_fit_100_columns() -> None:
    report = report_of()
    sink = StringIO()
    table.show_sections(
        restart_report.headline(report),
        restart_report.sections(report),
        Console(file=sink, width=table.COLUMNS),
    )
    text = sink.getvalue()
    assert max(len(line) for line in text.splitlines()) <= table.COLUMNS
    assert len(restart_report.headline(report)) <= table.COLUMNS
    assert "disk hit (kvtide)" in text
    assert "31.5 s" in text


@pytest.mark.parametrize("plant", [False, True])
def test_the_script_that_judges_the_demo_judges_this_report_too(plant: bool, tmp_path: Path) -> None:
    fields = json.loads(json.dumps(restart_report.as_json(report_of())))
    if plant:
        fields["requests"][2]["kvtide"]["token_ids"][0] += 1
    path = tmp_path / "report-restart.json"
    write_json(fields, path)
    assert json.loads(path.read_text()) == fields
    done = subprocess.run(
        [sys.executable, "-I", str(CHECK_EXACT), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == int(plant)
    assert f"compared: {USERS}" in done.stdout
    assert ("says otherwise" in done.stdout) is plant


def test_a_picture_is_made_also_when_nothing_was_loaded(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for report in (report_of(), report_of(exchange(0, loaded_tokens=0))):
        restart_picture.write_picture(report, tmp_path / "report-restart.png")
        assert (tmp_path / "report-restart.png").read_bytes().startswith(b"\x89PNG")


def test_the_server_is_told_of_its_disk_and_how_much_it_may_take(tmp_path: Path) -> None:
    told = json.loads(restart.connector_of(tmp_path))["kv_connector_extra_config"]
    assert told == {"host_memory": run.HOST_MEMORY, "disk": str(tmp_path / "disk"), "disk_limit": "2GiB"}


def test_bytes_on_disk_are_what_the_files_take_and_not_what_they_say(tmp_path: Path) -> None:
    assert restart.bytes_on_disk(tmp_path / "none") is None
    (tmp_path / "rank-0").mkdir()
    with (tmp_path / "rank-0" / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert restart.bytes_on_disk(tmp_path) == 0
    (tmp_path / "rank-0" / "whole").write_bytes(bytes(range(256)) * 4096)
    assert restart.bytes_on_disk(tmp_path) >= 1 << 20


@pytest.mark.parametrize(
    ("arguments", "job", "turns"),
    [([], run.run, 7), (["--restart"], restart.run, 2), (["--restart", "--turns", "4"], restart.run, 4)],
)
def test_the_option_chooses_what_is_shown(
    arguments: list[str], job: object, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[run.Options, object]] = []

    def main(options: run.Options, job: object) -> int:
        asked.append((options, job))
        return 1

    monkeypatch.setattr(run, "main", main)
    assert CliRunner().invoke(app, ["demo", *arguments]).exit_code == 1
    ((options, chosen),) = asked
    assert chosen is job
    assert options.turn_count == turns
    assert ('"disk"' in options.kv_transfer_config) is bool(arguments)
