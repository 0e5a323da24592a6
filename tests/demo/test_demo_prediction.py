"""A report whose figures are those of a known engine is predicted by a replay of it; others are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtide.demo.errors import DemoError
from kvtide.demo.prediction import predict

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_prediction.py"
BLOCK = 32
USERS, TURNS, NEW_TOKENS = 5, 3, 40
STEP_S, TOKEN_S = 0.02, 1 / 2000


def reply(prompt_tokens: int, cached: int, loaded: int, new_tokens: int) -> dict[str, Any]:
    """Answer as an engine does that takes so long for a step and a token; a load takes next to nothing."""
    first_s = STEP_S + (prompt_tokens - cached) * TOKEN_S
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached,
        "loaded_tokens": loaded,
        "ttft_ms": 1e3 * first_s,
        "total_ms": 1e3 * (first_s + (new_tokens - 1) * STEP_S),
        "token_ids": [7] * new_tokens,
        "logprobs": [],
    }


def report() -> dict[str, Any]:
    """Five users in turn, whose prompts push one another out of a pool of 128 blocks, but for the first."""
    requests = []
    said = [1200 + 23 * user for user in range(USERS)]
    for turn in range(TURNS):
        for user in range(USERS):
            prompt_tokens = said[user]
            held = (prompt_tokens - NEW_TOKENS - 25 + NEW_TOKENS - 1) // BLOCK * BLOCK if turn else 0
            # The first block is everybody's, and never left the engine.
            cached = held if turn else BLOCK * bool(user)
            ours = reply(prompt_tokens, cached, held - BLOCK if turn else 0, NEW_TOKENS)
            others = reply(prompt_tokens, BLOCK, 0, 8) if turn else None
            requests.append(
                {"user": user, "turn": turn, "kvtide": ours, "recompute": others, "reference": ours}
            )
            said[user] += NEW_TOKENS + 25
    return {
        "requests": requests,
        "asked": {"block_tokens": BLOCK, "new_tokens": NEW_TOKENS, "engine_pool_tokens": {"kvtide": 4096}},
        "host_bytes_budget": 1 << 30,
        "bytes_moved": {"store": 1 << 30, "load": 1 << 30},
        "copy_s": {"store": 0.1, "load": 0.1},
    }


def test_hits_and_times_of_a_known_engine_are_predicted() -> None:
    found = predict(report())
    assert found.is_exact, [pair for pair in found.hit_tokens if pair[0] != pair[1]]
    assert abs(found.ttft_error) < 0.1
    assert found.rates.prompt_tokens_per_s == pytest.approx(2000, rel=0.05)


def test_a_hit_that_was_otherwise_is_not_exact(tmp_path: Path) -> None:
    changed = report()
    changed["requests"][-1]["kvtide"]["loaded_tokens"] -= BLOCK
    assert not predict(changed).is_exact
    path = tmp_path / "report.json"
    path.write_text(json.dumps(changed))
    ran = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "1 of which hit otherwise" in ran.stdout


@pytest.mark.parametrize("missing", ["requests", "asked", "host_bytes_budget", "copy_s"])
def test_a_report_of_something_else_is_refused(missing: str) -> None:
    fields = report()
    del fields[missing]
    with pytest.raises(DemoError, match="no report of the demo"):
        predict(fields)


def test_a_report_without_whole_times_or_loads_is_refused() -> None:
    earlier, cold = report(), report()
    for record in earlier["requests"]:
        del record["kvtide"]["total_ms"]
    with pytest.raises(DemoError, match="earlier version"):
        predict(earlier)
    cold["requests"] = cold["requests"][:USERS]
    with pytest.raises(DemoError, match="nothing was loaded"):
        predict(cold)
