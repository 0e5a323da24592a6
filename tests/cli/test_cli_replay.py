"""``kvtide replay``: what it prints, what it refuses, how it exits."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli.main import app
from kvtide.sim.fractions import known


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Mooncake's format: 20 prompts of 4 full blocks, two shared, and a part of one; all come twice."""
    path = tmp_path / "chats.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for second in range(40):
            own = 10 + 5 * (second % 20)
            row = {"timestamp": 1000 * second, "input_length": 4 * 512 + 17, "output_length": 9}
            file.write(json.dumps({**row, "hash_ids": [0, 1, own, own + 1, own + 2]}) + "\n")
    return path


def run(*arguments: object, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": str(columns)})


def found_in(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_json_has_a_ratio_for_each_policy_and_fraction_as_it_was_given(trace: Path) -> None:
    found = found_in(run(trace, "--fractions", "0.10,0.5, 1", "--json"))
    assert list(found["hit_ratio"]) == list(known())
    assert {"lru", "arc", "second_sight", "optimum"} <= set(found["hit_ratio"])
    assert all(list(ratios) == ["0.10", "0.5", "1"] for ratios in found["hit_ratio"].values())
    assert (found["requests"], found["accesses"], found["unique_blocks"]) == (40, 160, 42)
    assert found["block_tokens"] == 512
    assert found["capacity_blocks"] == {"0.10": 4, "0.5": 21, "1": 42}
    # Two of four are shared by all, and the second round brings everything back.
    assert found["hit_ratio"]["lru"]["0.10"] == pytest.approx(2 * 39 / 160)
    assert found["hit_ratio"]["optimum"]["0.5"] == pytest.approx((2 * 39 + 19) / 160, abs=0.01)
    assert found["hit_ratio"]["lru"]["1"] == found["unbounded"] == pytest.approx((2 * 39 + 40) / 160)
    assert found["writes_per_access"]["lru"] == pytest.approx(
        {"0.10": 82 / 160, "0.5": 82 / 160, "1": 42 / 160}
    )
    assert (found["traces"], found["format"], found["skipped_records"]) == ([str(trace)], "mooncake", 0)


def test_processes_change_no_figure(trace: Path) -> None:
    asked = (trace, "--policies", "lru,arc", "--fractions", "0.1", "--json")
    assert found_in(run(*asked, "--jobs", "2")) == found_in(run(*asked))


def test_only_who_was_asked_for_is_replayed_in_that_order(trace: Path) -> None:
    found = found_in(run(trace, "--policies", "optimum,lru,optimum", "--json"))
    assert list(found["hit_ratio"]) == ["optimum", "lru"]
    assert list(found["hit_ratio"]["lru"]) == ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.4"]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 300])
def test_tables_fit_and_hold_the_figures(trace: Path, columns: int) -> None:
    shares = [f"0.{share:02}" for share in range(5, 75, 5)]
    asked = (trace, "--policies", "lru,second_sight,optimum", "--fractions", ",".join(shares))
    result = run(*asked, columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= min(columns, 100)
    assert "40 requests, 160 full blocks of 512 tokens, 42 different" in " ".join(result.stdout.split())
    assert "73.75 is what a cache that keeps everything would hit" in " ".join(result.stdout.split())
    ratios = found_in(run(*asked, "--json"))["hit_ratio"]
    for policy in ("lru", "second_sight", "optimum"):
        rows = [line.split() for line in result.stdout.splitlines() if line.startswith(policy)]
        # Hits and writes take turns, and hits have two digits.
        hits = [value for row in rows for value in row[1:] if len(value.partition(".")[2]) == 2]
        assert hits == [f"{100 * ratios[policy][share]:.2f}" for share in shares]


@pytest.mark.parametrize("columns", [40, 100])
def test_with_a_model_sizes_are_told_in_bytes_too(trace: Path, tmp_path: Path, columns: int) -> None:
    html = tmp_path / "page.html"
    asked = (trace, "--fractions", "0.10,1", "--policies", "lru", "--model", 131_072)
    found = found_in(run(*asked, "--json", "--html", html))
    assert found["block_bytes"] == 64 << 20
    assert found["capacity_bytes"] == {"0.10": 4 * 64 << 20, "1": 42 * 64 << 20}
    page = html.read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "256 MiB" in page
    assert "2.62 GiB of KV cache" in page
    result = run(*asked, columns=columns)
    lines = result.stdout.splitlines()
    assert any("memory" in line and "256 MiB" in line and "2.62 GiB" in line for line in lines)
    assert "of KV cache" in " ".join(result.stdout.split())
    assert all(len(line) <= columns for line in lines)
    without = found_in(run(trace, "--fractions", "0.10,1", "--policies", "lru", "--json"))
    assert {name: found[name] for name in without} == without


def test_a_model_that_nobody_can_read_is_refused_without_a_server_too(trace: Path) -> None:
    result = run(trace, "--model", "gpt")
    assert result.exit_code == 2
    assert "model" in result.stderr


@pytest.mark.parametrize(
    "fractions", ["0", "-0.1", "1.01", "5", "nan", "inf", "x", "0.1;0.2", "", ",", "0.1,5%"]
)
def test_a_fraction_that_is_none_is_refused_with_what_would_do(trace: Path, fractions: str) -> None:
    result = run(trace, "--fractions", fractions)
    assert result.exit_code == 2
    assert "--fractions = " in result.stderr
    assert "above 0 and up to 1: 0.005,0.01,0.1" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("policies", "wrong"), [("lro", "lro"), ("LRU", "LRU"), ("", ""), (",", ","), ("lru,best", "best")]
)
def test_a_policy_nobody_knows_is_refused_with_those_that_are_known(
    trace: Path, policies: str, wrong: str
) -> None:
    result = run(trace, "--policies", policies, "--json")
    assert result.exit_code == 2
    (error,) = json.loads(result.stdout)["errors"]
    assert error["setting"] == "--policies"
    assert error["value"] == wrong
    assert all(name in error["hint"] for name in (*known(), "all"))


@pytest.mark.parametrize("jobs", [0, -1, 100_000])
def test_a_number_of_processes_that_cannot_be_is_refused(trace: Path, jobs: int) -> None:
    result = run(trace, "--jobs", jobs)
    assert result.exit_code == 2
    assert f"--jobs = {jobs}: give a whole number from 1 to" in result.stderr


def test_a_size_of_no_block_is_said(trace: Path) -> None:
    result = run(trace, "--policies", "lru,optimum", "--fractions", "0.01,0.1", "--json")
    assert "--fractions 0.01 of 42 different blocks is none: nothing can hit" in result.stderr
    assert {policy: ratios["0.01"] for policy, ratios in found_in(result)["hit_ratio"].items()} == {
        "lru": 0,
        "optimum": 0,
    }


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere.jsonl.gz")
    assert result.exit_code == 2
    assert "nowhere.jsonl.gz" in result.stderr


def test_a_trace_without_a_full_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [3]}\n')
    result = run(path)
    assert result.exit_code == 2
    assert "short.jsonl.gz': no full block in 1 request" in result.stderr


def test_help_teaches_with_an_example() -> None:
    result = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert "kvtide replay conversation.jsonl.gz" in result.stdout
    assert all(name in result.stdout for name in (*known(), "--fractions", "--policies", "--json", "--jobs"))


def test_a_bad_record_is_named_by_file_and_line_and_left_out_if_asked(trace: Path) -> None:
    with gzip.open(trace, "at") as file:
        file.write('{"timestamp": 40000, "input_length": 2048, "output_length": 1, "hash_ids": [7]}\n')
    asked = (trace, "--policies", "lru", "--fractions", "0.5")
    result = run(*asked)
    assert result.exit_code == 2
    assert f"{trace}, line 41: hash_ids: 1 ids for 2048 tokens" in result.stderr
    result = run(*asked, "--skip-bad-records", "--json")
    assert (found_in(result)["requests"], found_in(result)["skipped_records"]) == (40, 1)
    assert f"left out: {trace}, line 41: hash_ids: 1 ids" in result.stderr
    assert "left out: 1 bad record in all" in result.stderr


def test_blocks_that_are_not_chained_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "loose.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids}
        for ids in ([1, 2], [3, 2])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(path)
    assert result.exit_code == 2
    assert "block 2 of request 2 has other blocks before it than where it was first seen" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [("--block-tokens", "0"), ("--session-span", "-1"), ("--session-span", "nan"), ("--format", "csv")],
)
def test_an_option_of_reading_that_cannot_be_is_named(trace: Path, option: str, value: str) -> None:
    result = run(trace, option, value)
    assert result.exit_code == 2
    assert f"{option.removeprefix('--')} = " in result.stderr


