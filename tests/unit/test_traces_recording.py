"""kvtide's own recording: what a server writes down is what is read back, and writing it disturbs nobody."""

import base64
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from traces import write_lines

from kvtide.errors import ConfigError, TraceError
from kvtide.sim.traces import TraceOptions, TraceRequest, read_trace
from kvtide.sim.traces import recorder as recorder_module
from kvtide.sim.traces.recorder import TraceRecorder

GIB = 1 << 30
BEGAN_S = 1000.0


def hashes(prompt: str, count: int) -> list[bytes]:
    """Hashes of a prompt's blocks: of 32 bytes, chained, as a server has them."""
    return [f"{prompt[: index + 1]:->32}".encode() for index in range(count)]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[TraceRecorder]:
    one = TraceRecorder(str(tmp_path / "trace.jsonl"), 16, GIB, BEGAN_S)
    yield one
    one.close()


def record(
    recorder: TraceRecorder, name: str, at_s: float, prompt: str, tokens: int, output: int = 0
) -> None:
    recorder.arrived(name, BEGAN_S + at_s)
    block_hashes = hashes(prompt, (tokens + output) // 16)
    recorder.ended(name, tokens, output, block_hashes, BEGAN_S + at_s + 1)


def shape(requests: list[TraceRequest]) -> list[list[int]]:
    """Blocks as numbers, in the order in which they are first seen."""
    seen: dict[bytes, int] = {}
    return [
        [seen.setdefault(one, len(seen)) for one in (*request.block_hashes, *request.generated_hashes)]
        for request in requests
    ]


def test_what_is_recorded_is_read_back(recorder: TraceRecorder) -> None:
    record(recorder, "a", 0.5, "abcdefgh", 100, 20)
    record(recorder, "b", 2.25, "abcdxyz", 70)
    recorder.close()
    one, other = read_trace(recorder.path)
    assert (one.arrival_s, one.prompt_tokens, one.output_tokens, one.block_tokens) == (0.5, 100, 20, 16)
    assert (other.arrival_s, other.prompt_tokens, other.output_tokens) == (2.25, 70, 0)
    assert shape([one, other]) == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3]]
    assert (len(one.block_hashes), len(one.generated_hashes)) == (6, 1)


def test_requests_are_read_in_the_order_in_which_they_came_whenever_they_ended(
    recorder: TraceRecorder,
) -> None:
    for number in range(6):
        recorder.arrived(str(number), BEGAN_S + number)
    for number in (3, 1, 5, 0, 4):
        recorder.ended(str(number), 16 * number, 0, hashes("abcdef", number), BEGAN_S + 10)
    recorder.close()
    trace = read_trace(recorder.path)
    assert [request.arrival_s for request in trace] == [0, 1, 3, 4, 5]
    lines = [json.loads(line) for line in recorder.path.read_text().splitlines()]
    assert [line["t"] for line in lines[1:]] == [3, 1, 5, 0, 4]
    assert [line["open_since"] for line in lines[1:]] == [0, 0, 0, 2, 2]


def test_a_reader_holds_back_no_more_than_may_be_overtaken(tmp_path: Path) -> None:
    records = [HEADER, line(5, open_since=1), line(1, open_since=7), b"{broken", line(8, open_since=9)]
    requests = iter(read_trace(write_lines(tmp_path / "trace.jsonl", records)))
    assert [next(requests).arrival_s, next(requests).arrival_s] == [1, 5]
    with pytest.raises(TraceError, match="line 4: no JSON"):
        next(requests)


def test_nothing_of_a_prompt_is_in_the_file_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        recorder = TraceRecorder(str(tmp_path / name), 16, GIB, BEGAN_S)
        record(recorder, "secret-name", 0, "secret-prompt", 16 * 9)
        recorder.close()
        files.append(recorder.path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 2
    blocks = [json.loads(path.read_text().splitlines()[1])["blocks"] for path in files]
    # The same prompt under another salt is another one.
    assert len({block for packed in blocks for block in base64_hashes(packed)}) == 18
    for path in files:
        text = path.read_bytes()
        assert b"secret" not in text
        for block_hash in hashes("secret-prompt", 9):
            assert block_hash not in text
            assert base64.b64encode(block_hash)[:8] not in text


def base64_hashes(packed: str) -> list[bytes]:
    raw = base64.b64decode(packed)
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]


