"""``kvtide replay`` of a whole server: what it prints, what it refuses, how it exits."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli.main import app
from kvtide.sim.serving import policy_names

BASICS = ("--model", "1000", "--host-memory", "40MB", "--engine-blocks", "20")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """30 prompts of 4 full blocks, two shared, a minute apart, and all again."""
    path = tmp_path / "chats.jsonl"
    rows = []
    for number in range(60):
        own = 10 + 5 * (number % 30)
        row = {"timestamp": 60_000 * number, "input_length": 4 * 512 + 17, "output_length": 9}
        rows.append({**row, "hash_ids": [0, 1, own, own + 1, own + 2]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": str(columns)})


def found_in(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_json_has_a_result_for_each_size_and_policy(trace: Path) -> None:
    result = run(trace, *BASICS, "--host-memory", "10MB, 1GB", "--policy", "lru,second_sight", "--json")
    found = found_in(result)
    assert list(found["results"]) == ["10MB", "1GB"]
    large = found["results"]["1GB"]
    assert list(large) == ["lru", "second_sight"]
    lru = large["lru"]
    # Beyond the first prompt each hits what all share, and the second round everything.
    assert lru["hit_blocks"]["engine"] + lru["hit_blocks"]["host"] == 2 * 59 + 2 * 30
    assert lru["hit_tokens"]["host"] == 512 * 2 * 30
    assert 0 < lru["ttft_s"]["p50"] <= lru["ttft_s"]["p95"] <= lru["ttft_s"]["p99"]
    assert found["results"]["10MB"]["lru"]["hit_blocks"]["host"] < lru["hit_blocks"]["host"]
    assert lru["written_bytes_per_day"]["host"] > 0
    assert (found["engine_blocks"], found["bytes_per_token"]) == (20, 1000)
    assert "NVIDIA" in found["rates"]


def test_a_disk_has_what_host_memory_has_let_go(trace: Path) -> None:
    asked = (trace, *BASICS, "--host-memory", "20MB", "--policy", "lru", "--json")
    lru = found_in(run(*asked, "--disk", "1GB@6GB/s"))["results"]["20MB"]["lru"]
    without = found_in(run(*asked))["results"]["20MB"]["lru"]
    assert lru["hit_tokens"]["disk"] > 0
    assert lru["block_hit_ratio"] > without["block_hit_ratio"]


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_tables_are_no_wider_than_a_hundred_columns(columns: int, trace: Path) -> None:
    result = run(trace, *BASICS, "--disk", "1GB@6GB/s", "--jobs", 1, columns=columns)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100
    for name in policy_names():
        assert result.stdout.count(f"\n{name} ") == 2
    assert "p99" in result.stdout


def test_processes_change_no_figure(trace: Path) -> None:
    asked = (trace, *BASICS, "--policies", "lru,arc", "--json")
    assert found_in(run(*asked, "--jobs", "2")) == found_in(run(*asked, "--jobs", "1"))


def test_an_engine_that_is_never_idle_is_pointed_out(trace: Path) -> None:
    result = run(trace, *BASICS, "--slower", "0.0001", "--policy", "lru")
    assert "never idle" in result.stdout


def test_a_disk_that_takes_little_at_once_is_pointed_out(trace: Path) -> None:
    result = run(trace, *BASICS, "--disk", "1GB@6GB/s", "--disk-queue", "600kB", "--policy", "lru")
    assert "disk,queue_full" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (("--host-memory", "1GiB"), "--model"),
        (("--model", "5", "--slower", "2"), "--host-memory"),
        (("--slower", "2"), "--model"),
        (("--disk", "1GB@1GB/s"), "--model"),
        ((*BASICS, "--host-memory", "lots"), "--host-memory"),
        ((*BASICS, "--host-memory", ","), "--host-memory"),
        ((*BASICS, "--host-memory", "1kB"), "host_memory"),
        ((*BASICS, "--host-memory", "0"), "--host-memory"),
        ((*BASICS, "--disk", "1GB"), "--disk"),
        ((*BASICS, "--disk", "@"), "--disk"),
        ((*BASICS, "--disk", "1GB@fast"), "--disk"),
        ((*BASICS, "--disk", "1GB@0GB/s"), "--disk"),
        ((*BASICS, "--disk", "1@6GB/s"), "disk"),
        ((*BASICS, "--disk", "1GB@6GB/s", "--disk-queue", "-1"), "--disk-queue"),
        ((*BASICS, "--engine-blocks", "1"), "--engine-blocks"),
        ((*BASICS, "--engine-blocks", "4"), "engine_blocks"),
        ((*BASICS, "--rates", "warp"), "rates"),
        ((*BASICS, "--slower", "nan"), "--slower"),
        ((*BASICS, "--slower", "0"), "--slower"),
        ((*BASICS, "--model", "gpt"), "model"),
        ((*BASICS, "--policies", "optimum"), "--policies"),
        ((*BASICS, "--policies", "mru"), "--policies"),
        ((*BASICS, "--jobs", "0"), "--jobs"),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments: tuple[str, ...], setting: str, trace: Path) -> None:
    result = run(trace, *arguments, "--json")
    assert result.exit_code == 2
    (error,) = json.loads(result.stdout)["errors"]
    assert error["setting"] == setting
    assert error["hint"]


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    result = run(tmp_path / "empty.jsonl", "--format", "mooncake", *BASICS)
    assert result.exit_code == 2
