"""What docs/replay.md shows is what comes out."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replay.md").read_text()
SHOWN = [
    block.partition("\n")
    for block in re.findall(r"```console\n\$ (kvtide replay examples/.*?)```", PAGE, re.DOTALL)
]


@pytest.mark.parametrize(("command", "_", "output"), SHOWN, ids=["tables", "json"])
def test_a_command_prints_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, command: str, _: str, output: str
) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.splitlines()] == output.splitlines()


def test_the_python_of_the_page_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.splitlines() == [
        "  291 blocks: 3.87%, at best 10.34%",
        " 2915 blocks: 6.43%, at best 26.54%",
    ]
