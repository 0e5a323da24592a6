"""Lives of chunks below host memory, with vLLM's real schedulers and a real disk."""

from pathlib import Path

import pytest
from test_failures_disk import CHUNKS, ask, counted, leave_on_disk_alone, patience, wait_until_warm, with_disk
from test_lives import PROMPT, Build, run

__all__ = ["patience"]


def test_what_left_host_memory_and_the_device_is_loaded_from_disk(build: Build, tmp_path: Path) -> None:
    harness = with_disk(build, tmp_path)
    leave_on_disk_alone(harness)
    ask(harness, "again")
    assert counted(harness, "tier_hit_chunks|disk") == CHUNKS
    assert counted(harness, "hit_tokens|host") == 4 * CHUNKS


def test_a_request_that_goes_while_it_waits_for_the_disk_leaves_nothing_behind(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = with_disk(build, tmp_path)
    leave_on_disk_alone(harness)
    harness.add("goes", PROMPT, 4)
    assert harness.connector._deciding._lower._promotions._open_count > 0
    harness.abort("goes")
    run(harness, "another", [900 + i for i in range(30)])
    ask(harness, "comes", PROMPT)
    assert harness.connector._deciding._lower._promotions._kept_count == 0


def test_a_restart_finds_what_was_written_and_serves_it(build: Build, tmp_path: Path) -> None:
    harness = with_disk(build, tmp_path)
    leave_on_disk_alone(harness)
    harness.restart(weights=0)
    wait_until_warm(harness)
    assert counted(harness, "tier_found_chunks|disk") == CHUNKS + 1
    ask(harness, "after the restart")
    assert counted(harness, "tier_hit_chunks|disk") == CHUNKS