def test_a_file_that_is_there_is_left_alone_and_a_number_added(tmp_path: Path) -> None:
    (first := tmp_path / "trace.jsonl").write_text("mine")
    recorders = [TraceRecorder(str(first), 16, GIB, BEGAN_S) for _ in range(2)]
    for recorder in recorders:
        recorder.close()
    assert [recorder.path.name for recorder in recorders] == ["trace.2.jsonl", "trace.3.jsonl"]
    assert first.read_text() == "mine"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").symlink_to(tmp_path / "elsewhere")
    TraceRecorder(str(tmp_path / "trace.jsonl"), 16, GIB, BEGAN_S).close()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_cannot_be_made_is_refused_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"record_trace = .*no-folder/x.*No such file or directory: give a file"
    ):
        TraceRecorder(str(tmp_path / "no-folder" / "x"), 16, GIB, BEGAN_S)


def test_the_limit_is_never_exceeded_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtide")
    limit_bytes = 2000
    recorder = TraceRecorder(str(tmp_path / "trace.jsonl"), 16, limit_bytes, BEGAN_S)
    for number in range(100):
        record(recorder, str(number), number, "abc", 48)
    recorder.close()
    assert limit_bytes - 200 < recorder.path.stat().st_size <= limit_bytes
    assert [line for line in caplog.messages if "recording ends" in line] == [
        f"{recorder.path}: has its 2000 bytes, recording ends"
    ]
    requests = list(read_trace(recorder.path))
    assert [request.arrival_s for request in requests] == list(range(len(requests)))


def wait_for(thread: Any) -> None:
    thread.join(10)
    assert not thread.is_alive()


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TraceRecorder(
        str(tmp_path / "x"), 16, GIB, BEGAN_S, lambda path: os.open("/dev/full", os.O_WRONLY)
    )
    wait_for(recorder._thread)
    for number in range(3):
        record(recorder, str(number), number, "abc", 48)
    assert [line for line in caplog.messages if "recording ends" in line] == [
        f"{recorder.path}: No space left on device, recording ends"
    ]
    assert (recorder._open, recorder._queue.qsize()) == ({}, 0)
    recorder.close()


def test_hashes_of_a_kind_that_nobody_expects_end_the_recording_and_nothing_else(
    recorder: TraceRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.arrived("a", BEGAN_S)
    recorder.ended("a", 16, 0, [3], BEGAN_S)  # type: ignore[list-item]
    wait_for(recorder._thread)
    assert "recording ends" in caplog.text
    record(recorder, "b", 1, "abc", 48)


def test_a_disk_that_hangs_costs_requests_in_the_file_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "BACKLOG_BLOCKS", 10)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    while True:  # a pipe that takes nothing more is a disk that hangs
        try:
            os.write(write_end, bytes(4096))
        except BlockingIOError:
            break
    os.set_blocking(write_end, True)
    recorder = TraceRecorder(str(tmp_path / "x"), 16, GIB, BEGAN_S, lambda path: write_end)
    for number in range(8):
        record(recorder, str(number), number, "abc", 48)
    assert recorder._queue.qsize() == 3
    assert sum("some are left out" in line for line in caplog.messages) == 1
    recorder.close(timeout_s=0.01)
    os.close(read_end)
    wait_for(recorder._thread)


def test_a_request_that_never_came_or_has_ended_twice_is_left_out(recorder: TraceRecorder) -> None:
    recorder.ended("unknown", 16, 0, hashes("a", 1), BEGAN_S)
    record(recorder, "a", 0, "a", 16)
    recorder.ended("a", 16, 0, hashes("a", 1), BEGAN_S)
    recorder.close()
    recorder.close()
    assert len(list(read_trace(recorder.path))) == 1


