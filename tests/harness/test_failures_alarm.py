"""Failures of the field, F4: an alarm when stores grow and loads stay at 0, and no alarm for less.

Each test has in ``failure_rules.py`` the line of the connector without which it fails.
"""

from typing import Any

import pytest
from test_lives import PROMPT, Build, hit_tokens

from kvtide.scheduler import scheduler as scheduler_half
from kvtide.scheduler.alarm import MISSES
from kvtide.scheduler.lookup import Found
from kvtide.vllm.testing import Harness

SAID = "host memory is written and never read"


def ask(harness: Harness, times: int, prompt: list[int] | None = None, **arguments: Any) -> int:
    """Ask one prompt again and again, or as many new ones, the device forgetting each; count the alarms."""
    for time in range(times):
        harness.scheduler.reset_prefix_cache()
        one = [time % 90, time // 90, *PROMPT] if prompt is None else prompt
        harness.add(f"{len(harness.outputs)}", one, 1, **arguments)
        harness.drain()
    return int(harness.counted.data.get("write_only_alarms|", 0))


@pytest.fixture
def never_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked for is never found: a reader who asks for something else than was written."""
    monkeypatch.setattr(scheduler_half, "look_up", lambda state, *_: Found(0, False))


@pytest.mark.usefixtures("never_found")
@pytest.mark.parametrize("window_tokens", [None, 5])
def test_a_cache_that_is_asked_again_and_never_hit_raises_an_alarm_once(
    build: Build, caplog: pytest.LogCaptureFixture, window_tokens: int | None
) -> None:
    harness = build(window_tokens=window_tokens)
    assert ask(harness, 1 + MISSES - 1, PROMPT) == 0
    assert SAID not in caplog.text
    assert ask(harness, 1, PROMPT) == 1
    assert ask(harness, 2 * MISSES, PROMPT) == 1
    assert caplog.text.count(SAID) == 1
    assert f"{MISSES} requests asked again for {28 * MISSES} tokens" in caplog.text


def test_a_cold_start_and_prompts_that_never_come_again_are_no_alarm(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    harness = build()
    assert ask(harness, 3 * MISSES) == 0
    assert hit_tokens(harness) == 0
    assert harness.counted.data["stored_chunks|"] > 3 * MISSES
    assert SAID not in caplog.text


def test_a_cache_that_was_hit_once_is_no_alarm(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = build()
    assert ask(harness, 2, PROMPT) == 0
    assert hit_tokens(harness) == 28
    monkeypatch.setattr(scheduler_half, "look_up", lambda state, *_: Found(0, False))
    assert ask(harness, 2 * MISSES, PROMPT) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"skip_reading_prefix_cache": True},
        {"extra_args": {"kv_transfer_params": {"no_read": True}}},
        {"extra_args": {"kv_transfer_params": {"max_load_tokens": 3}}},
    ],
    ids=["engine", "no_read", "max_load_tokens"],
)
def test_requests_that_may_not_read_are_no_alarm(build: Build, arguments: dict[str, Any]) -> None:
    assert ask(build(), 2 * MISSES, PROMPT, **arguments) == 0


def test_hits_in_the_engines_own_cache_are_no_alarm(build: Build) -> None:
    harness = build()
    for index in range(2 * MISSES):
        harness.add(f"{index}", PROMPT, 1)
        harness.drain()
    assert harness.counted.data["stored_chunks|"] == 7
    assert "write_only_alarms|" not in harness.counted.data
