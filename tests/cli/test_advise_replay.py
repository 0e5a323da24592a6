"""``kvtide advise --replay``: what a trace says, and which options it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtide.adviser import window
from kvtide.cli.main import app
from kvtide.sim.accesses import accesses_of
from kvtide.sim.manager_only import manager_of, replay
from kvtide.sim.traces import read_trace

BLOCK_BYTES = 512 * 1000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """240 prompts of two full blocks and a part of one, of 60 chats that come back in turn."""
    path = tmp_path / "chats.jsonl"
    row = {"input_length": 2 * 512 + 9, "output_length": 2}
    chats = [2 * (at * 7 % 60) for at in range(240)]
    rows = [
        {**row, "timestamp": 30_000 * at, "hash_ids": [chat, chat + 1, 1000 + at]}
        for at, chat in enumerate(chats)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(autouse=True)
def speaks_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST_REQUESTS", 200)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["advise", *map(str, arguments)], env={"COLUMNS": "100"})


def sized(trace: Path, blocks: int, *more: object) -> Result:
    return run(
        "--replay", trace, "--model", 1000, "--host-memory", blocks * BLOCK_BYTES, "--policy", "lru", *more
    )


def test_a_trace_says_what_its_replay_hits_at_every_size(trace: Path) -> None:
    result = sized(trace, 64, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    (model,) = found["models"]
    accesses = accesses_of(read_trace([trace]))
    for size in model["tiers"][0]["sizes"]:
        outcome = replay(accesses, manager_of("lru", int(64 * size["times"])))
        assert size["hit_points"] == pytest.approx(100 * outcome.hit_ratio, abs=1e-3)
    assert [round(one["hit_points"]) for one in model["tiers"][0]["sizes"]] == [0, 0, 75, 75]
    assert (model["judged_requests"], model["sampled_share"]) == (240, 1.0)


def test_the_sentences_are_those_of_a_server(trace: Path) -> None:
    said = " ".join(sized(trace, 64).stdout.split())
    assert "With twice the host memory (62.5 MiB): +75.0 ± 0.0 points of token hits." in said
    assert "With half the host memory (15.62 MiB): hardly any difference; +0.0 ± 0.0 points" in said
    assert "Take 62.5 MiB of host memory: from there on a doubling brings less than 1 point." in said


def test_a_whole_server_says_how_soon_the_first_token_comes(trace: Path, tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"prompt_tokens_per_s": 1000}))
    result = sized(trace, 64, "--rates", rates, "--json")
    assert result.exit_code == 0, result.output
    sizes = {one["times"]: one for one in json.loads(result.stdout)["models"][0]["tiers"][0]["sizes"]}
    # The engine's own pool holds all of it: nothing is to be gained below.
    assert sizes[2]["first_token_s"] == pytest.approx(sizes[1]["first_token_s"])
    assert sizes[1]["hit_points"] == pytest.approx(75 * 1024 / 1033, abs=0.1)
    assert sizes[1]["first_token_s"] > 0


def test_a_short_trace_says_how_short(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "LEAST_REQUESTS", 1000)
    result = sized(trace, 64)
    assert (result.exit_code, "240 of the 1,000 requests" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("http://127.0.0.1:1", "--model", "1000"), "--model"),
        (("http://127.0.0.1:1", "--rates", "x"), "--rates"),
        (("http://127.0.0.1:1", "--policy", "lru"), "--policy"),
        (("http://127.0.0.1:1", "--replay", "TRACE"), "--replay"),
        (("--replay", "TRACE", "--host-memory", "1GiB"), "--model"),
        (("--replay", "TRACE", "--model", "1000"), "--host-memory"),
        (("--replay", "TRACE", "--model", "1000", "--host-memory", "1KiB"), "--host-memory"),
        (("--replay", "TRACE", "--model", "1000", "--host-memory", "1GiB,2GiB"), "--host-memory"),
        (
            ("--replay", "TRACE", "--model", "1000", "--host-memory", "1GiB", "--policy", "optimum"),
            "--policies",
        ),
        (
            ("--replay", "TRACE", "--model", "1000", "--host-memory", "1GiB", "--policy", "lru,arc"),
            "--policy",
        ),
        (("--replay", "TRACE", "--model", "1000", "--host-memory", "1GiB", "--slower", "4"), "--slower"),
        (("--replay", "TRACE", "--model", "1000", "--host-memory", "1GiB", "--rates", "nothing"), "rates"),
    ],
)
def test_options_that_do_not_fit_are_named(trace: Path, arguments: tuple[str, ...], named: str) -> None:
    result = run(*(str(trace) if one == "TRACE" else one for one in arguments))
    assert (result.exit_code, f"{named} = " in result.output) == (2, True), result.output


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for path in (empty, tmp_path / "nothing.jsonl"):
        result = sized(path, 64)
        assert (result.exit_code, str(path) in result.output.replace("\n", "")) == (2, True), result.output
