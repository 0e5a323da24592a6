"""docs/traces.md: its tables are those of the code, and what it shows runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.config import KVTideConfig
from kvtide.errors import TraceError
from kvtide.sim.traces import TraceOptions, read_trace
from kvtide.sim.traces.faults import KEPT
from kvtide.sim.traces.formats import FORMATS
from kvtide.sim.traces.packed import LONGEST_LINE_BYTES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "traces.md").read_text()


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_table_has_every_format() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(FORMATS)


def test_the_first_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    reading, _, _ = blocks_of("python")[0].partition('\ntrace = read_trace("logs/"')
    exec(compile(reading, "docs/traces.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1500
    assert lines[0] == "0.0 6758 13"


def test_the_recording_that_is_shown_is_one(tmp_path: Path) -> None:
    text = blocks_of("json")[0].replace("<base64, 8 bytes a block>", "")
    (path := tmp_path / "trace.jsonl").write_text(text)
    (request,) = read_trace(path)
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == (12.345678, 100, 20)


def test_the_fault_that_is_shown_is_worded_like_that(tmp_path: Path) -> None:
    (path := tmp_path / "trace.jsonl").write_text(
        "\n" * 16 + '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2, 3]}\n'
    )
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert f"`{caught.value}`".replace(f"{tmp_path}/", "") in PAGE


def test_limits_and_defaults_that_are_named_are_those_of_the_code() -> None:
    assert f"lines longer than {LONGEST_LINE_BYTES >> 20} MiB" in PAGE
    assert KEPT == 20
    assert "first twenty of a file" in PAGE
    assert TraceOptions().session_span_s == 3 * 3600
    assert "`session_span_s` (three hours)" in PAGE
    assert KVTideConfig.model_fields["record_trace_limit"].default == 1 << 30


def test_reading_brings_in_nothing_heavy() -> None:
    heavy = {"torch", "vllm", "transformers", "tokenizers", "zstandard"}
    code = f"import sys, kvtide.sim.traces; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
