"""Traces with a request a line: what becomes of a record, which format a file has, how several become one."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from traces import AGENT, BAILIAN, MOONCAKE, SAMPLE, SESSION, write_document, write_lines

from kvtide.errors import ConfigError, TraceError
from kvtide.sim.traces import TraceOptions, read_trace
from kvtide.sim.traces.formats import FORMATS, format_of


def test_a_mooncake_prompt_of_1100_tokens_has_two_full_blocks_and_a_third_that_nobody_keeps(
    tmp_path: Path,
) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [MOONCAKE | {"timestamp": 0}, MOONCAKE])
    _, request = read_trace(path)
    assert (request.arrival_s, request.block_tokens) == (27.482, 512)
    assert (request.prompt_tokens, request.output_tokens) == (1100, 52)
    assert len(request.block_hashes) == len(set(request.block_hashes)) == 2
    assert {len(block_hash) for block_hash in request.block_hashes} == {12}


def test_a_mooncake_prompt_that_ends_with_a_block_keeps_it(tmp_path: Path) -> None:
    record = {"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [4, 5]}
    (request,) = read_trace(write_lines(tmp_path / "trace.jsonl", [record]))
    assert len(request.block_hashes) == 2


def test_the_sample_has_the_counts_that_its_page_says() -> None:
    trace = read_trace(SAMPLE)
    requests = list(trace)
    blocks = Counter(block_hash for request in requests for block_hash in request.block_hashes)
    assert (trace.format, trace.skipped_count) == ("mooncake", 0)
    assert (len(requests), blocks.total(), len(blocks)) == (1500, 40_204, 29_150)
    assert requests[-1].arrival_s == pytest.approx(509.999)
    # The oracle: the file as it is.
    raw = [json.loads(line) for line in gzip.decompress(SAMPLE.read_bytes()).splitlines()]
    assert [one["input_length"] for one in raw] == [request.prompt_tokens for request in requests]
    shared = [
        len(set(raw[0]["hash_ids"]) & set(one["hash_ids"][: one["input_length"] // 512])) for one in raw
    ]
    first = set(requests[0].block_hashes)
    assert shared == [len(first & set(request.block_hashes)) for request in requests]


def test_a_trace_can_be_gone_through_again() -> None:
    trace = read_trace(SAMPLE)
    assert list(trace) == list(trace)


def test_a_bailian_chat_is_one_session_and_a_partial_block_may_have_a_number_or_not(tmp_path: Path) -> None:
    records = [
        BAILIAN,
        BAILIAN | {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "turn": 2},
        BAILIAN | {"chat_id": 161, "timestamp": 63, "hash_ids": [1, 2]},
        BAILIAN | {"chat_id": 162, "parent_chat_id": 160, "timestamp": 64},
        BAILIAN | {"chat_id": 163, "parent_chat_id": 7, "timestamp": 65},
    ]
    requests = list(read_trace(write_lines(tmp_path / "trace.jsonl", records)))
    assert [request.session for request in requests] == ["159", "159", "161", "159", "7"]
    assert [len(request.block_hashes) for request in requests] == [2] * 5
    assert [round(request.arrival_s, 3) for request in requests] == [0, 1.386, 1.886, 2.886, 3.886]
    assert requests[0].block_tokens == 16


def test_bailian_s_numbers_are_chained_whether_they_were_or_not(tmp_path: Path) -> None:
    records = [
        BAILIAN | {"input_length": 16 * len(numbers), "hash_ids": numbers}
        for numbers in ([1, 2, 3, 4], [1, 2, 5, 4], [2, 3], [7, 7, 7, 7])
    ]
    path = write_lines(tmp_path / "trace.jsonl", records)
    one, other, third, same = (set(request.block_hashes) for request in read_trace(path))
    assert len(one & other) == 2
    assert one.isdisjoint(third)
    assert len(same) == 4
    coarse = [request.block_hashes for request in read_trace(path, options=TraceOptions(block_tokens=32))]
    assert [len(hashes) for hashes in coarse] == [2, 2, 1, 2]
    assert coarse[0][0] == coarse[1][0]
    assert coarse[0][1] != coarse[1][1]


def test_an_agent_s_record_says_its_session_and_its_block_size(tmp_path: Path) -> None:
    (request,) = read_trace(write_lines(tmp_path / "trace.jsonl", [AGENT]))
    assert (request.session, request.block_tokens, len(request.block_hashes)) == ("d80534", 16, 2)


FIRST_LINES: dict[str, Any] = {
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "lmcache-agent": AGENT,
    "weka": SESSION,
    "kvtide": {"kvtide_trace": 1, "block_tokens": 16, "began_s": 0},
    "kv-events": [1.5, [{"type": "AllBlocksCleared"}], 0],
    "prompts": {"messages": [{"role": "user", "content": 'what is {"hash_ids": [1], "chat_id": 2}?'}]},
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_s_format_is_told_by_how_it_begins(tmp_path: Path, name: str) -> None:
    first = FIRST_LINES[name]
    assert format_of(write_lines(tmp_path / "a", [first])) == name
    assert format_of(write_lines(tmp_path / "b", [b"\xef\xbb\xbf\n  " + json.dumps(first).encode()])) == name


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("prompts", {"prompt": "x", "timestamp": 1}),
        ("prompts", {"text": '"chat_id": and "hash_ids": as text'}),
        ("kv-events", [12, [["BlockStored", [1], None, [1], 1, None]]]),
        ("kv-events", {"ts": 1.0, "events": []}),
        ("mooncake", {"hash_ids": [1], "timestamp": 3, "output_length": 1, "input_length": 5}),
    ],
)
def test_formats_that_can_be_written_in_several_ways_are_told_too(
    tmp_path: Path, name: str, record: object
) -> None:
    assert format_of(write_lines(tmp_path / "trace", [record])) == name


def test_a_session_that_is_written_over_many_lines_is_one(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_text(json.dumps(SESSION, indent=2))
    assert format_of(path) == "weka"


@pytest.mark.parametrize("begin", [b"hello", b"{}", b"[1, 2]", b'{"a": 1}', b"\x00\x01", b"[[[["])
def test_a_file_that_begins_like_nothing_known_says_which_formats_there_are(
    tmp_path: Path, begin: bytes
) -> None:
    path = write_lines(tmp_path / "trace", [begin])
    with pytest.raises(
        TraceError, match="one of weka, mooncake, bailian, lmcache-agent, prompts, kv-events, kvtide"
    ):
        read_trace(path)


@pytest.mark.parametrize("text", [b"", b"\n \n", gzip.compress(b"")])
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, text: bytes) -> None:
    (path := tmp_path / "trace").write_bytes(text)
    with pytest.raises(TraceError, match="trace: is empty"):
        read_trace(path)
    assert list(read_trace(path, "mooncake")) == []


def test_wrong_arguments_are_named_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format = 'moonshine': known formats: weka, mooncake"):
        read_trace(SAMPLE, "moonshine")
    with pytest.raises(ConfigError, match="on_error = 'ignore': give stop or skip"):
        read_trace(SAMPLE, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"paths = \[\]: name a file"):
        read_trace([])
    with pytest.raises(TraceError, match="missing: no such file or directory"):
        read_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match=r"no \.json or .jsonl file in this folder"):
        read_trace(tmp_path)
    for wrong in (
        {"session_span_s": -1.0},
        {"interval_s": float("nan")},
        {"block_tokens": 0},
        {"pause_s": -1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            TraceOptions(**wrong)  # type: ignore[arg-type]


def zstd(text: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(text)


PACKINGS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd}


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_a_file_is_packed_in_makes_no_difference_whatever_its_name(tmp_path: Path, packing: str) -> None:
    lines = [json.dumps(MOONCAKE | {"timestamp": at}).encode() for at in range(2000)]
    text = b"\n".join(lines)
    half = text.index(b"\n", len(text) // 2) + 1
    (path := tmp_path / "trace").write_bytes(PACKINGS[packing](text))
    (parts := tmp_path / "parts").write_bytes(PACKINGS[packing](text[:half]) + PACKINGS[packing](text[half:]))
    requests = list(read_trace(path))
    assert [request.arrival_s for request in requests] == [at / 1000 for at in range(2000)]
    assert list(read_trace(parts)) == requests


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_packed_file_that_is_damaged_is_no_shorter_trace(tmp_path: Path, packing: str, damage: str) -> None:
    lines = [json.dumps(MOONCAKE | {"timestamp": 7919 * at}).encode() for at in range(6_000)]
    packed = bytearray(PACKINGS[packing](b"\n".join(lines)))
    if damage == "cut":
        del packed[-100:]
    else:
        packed[len(packed) // 2 : len(packed) // 2 + 64] = bytes(64)
    (path := tmp_path / "trace").write_bytes(packed)
    with pytest.raises(TraceError, match=r"line [0-9]+: "):
        list(read_trace(path, "mooncake"))
    trace = read_trace(path, "mooncake", "skip")
    assert len(list(trace)) < 6_000
    assert trace.skipped_count >= 1


def test_several_files_are_servers_beside_each_other_whose_numbers_mean_different_blocks(
    tmp_path: Path,
) -> None:
    for name, first in (("a.jsonl", 5000), ("b.jsonl", 6000)):
        write_lines(tmp_path / name, [MOONCAKE | {"timestamp": first + at} for at in (0, 10, 20)])
    (tmp_path / "README.md").write_text("not a trace")
    requests = list(read_trace(tmp_path))
    assert [request.arrival_s for request in requests] == pytest.approx([0, 0, 0.01, 0.01, 0.02, 0.02])
    blocks = Counter(block_hash for request in requests for block_hash in request.block_hashes)
    assert sorted(blocks.values()) == [3, 3, 3, 3]


def test_files_can_be_parts_of_one_trace(tmp_path: Path) -> None:
    for name, first in (("part-1.jsonl", 5000), ("part-2.jsonl", 6000)):
        write_lines(tmp_path / name, [MOONCAKE | {"timestamp": first + at} for at in (0, 20)])
    continued = TraceOptions(continued=True)
    requests = list(read_trace(tmp_path, options=continued))
    assert [request.arrival_s for request in requests] == pytest.approx([0, 0.02, 1, 1.02])
    assert len({block_hash for request in requests for block_hash in request.block_hashes}) == 2
    parts = [tmp_path / "part-2.jsonl", tmp_path / "part-1.jsonl"]
    with pytest.raises(TraceError, match=r"part-1\.jsonl, line 1: came at 5\.000 s, after one of 6\.020 s"):
        list(read_trace(parts, options=continued))


def test_blocks_can_be_read_coarser_and_prefixes_are_shared_as_before(tmp_path: Path) -> None:
    records = [
        {"timestamp": 0, "input_length": 512 * 7, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7]},
        {"timestamp": 0, "input_length": 512 * 5 + 1, "output_length": 1, "hash_ids": [1, 2, 3, 4, 8, 9]},
    ]
    path = write_lines(tmp_path / "trace.jsonl", records)
    one, other = read_trace(path, options=TraceOptions(block_tokens=1024))
    assert (one.block_tokens, len(one.block_hashes), len(other.block_hashes)) == (1024, 3, 2)
    assert list(one.block_hashes[:2]) == list(other.block_hashes)
    with pytest.raises(ConfigError, match="block_tokens = 700: give a multiple of 512"):
        list(read_trace(path, on_error="skip", options=TraceOptions(block_tokens=700)))


def test_a_record_may_say_its_block_size(tmp_path: Path) -> None:
    record = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3], "block_size": 16}
    (request,) = read_trace(write_lines(tmp_path / "trace.jsonl", [record]))
    assert (request.block_tokens, len(request.block_hashes)) == (16, 2)


def test_files_of_another_format_than_the_first_are_faults(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [MOONCAKE])
    write_document(tmp_path / "b.json", SESSION)
    with pytest.raises(TraceError, match=r"b\.json, line 1: timestamp: is missing"):
        list(read_trace(tmp_path))