def test_files_are_servers_beside_each_other_or_parts_of_one_trace(trace: Path) -> None:
    halves = [trace.with_name(f"{half}.jsonl") for half in ("first", "second")]
    with gzip.open(trace, "rt") as file:
        lines = list(file)
    for half, some in zip(halves, (lines[:20], lines[20:]), strict=True):
        half.write_text("".join(some))
    asked = ("--policies", "lru", "--fractions", "1", "--json")
    beside, parts, whole = (run(*files, *asked) for files in (halves, (*halves, "--continued"), (trace,)))
    assert found_in(beside)["unique_blocks"] == 2 * (2 + 2 * 20)
    assert found_in(parts) == {**found_in(whole), "traces": [str(half) for half in halves]}


def test_larger_blocks_can_be_asked_for(trace: Path) -> None:
    found = found_in(run(trace, "--block-tokens", "1024", "--policies", "lru", "--fractions", "1", "--json"))
    assert (found["block_tokens"], found["accesses"], found["unique_blocks"]) == (1024, 80, 21)
    result = run(trace, "--block-tokens", "700")
    assert result.exit_code == 2
    assert "give a multiple of 512" in result.stderr


def test_shares_are_refused_where_a_server_is_asked_for(trace: Path) -> None:
    result = run(trace, "--model", "131072", "--host-memory", "1GiB", "--fractions", "0.1")
    assert result.exit_code == 2
    assert "--fractions = '0.1': leave it out" in result.stderr
