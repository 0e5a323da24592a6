"""Sessions of coding agents: one a file, nested, without a beginning, merged by an invented one."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from traces import CALL, SESSION, write_document

from kvtide.errors import ConfigError, TraceError
from kvtide.sim.traces import TraceOptions, TraceRequest, read_trace

AT_ONCE = TraceOptions(session_span_s=0.0)


def session(*calls: Any, **values: Any) -> dict[str, Any]:
    return copy.deepcopy(SESSION) | {"requests": list(calls)} | values


def call(at_s: float, *numbers: int, **values: Any) -> dict[str, Any]:
    return CALL | {"t": at_s, "in": 64 * len(numbers) + 3, "hash_ids": list(numbers)} | values


def subagent(at_s: float, *calls: Any, **values: Any) -> dict[str, Any]:
    return {"type": "subagent", "t": at_s, "agent_id": "helper", "requests": list(calls)} | values


def write(tmp_path: Path, *sessions: dict[str, Any]) -> Path:
    for index, one in enumerate(sessions):
        write_document(tmp_path / f"trace_{index:04}.json.gz", one | {"id": f"s{index}"})
    return tmp_path


def arrivals(requests: list[TraceRequest]) -> list[tuple[str, float]]:
    return [(request.session, round(request.arrival_s, 3)) for request in requests]


def test_a_subagent_s_times_count_from_its_own_beginning_and_it_is_a_session_within_one(
    tmp_path: Path,
) -> None:
    one = session(
        call(0.0, 1, 2),
        subagent(10.0, call(0.0, 1), call(5.5, 1, 9), subagent(6.0, call(0.5, 1), agent_id="")),
        call(12.0, 1, 2, 3),
    )
    requests = list(read_trace(write(tmp_path, one), options=AT_ONCE))
    assert arrivals(requests) == [
        ("s0", 0.0),
        ("s0/helper", 10.0),
        ("s0", 12.0),
        ("s0/helper", 15.5),
        ("s0/helper/requests[1].requests[2]", 16.5),
    ]
    first, helper, second, *_ = (list(request.block_hashes) for request in requests)
    assert helper == first[:1]
    assert first == second[:2]
    assert {request.block_tokens for request in requests} == {64}
    assert (requests[0].prompt_tokens, requests[0].output_tokens) == (131, 5)


def test_requests_at_one_time_keep_their_order(tmp_path: Path) -> None:
    one = session(*(call(1.0, number) for number in range(5)), call(0.0, 9))
    requests = list(read_trace(write(tmp_path, one), options=AT_ONCE))
    numbers = [int.from_bytes(request.block_hashes[0][4:]) for request in requests]
    assert numbers == [9, 0, 1, 2, 3, 4]


def test_the_same_number_in_two_sessions_is_two_blocks(tmp_path: Path) -> None:
    one, other = read_trace(write(tmp_path, session(call(0.0, 1)), session(call(0.0, 1))), options=AT_ONCE)
    assert set(one.block_hashes).isdisjoint(other.block_hashes)


def test_sessions_begin_within_the_span_by_the_seed_and_come_merged(tmp_path: Path) -> None:
    write(tmp_path, *(session(call(0.0, 1), call(50.0 * n, 1, 2), call(700.0, 3)) for n in range(1, 9)))
    trace = read_trace(tmp_path, options=TraceOptions(seed=7, session_span_s=600.0))
    requests = list(trace)
    # The oracle: drawn here anew, sorted in one piece.
    draw = random.Random(7)
    begins_s = [draw.uniform(0, 600) for _ in range(8)]
    expected = sorted(
        (begin_s + at_s, f"s{index}")
        for index, begin_s in enumerate(begins_s)
        for at_s in (0.0, 50.0 * (index + 1), 700.0)
    )
    assert [(request.arrival_s, request.session) for request in requests] == expected
    assert list(trace) == requests
    assert arrivals(list(read_trace(tmp_path, options=TraceOptions(seed=8)))) != arrivals(requests)


def test_a_session_is_read_when_it_begins_and_not_before(tmp_path: Path) -> None:
    write(tmp_path, *(session(call(0.0, 1)) for _ in range(20)))
    options = TraceOptions(seed=1, session_span_s=100.0)
    order = [int(request.session[1:]) for request in read_trace(tmp_path, options=options)]
    (tmp_path / f"trace_{order[-1]:04}.json.gz").write_bytes(b"{")
    read = iter(read_trace(tmp_path, "weka", options=options))
    # One is looked at before the last request of all others: what it has might come first.
    assert [int(next(read).session[1:]) for _ in range(19)] == order[:-1]
    with pytest.raises(TraceError, match="no JSON"):
        next(read)


def test_coarser_blocks_are_named_by_their_last_part(tmp_path: Path) -> None:
    write(tmp_path, session(call(0.0, *range(17)), call(1.0, *range(8))))
    options = TraceOptions(block_tokens=512, session_span_s=0.0)
    one, other = read_trace(tmp_path, options=options)
    assert (one.block_tokens, len(one.block_hashes)) == (512, 2)
    assert list(other.block_hashes) == list(one.block_hashes[:1])
    with pytest.raises(ConfigError, match="block_tokens = 100: give a multiple of 64"):
        list(read_trace(tmp_path, on_error="skip", options=TraceOptions(block_tokens=100)))


@pytest.mark.parametrize(
    ("bad", "where", "fault"),
    [
        (call(1.0, 1, 2, **{"in": 64}), "requests[1]", "hash_ids: 2 ids for 64 tokens, 1 is due"),
        (call(1.0, 4, 4), "requests[1]", "hash_ids: 4 twice in one prompt"),
        (call(-1.0, 4), "requests[1]", "t: -1.0 should be greater"),
        (call(1.0, 4, **{"in": "much"}), "requests[1]", "in: 'much' should be a valid integer"),
        (call(1.0, -4), "requests[1]", "hash_ids.0: -4 should be greater"),
        ({"t": 1.0}, "requests[1]", "in: is missing"),
        (7, "requests[1]", "the record: 7 should be a valid"),
        (subagent(1.0, call(0.0, 1), {}), "requests[1].requests[1]", "t: is missing"),
        (subagent(1.0) | {"requests": 3}, "requests[1]", "requests: 3 should be a valid list"),
    ],
)
def test_a_bad_request_is_named_by_its_place_and_the_others_are_read(
    tmp_path: Path, bad: Any, where: str, fault: str
) -> None:
    path = write(tmp_path, session(call(0.0, 1), bad, call(2.0, 1, 2))) / "trace_0000.json.gz"
    with pytest.raises(TraceError) as caught:
        list(read_trace(path, options=AT_ONCE))
    assert str(caught.value).startswith(f"{path}, {where}: {fault}")
    trace = read_trace(path, on_error="skip", options=AT_ONCE)
    assert {0.0, 2.0} <= {request.arrival_s for request in trace}
    assert trace.skipped_count == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b'{"block_size": 64, "requests": ', "no JSON: EOF"),
        (b'{"block_size": 64, "requests": ' + b"[" * 100_000, "no JSON: recursion"),
        (b'{"block_size": 0, "requests": []}', "block_size: 0 should be"),
        (b'{"block_size": 64, "requests": {}}', "requests: an object of 0 should be a valid list"),
        (b"[]", "the record: "),
    ],
)
def test_a_bad_file_is_a_session_without_requests_and_the_others_begin_as_before(
    tmp_path: Path, text: bytes, fault: str
) -> None:
    write(tmp_path, session(call(0.0, 1)), session(call(0.0, 1)), session(call(0.0, 1)))
    whole = arrivals(list(read_trace(tmp_path)))
    (bad := tmp_path / "trace_0001.json.gz").write_bytes(text)
    with pytest.raises(TraceError, match="trace_0001"):
        list(read_trace(tmp_path))
    trace = read_trace(tmp_path, on_error="skip")
    assert arrivals(list(trace)) == [one for one in whole if one[0] != "s1"]
    assert [error.path for error in trace.faults[1].first] == [str(bad)]
    assert trace.faults[1].first[0].fault.startswith(fault)


def test_subagents_within_subagents_end_somewhere(tmp_path: Path) -> None:
    nested = call(0.0, 1)
    for _ in range(20):
        nested = subagent(0.0, nested)
    path = write(tmp_path, session(nested))
    with pytest.raises(TraceError, match="subagents within subagents, 16 deep"):
        list(read_trace(path))
