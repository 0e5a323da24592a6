"""The files that the demo leaves, and the script that judges them again."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtide.demo import page, picture, report, table
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE
from kvtide.demo.report import Report
from kvtide.demo.scrape import Scrape

CHECK_EXACT = Path(__file__).parents[2] / "scripts" / "check_exact.py"
Fields = dict[str, Any]


def check_exact(path: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(CHECK_EXACT), str(path)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def written(found: Report, folder: Path, change: Callable[[Fields], None] = lambda fields: None) -> Path:
    fields: Fields = json.loads(json.dumps(report.as_json(found)))
    change(fields)
    path = folder / "report.json"
    report.write_json(fields, path)
    return path


def test_the_json_is_whole(report_of: Callable[..., Report], tmp_path: Path) -> None:
    found = report_of()
    fields = json.loads(written(found, tmp_path).read_text())
    assert fields == json.loads(json.dumps(report.as_json(found)))
    assert (fields["exact"], fields["compared_requests"]) == (True, 45)
    assert (fields["prompt_tokens"], fields["loaded_tokens"]) == (45 * 1300, 45 * 1280)
    assert {*fields["ttft_ms"]} == {"recompute", "host_hit", "engine_hit"}
    assert (fields["host_bytes_used"], fields["host_bytes_budget"]) == (400, 1000)
    assert len(fields["requests"]) == 54
    first = fields["requests"][9]
    assert first["kvtide"]["token_ids"] == [5, 6, 7]
    assert float.fromhex(first["reference"]["logprobs"][1]) == -0.75
    assert fields["requests"][0]["recompute"] is None


def test_a_summary_leaves_out_what_does_not_fit_a_screen(report_of: Callable[..., Report]) -> None:
    assert {*report.BULKY_FIELDS}.isdisjoint(report.summary(report.as_json(report_of())))


def test_the_tables_fit_100_columns_and_say_what_was_missed(
    report_of: Callable[..., Report], tmp_path: Path
) -> None:
    found = report_of(last=Scrape(None, None, None, None, None, None, None))
    sink = StringIO()
    table.show(found, Console(file=sink, width=table.COLUMNS))
    text = sink.getvalue()
    assert max(len(line) for line in text.splitlines()) <= table.COLUMNS
    assert "missed" in text
    assert table.NOT_TAKEN in text
    assert "host hit (kvtide)" in text


def test_picture_and_page_are_made(report_of: Callable[..., Report], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report_of()
    picture.write_picture(found, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    page.write_page(found, tmp_path / "report.png", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64,iVBOR" in text
    assert "Because 1 &lt; 2 &amp; 3." in text
    assert "http://" not in text.replace('"http://www.w3.org', "")
    for section in table.sections(found):
        assert section.rows[0][-1] in text


def test_a_picture_can_be_made_when_nothing_was_loaded(
    report_of: Callable[..., Report], report: Report, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    none_loaded = [replace(exchange, loaded_tokens=0) for exchange in report.exchanges]
    found = report_of(exchanges=none_loaded)
    assert not found.passed
    picture.write_picture(found, tmp_path / "report.png")
    table.show(found, Console(file=StringIO(), width=table.COLUMNS))


def plant_logprob(fields: Fields) -> None:
    answer = fields["requests"][20]["kvtide"]
    answer["logprobs"][1] = (float.fromhex(answer["logprobs"][1]) * (1 + 2**-52)).hex()


def plant_token(fields: Fields) -> None:
    fields["requests"][20]["reference"]["token_ids"][2] += 1


def plant_missing(fields: Fields) -> None:
    fields["requests"][20]["reference"] = None


def plant_short(fields: Fields) -> None:
    fields["requests"][20]["kvtide"]["logprobs"].pop()


def test_the_script_agrees_with_the_judge(report: Report, tmp_path: Path) -> None:
    code, said = check_exact(written(report, tmp_path))
    assert code == 0
    verdict = report.figures.verdict
    assert f"compared: {verdict.compared_requests}" in said
    assert f"loaded_tokens: {verdict.loaded_tokens}" in said
    assert "says otherwise" not in said


@pytest.mark.parametrize("plant", [plant_logprob, plant_token, plant_missing, plant_short])
def test_the_script_can_say_no(plant: Callable[[Fields], None], report: Report, tmp_path: Path) -> None:
    code, said = check_exact(written(report, tmp_path, plant))
    assert code == 1
    # Request 20 of 9 users: the third user's third turn.
    assert "first divergence: user 2, turn 2" in said
    assert "the report itself says otherwise" in said


def test_unequal_cached_lengths_leave_the_script_nothing_to_compare(report: Report, tmp_path: Path) -> None:
    def shorten(fields: Fields) -> None:
        for request in fields["requests"]:
            request["reference"]["cached_tokens"] -= 32

    code, said = check_exact(written(report, tmp_path, shorten))
    assert code == 2
    assert "not comparable: 45" in said


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"requests": [{}]}', '{"requests": 3}'])
def test_what_is_no_report_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    code, said = check_exact(path)
    assert code == 2
    assert "cannot be read" in said


def test_no_file_is_refused(tmp_path: Path) -> None:
    assert check_exact(tmp_path / "none.json")[0] == 2


def test_each_server_has_a_label() -> None:
    assert {*table.LABELS} == {KVTIDE, RECOMPUTE, REFERENCE}
