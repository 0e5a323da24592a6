"""Requests out of KV events: who stored what behind what."""

from pathlib import Path
from typing import Any

import pytest
from traces import write_lines

from kvtide.errors import TraceError
from kvtide.sim.traces import TraceOptions, TraceRequest, kv_events, read_trace


def stored(parent: int | str | None, *blocks: int | str, **values: Any) -> dict[str, Any]:
    """An event as vLLM 0.32 writes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": parent,
        "token_ids": [7] * 16 * len(blocks),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    } | values


def batch(at_s: float, *events: Any) -> list[Any]:
    return [at_s, list(events), 0]


def read(tmp_path: Path, *lines: Any, **arguments: Any) -> list[TraceRequest]:
    return list(read_trace(write_lines(tmp_path / "events.jsonl", lines), **arguments))


def shape(requests: list[TraceRequest]) -> list[tuple[list[int], list[int]]]:
    seen: dict[bytes, int] = {}
    return [
        (
            [seen.setdefault(one, len(seen)) for one in request.block_hashes],
            [seen.setdefault(one, len(seen)) for one in request.generated_hashes],
        )
        for request in requests
    ]


def test_what_is_stored_behind_a_known_prefix_is_a_request_with_that_prefix(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        batch(100.0, stored(None, 11, 12, 13)),
        batch(120.0, stored(12, 21, 22)),
        batch(140.0, stored(None, 31), stored(22, 23)),
    )
    assert shape(requests) == [([0, 1, 2], []), ([0, 1, 3, 4], []), ([5], []), ([0, 1, 3, 4, 6], [])]
    assert [request.arrival_s for request in requests] == [0, 20, 40, 40]
    assert [(request.prompt_tokens, request.block_tokens) for request in requests[:2]] == [(48, 16), (64, 16)]


def test_a_request_that_goes_on_is_one_and_single_blocks_at_its_end_are_its_answer(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        batch(0.0, stored(None, 1, 2)),
        batch(0.5, stored(2, 3)),
        batch(1.0, stored(3, 4, 5), stored(None, 91, 92)),
        batch(1.5, stored(5, 6), stored(92, 93)),
        batch(6.0, stored(6, 7)),
        batch(60.0, stored(7, 8)),
    )
    assert shape(requests) == [
        ([0, 1, 2, 3, 4], [5, 6]),
        ([7, 8], [9]),
        ([0, 1, 2, 3, 4, 5, 6, 10], []),
    ]
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [
        (80, 32),
        (32, 16),
        (128, 0),
    ]


def test_a_shorter_pause_parts_what_a_longer_one_joins(tmp_path: Path) -> None:
    lines = [batch(0.0, stored(None, 1, 2)), batch(3.0, stored(2, 3))]
    assert len(read(tmp_path, *lines)) == 1
    assert len(read(tmp_path, *lines, options=TraceOptions(pause_s=2.0))) == 2


def test_only_the_device_s_whole_blocks_of_one_group_that_looks_back_count(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        batch(0.0, stored(None, 1, kv_cache_spec_kind="sliding_window", group_idx=0)),
        batch(0.0, stored(None, 1, 2, group_idx=1), stored(None, 5, 6, group_idx=2)),
        batch(0.0, stored(None, 7, medium="CPU"), stored(2, 8, group_idx=1, block_size=8)),
        batch(
            0.0, {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}, {"type": "AllBlocksCleared"}
        ),
        batch(9.0, stored(2, 3, group_idx=1)),
    )
    assert shape(requests) == [([0, 1], []), ([0, 1, 2], [])]


def test_hashes_may_be_bytes_in_base64_and_events_lists_or_batches_objects(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        {"ts": 1.0, "events": [["BlockStored", ["aa==", "bb=="], None, [1, 2], 1, None]]},
        [9.0, [["BlockStored", ["cc=="], "aa==", [3], 1, None, "GPU"], ["AllBlocksCleared"]]],
    )
    assert shape(requests) == [([0, 1], []), ([0, 2], [])]


def test_what_a_server_reports_of_a_reused_prefix_is_a_request(tmp_path: Path) -> None:
    requests = read(
        tmp_path, batch(0.0, stored(None, 1, 2)), batch(9.0, stored(None, 1, 2)), batch(9.0, stored(2, 3))
    )
    assert shape(requests) == [([0, 1], []), ([0, 1], [2])]


def test_blocks_can_be_read_coarser(tmp_path: Path) -> None:
    requests = read(tmp_path, batch(0.0, stored(None, 1, 2, 3)), options=TraceOptions(block_tokens=32))
    assert (requests[0].block_tokens, shape(requests)) == (32, [([0], [])])


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (batch(1.0, stored(99, 3)), "parent_block_hash: nobody has stored it"),
        (batch(1.0, stored(None, 2)), "block_hashes: a block was behind another one before"),
        (batch(1.0, stored(2, 1)), "block_hashes: a block was behind another one before"),
        (batch(1.0, stored(2, 3, 3)), "block_hashes: a block was behind another one before"),
        (batch(1.0, stored(3, 3)), "parent_block_hash: nobody has stored it"),
        (batch(-1.0), "ts: -1.0 comes after 0.0, times must not decrease"),
        (batch(1.0, {"type": "Nonsense"}), "type: 'Nonsense' should be 'BlockStored'"),
        (batch(1.0, 7), "the record: 7 should be"),
        (batch(1.0, stored(None, 5, block_size=0)), "block_size: 0 should be greater"),
        (batch(1.0, stored(None, 1 << 70)), "block_hashes.0."),
        ([1.0], "events: is missing"),
        (b"[" * 100_000, "no JSON: recursion limit"),
        (b"[NaN, [], 0]", "ts: nan should be a finite number"),
    ],
    ids=lambda one: str(one)[:50],
)
def test_a_bad_event_is_named_by_its_line(tmp_path: Path, bad: Any, fault: str) -> None:
    lines = [batch(0.0, stored(None, 1, 2)), bad, batch(30.0, stored(2, 9))]
    with pytest.raises(TraceError) as caught:
        read(tmp_path, *lines)
    assert f"events.jsonl, line 2: {fault}" in str(caught.value)
    assert len(read(tmp_path, *lines, on_error="skip")) == 2


def test_of_the_longest_unused_blocks_the_leaves_are_forgotten_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "KNOWN", 6)
    lines = [
        batch(0.0, stored(None, 1, 2, 3)),
        batch(10.0, stored(None, 11, 12, 13)),
        batch(20.0, stored(2, 4)),
        batch(30.0, stored(None, 21)),
        batch(40.0, stored(4, 5)),
        batch(50.0, stored(13, 14)),
    ]
    trace = read_trace(write_lines(tmp_path / "events.jsonl", lines), on_error="skip")
    requests = list(trace)
    assert shape(requests)[-1] == ([0, 1, 6, 8], [])
    assert [str(error.where) for error in trace.faults[0].first] == ["line 6"]


def test_forgetting_lets_nobody_walk_in_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "KNOWN", 2)
    lines = [
        batch(0.0, stored(None, 1, 2, 3)),
        batch(10.0, stored(3, 1)),
        batch(20.0, stored(1, 2)),
        batch(30.0, stored(2, 3)),
        batch(40.0, stored(3, 4)),
    ]
    trace = read_trace(write_lines(tmp_path / "events.jsonl", lines), on_error="skip")
    for request in trace:
        assert len(set(request.block_hashes)) == len(request.block_hashes)
    assert trace.skipped_count > 0
