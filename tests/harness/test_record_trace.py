"""What vLLM's real scheduler is asked is recorded by the connector, and read back with the same prefixes."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from kvtide.errors import ConfigError
from kvtide.sim.traces import TraceRequest, read_trace
from kvtide.vllm.testing import Harness

Build = Callable[..., Harness]
BLOCK_TOKENS = 4
PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens
BRANCH = PROMPT[:12] + list(range(50, 63))  # 3 blocks of PROMPT, 3 of its own, and 1 token
OTHER = list(range(100, 116))  # 4 blocks


def shape(requests: list[TraceRequest]) -> list[tuple[list[int], list[int]]]:
    """Blocks of prompts and of answers as numbers, in the order in which they are first seen."""
    seen: dict[bytes, int] = {}

    def numbers(blocks: object) -> list[int]:
        return [seen.setdefault(block, len(seen)) for block in blocks]  # type: ignore[attr-defined]

    return [(numbers(request.block_hashes), numbers(request.generated_hashes)) for request in requests]


def test_a_run_is_read_back_with_the_prefixes_it_had(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    harness = build(record_trace=str(path))
    harness.add("first", PROMPT, 6)
    harness.add("branch", BRANCH, 1)
    harness.drain()
    harness.add("again", PROMPT + harness.outputs["first"], 2)
    harness.add("other", OTHER, 1)
    harness.add("aborted", PROMPT, 4)
    harness.abort("aborted")
    harness.drain()
    harness.connector.shutdown()

    requests = list(read_trace(path))
    # Of 36 tokens the last one was sampled and not computed, and the block that it fills was never there.
    assert shape(requests) == [
        ([0, 1, 2, 3, 4, 5, 6], [7]),
        ([0, 1, 2, 8, 9, 10], []),
        ([0, 1, 2, 3, 4, 5, 6, 7, 11], []),
        ([12, 13, 14, 15], []),
        ([0, 1, 2, 3, 4, 5, 6], []),
    ]
    assert [request.prompt_tokens for request in requests] == [30, 25, 36, 16, 30]
    assert [request.output_tokens for request in requests] == [6, 1, 2, 1, 0]
    assert {request.block_tokens for request in requests} == {BLOCK_TOKENS}
    arrivals_s = [request.arrival_s for request in requests]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[0] >= 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_requests_of_other_adapters_and_salts_share_nothing(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    harness = build(record_trace=str(path))
    for name, salt in (("a", None), ("b", "salt"), ("c", "salt")):
        harness.add(name, OTHER, 1, cache_salt=salt)
    harness.drain()
    harness.connector.shutdown()
    assert [blocks for blocks, _ in shape(list(read_trace(path)))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [4, 5, 6, 7],
    ]


def test_what_is_still_open_at_the_end_is_not_in_the_recording(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    harness = build(record_trace=str(path))
    harness.add("open", PROMPT, 50)
    harness.add("done", OTHER, 1)
    for _ in range(4):
        harness.step()
    harness.connector.shutdown()
    assert [request.prompt_tokens for request in read_trace(path)] == [16]
    harness.scheduler.finish_requests("open", RequestStatus.FINISHED_ABORTED)


def test_a_file_that_cannot_be_made_ends_the_start_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace = .*give a file in a folder"):
        Harness(tmp_path, record_trace=str(tmp_path / "none" / "trace.jsonl"))