def test_recordings_of_several_processes_are_put_where_they_began(tmp_path: Path) -> None:
    for name, began_s in (("a.jsonl", 500), ("b.jsonl", 470)):
        write_lines(tmp_path / name, [HEADER | {"began_s": began_s}, line(1, open_since=2), line(40)])
    write_lines(tmp_path / "c.jsonl", [HEADER | {"block_tokens": 0}])
    with pytest.raises(TraceError, match=r"c\.jsonl, line 1: block_tokens: 0"):
        list(read_trace(tmp_path))
    (tmp_path / "c.jsonl").unlink()
    assert [request.arrival_s for request in read_trace(tmp_path)] == [1, 31, 40, 70]


def test_coarser_blocks_take_the_answer_s_beginning_with_the_prompt_s_end(tmp_path: Path) -> None:
    blocks = line(1, prompt_tokens=80, blocks=list("abcde"), output_tokens=50, generated=list("fgh"))
    path = write_lines(tmp_path / "trace.jsonl", [HEADER, blocks])
    (request,) = read_trace(path, options=TraceOptions(block_tokens=32))
    assert [one[:1] for one in request.block_hashes] == [b"b", b"d"]
    assert [one[:1] for one in request.generated_hashes] == [b"f", b"h"]


HEADER: dict[str, Any] = {"kvtide_trace": 1, "block_tokens": 16, "began_s": 0}


def line(at_s: float, **values: Any) -> dict[str, Any]:
    """A line of a recording; hashes by one letter each."""
    record = {"t": at_s, "open_since": at_s, "prompt_tokens": 32, "output_tokens": 0, "blocks": list("ab")}
    record |= values
    for name in ("blocks", "generated"):
        if isinstance(record.get(name), list):
            record[name] = base64.b64encode(b"".join(one.encode() * 8 for one in record[name])).decode()
    return record


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (line(1, blocks=list("abc")), "blocks: 3 hashes for 32 tokens, 2 are due"),
        (line(1, generated=list("c")), "generated: 1 hashes, no more than 0 can be"),
        (line(1, blocks=list("aa")), "blocks: a hash comes twice"),
        (line(1, blocks="AAAA"), "blocks: 3 bytes are no hashes of 8"),
        (line(1, blocks="A?"), "blocks: no base64"),
        (line(1, blocks="é"), "blocks: no base64"),
        (line(float("nan")), "t: nan should be a finite number"),
        (line(1, prompt_tokens=-1), "prompt_tokens: -1 should be"),
        ({"t": 1}, "open_since: is missing"),
        (HEADER, "t: is missing"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_bad_line_of_a_recording_is_named(tmp_path: Path, bad: dict[str, Any], fault: str) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [HEADER, line(0), bad, line(3)])
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}, line 3: {fault}")
    assert [request.arrival_s for request in read_trace(path, on_error="skip")] == [0, 3]


@pytest.mark.parametrize("bad", [{"kvtide_trace": 2}, {"block_tokens": 0}, {"began_s": "now"}])
def test_a_recording_with_a_first_line_nobody_understands_is_refused(
    tmp_path: Path, bad: dict[str, Any]
) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [HEADER | bad, line(0)])
    with pytest.raises(TraceError, match="line 1: "):
        list(read_trace(path))
    trace = read_trace(path, on_error="skip")
    assert (list(trace), trace.skipped_count) == ([], 1)


def test_a_recording_that_was_cut_short_is_read_to_where_it_is_whole(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "trace.jsonl", [HEADER, line(0), line(1)]).read_bytes()
    (cut := tmp_path / "cut.jsonl").write_bytes(whole[:-20])
    assert [request.arrival_s for request in read_trace(cut)] == [0]


def test_long_prompts_are_recorded_whole(recorder: TraceRecorder) -> None:
    block_hashes = [index.to_bytes(32, "big") for index in range(8192)]
    for number in range(4):
        recorder.arrived(str(number), BEGAN_S + number)
        recorder.ended(str(number), 16 * 8192, 0, block_hashes, BEGAN_S + number)
    recorder.close(timeout_s=30)
    requests = list(read_trace(recorder.path))
    assert shape(requests) == [list(range(8192))] * 4
