"""Bad records: each is named by file, line and fault; the reading stops there, or goes on and counts."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import AGENT, BAILIAN, MOONCAKE, write_lines

from kvtide.errors import TraceError
from kvtide.sim.traces import TraceOptions, read_trace
from kvtide.sim.traces.faults import Faults
from kvtide.sim.traces.packed import read_lines

OPTIONS = TraceOptions(tokenizer="bytes")

HUGE = b"9" * 5000


def changed(**values: Any) -> dict[str, Any]:
    return MOONCAKE | values


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in MOONCAKE.items() if key != name}


BAD: list[tuple[Any, str]] = [
    (changed(input_length=512), "hash_ids: 3 ids for 512 tokens, 1 is due"),
    (changed(input_length=1 << 30), "hash_ids: 3 ids for 1073741824 tokens, 2097152 are due"),
    (changed(input_length=0), "hash_ids: 3 ids for 0 tokens, 0 are due"),
    (changed(input_length=-5), "input_length: -5 should be greater than or equal to 0"),
    (changed(input_length="1100"), "input_length: '1100' should be a valid integer"),
    (changed(input_length=1100.5), "input_length: 1100.5 should be a valid integer"),
    (changed(input_length=True), "input_length: True should be a valid integer"),
    (changed(input_length=10**30), "input_length: 1000000000000000000000000000000 should be less than"),
    (changed(timestamp=None), "timestamp: None should be a valid number"),
    (changed(timestamp="now"), "timestamp: 'now' should be a valid number"),
    (changed(timestamp=1e300), "timestamp: 1e+300 should be less than"),
    (changed(hash_ids=[1, 2, 1]), ""),  # the partial block may be anything
    (changed(hash_ids=[7, 7, 1]), "hash_ids: 7 twice in one prompt"),
    (changed(hash_ids=[1, -2, 3]), "hash_ids.1: -2 should be greater"),
    (changed(hash_ids=[1, None, 3]), "hash_ids.1: None should be a valid integer"),
    (changed(hash_ids=[1, 2.5, 3]), "hash_ids.1: 2.5 should be a valid integer"),
    (changed(hash_ids=[1, 1 << 64, 3]), "hash_ids.1: 18446744073709551616 should be less than"),
    (changed(hash_ids=[[1], 2, 3]), "hash_ids.0: a list of 1 should be a valid integer"),
    (changed(hash_ids={"1": 2}), "hash_ids: an object of 1 should be a valid"),
    (changed(hash_ids="123"), "hash_ids: '123' should be a valid"),
    (without("hash_ids"), "hash_ids: is missing"),
    (without("timestamp"), "timestamp: is missing"),
    (
        b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
        "timestamp: nan should be a",
    ),
    (
        b'{"timestamp": 1, "input_length": ' + HUGE + b', "output_length": 1, "hash_ids": [1]}',
        "no JSON: number out of range",
    ),
    (
        b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [' + HUGE + b"]}",
        "no JSON: number out of range",
    ),
    (b'{"timestamp": 1, "x": ' + b"[" * 100_000, "no JSON: recursion limit"),
    (b'{"timestamp": 1, "input', "no JSON: EOF while parsing a string at byte 23"),
    (b"\xff\xfe{}", "no JSON: "),
    (b"[]", "the record: "),
    (b"null", "the record: "),
    (b'"a"', "the record: "),
    (b"7" * 100, "the record: "),
]


@pytest.mark.parametrize(("bad", "fault"), BAD, ids=lambda one: str(one)[:40])
def test_a_bad_record_is_named_by_file_line_and_fault(tmp_path: Path, bad: Any, fault: str) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [MOONCAKE, bad, MOONCAKE])
    trace = read_trace(path, "mooncake", "skip")
    assert len(list(trace)) == (3 if not fault else 2)
    if fault:
        with pytest.raises(TraceError) as caught:
            list(read_trace(path, "mooncake"))
        assert str(caught.value).startswith(f"{path}, line 2: {fault}")
        assert len(str(caught.value)) < len(str(path)) + 250
        assert trace.skipped_count == 1
        assert str(trace.faults[0].first[0]) == str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        (AGENT, AGENT | {"input_length": 60}, "hash_ids: 2 ids for 60 tokens, 3 are due"),
        (AGENT, AGENT | {"block_size": 0}, "block_size: 0 should be greater"),
        (AGENT, AGENT | {"session_id": 5}, "session_id: 5 should be a valid string"),
        (BAILIAN, BAILIAN | {"input_length": 60}, "hash_ids: 3 ids for 60 tokens"),
        (BAILIAN, BAILIAN | {"chat_id": "a"}, "chat_id: 'a' should be"),
    ],
)
def test_the_other_formats_are_as_strict(
    tmp_path: Path, good: dict[str, Any], bad: dict[str, Any], fault: str
) -> None:
    good = good | {"timestamp": 70}
    trace = read_trace(
        write_lines(tmp_path / "trace.jsonl", [good, bad | {"timestamp": 70}, good]), on_error="skip"
    )
    if fault.startswith("hash_ids: 3"):
        assert len(list(trace)) == 3  # of 60 tokens 3 blocks are full and a fourth is begun
        return
    assert len(list(trace)) == 2
    assert trace.faults[0].first[0].fault.startswith(fault)


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [changed(timestamp=at) for at in (10, 20, 15, 20, 30)])
    with pytest.raises(
        TraceError, match=r"line 3: came at 0.015 s, after one of 0.020 s: times must not decrease"
    ):
        list(read_trace(path))
    trace = read_trace(path, on_error="skip")
    assert [request.arrival_s for request in trace] == pytest.approx([0, 0.01, 0.01, 0.02])
    assert trace.skipped_count == 1


def test_a_line_that_does_not_end_is_not_held_in_memory(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [b"a" * 10, b"b" * 5000, b"", b"c" * 100, b"d" * 101])
    faults = Faults(path, "skip")
    assert [(line.number, len(line.text)) for line in read_lines(path, faults, longest_bytes=101)] == [
        (1, 10),
        (4, 100),
    ]
    assert [error.where for error in faults.first] == ["line 2", "line 5"]


def test_of_very_many_faults_all_are_counted_and_some_are_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [MOONCAKE] + [b"{"] * 500)
    trace = read_trace(path, on_error="skip")
    for _ in range(2):
        assert len(list(trace)) == 1
        assert (trace.skipped_count, len(trace.faults[0].first)) == (500, 20)


@settings(max_examples=60, deadline=None)
@given(
    line=st.one_of(
        st.binary(max_size=60).filter(lambda text: b"\n" not in text),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(BAILIAN)), inner)
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries(
            {},
            optional={
                name: st.integers() | st.floats() | st.lists(st.integers(), max_size=3) for name in AGENT
            },
        ).map(lambda value: json.dumps(AGENT | value).encode()),
    ),
    name=st.sampled_from(["mooncake", "bailian", "lmcache-agent", "prompts", "kv-events", "kvtide", "weka"]),
)
def test_any_line_is_a_request_or_a_fault_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, line: bytes, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(line + b"\n")
    trace = read_trace(path, name, "skip", None if name != "prompts" else OPTIONS)
    requests = list(trace)
    assert len(requests) <= 1
    for request in requests:
        assert request.prompt_tokens >= len(request.block_hashes) * request.block_tokens
        assert len(set(request.block_hashes)) == len(request.block_hashes)
