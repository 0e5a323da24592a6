"""``kvtide replay --html FILE``: a page that says what ``--json`` says, or is refused before the replay."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli.main import app


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Mooncake's format: ten prompts of two full blocks, which all come twice."""
    path = tmp_path / "chats.jsonl"
    rows = [
        {"timestamp": at, "input_length": 1024, "output_length": 1, "hash_ids": [at % 10, 10 + at % 10]}
        for at in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "100"})


def test_the_page_says_what_the_json_says(trace: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    result = run(trace, "--fractions", "0.5,1", "--policies", "lru,optimum", "--json", "--html", html)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert f"wrote {html}" in result.stderr
    page = html.read_text(encoding="utf-8").replace("\u00a0", " ")
    for policy in ("lru", "optimum"):
        for ratio in found["hit_ratio"][policy].values():
            assert f"{100 * ratio:.2f} %</td>" in page
    assert found["hit_ratio"]["lru"]["1"] == 0.5
    assert "chats.jsonl · 20 requests · 40 blocks asked for · 20 different blocks" in page


def test_a_whole_server_has_its_page_over_host_memory(trace: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    asked = ("--model", 1024, "--host-memory", "64MiB,16MiB", "--disk", "1GiB@1GB/s", "--policies", "lru")
    result = run(trace, *asked, "--json", "--html", html)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]
    page = html.read_text(encoding="utf-8").replace("\u00a0", " ")
    rows = {
        name: re.findall("<td>([^<]*)</td>", cells)
        for name, cells in re.findall(
            r'<tr><th scope="row">(?:<span[^>]*></span>)?([^<]*)</th>(.*)</tr>', page
        )
    }
    sizes = ("16MiB", "64MiB")
    assert rows["lru p95"] == [f"{found[size]['lru']['ttft_s']['p95']:.3f}" for size in sizes]
    written = [found[size]["lru"]["written_bytes_per_day"]["disk"] / 1e9 for size in sizes]
    assert rows["lru disk"] == [f"{amount:,.1f}" for amount in written]
    hits = [100 * found[size]["lru"]["block_hit_ratio"] for size in sizes]
    assert rows["lru"] == [f"{percent:.2f} %" for percent in hits]
    assert min(hits) > 0


def test_a_page_is_written_over_and_without_json_the_table_is_still_there(
    trace: Path, tmp_path: Path
) -> None:
    html = tmp_path / "page.html"
    for policy in ("lru", "arc"):
        result = run(trace, "--fractions", "0.5", "--policies", policy, "--html", html)
        assert result.exit_code == 0, result.output
        assert policy in result.stdout
    rows = re.findall(r'<tr><th scope="row"><span[^>]*></span>(\w+)</th>', html.read_text(encoding="utf-8"))
    assert set(rows) == {"arc"}


def test_a_trace_is_never_written_over(trace: Path) -> None:
    before = trace.read_bytes()
    result = run(trace, "--html", trace)
    assert result.exit_code == 2
    assert "give a new file, or a page to write over" in result.stderr
    assert trace.read_bytes() == before


@pytest.mark.parametrize("where", [".", "none/page.html", "chats.jsonl/page.html"])
def test_a_file_that_cannot_be_is_refused_before_the_trace_is_read(trace: Path, where: str) -> None:
    result = run(trace.parent / "no such trace", "--json", "--html", trace.parent / where)
    assert result.exit_code == 2
    (error,) = json.loads(result.stdout)["errors"]
    assert error["setting"] == "--html"
    assert error["hint"] == "give a file in a folder that exists"


def test_without_plotly_it_is_refused_at_once(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run(trace, "--html", trace.parent / "page.html")
    assert result.exit_code == 2
    assert "pip install 'kvtide[replay]'" in result.stderr
    assert result.stdout == ""
