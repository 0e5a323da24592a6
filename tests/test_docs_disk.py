"""``docs/disk.md`` names settings, metrics and log lines that there are, and shows settings that work."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli.main import app
from kvtide.config import KVTideConfig
from kvtide.metrics import DEFINITIONS
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import tier_named
from kvtide.tiers.records import RecordIdentity

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "disk.md").read_text()


def test_every_setting_of_the_disk_has_a_row_and_every_row_a_setting() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.M)
    of_the_disk = [name for name in KVTideConfig.model_fields if name.startswith("disk")]
    assert sorted(rows) == sorted([*of_the_disk, "promotion_share", "reset_keeps_tiers"])


def test_every_metric_it_names_exists() -> None:
    named = {name.removesuffix("_total") for name in re.findall(r"vllm:kvtide_([a-z_]+)`", PAGE)}
    assert named
    assert named <= {one.name for one in DEFINITIONS}


@pytest.mark.parametrize(
    "line",
    [
        "is full: writes are skipped until there is room",
        "has room again",
        "is left out for a while: it fails or does not answer in time",
        "is back",
        "it is made anew from the records",
        "another instance uses this folder; give each a folder of its own",
        "starts cold: since it was used last",
    ],
)
def test_what_it_says_of_the_log_is_in_the_code(line: str) -> None:
    assert line in PAGE
    files = (ROOT / "src" / "kvtide").rglob("*.py")
    assert any(line in path.read_text() for path in files if "testing" not in path.parts)


def test_the_settings_it_shows_for_a_tier_of_ones_own_build_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    config = KVTideConfig(**json.loads(shown))
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    (wanted,) = config.tiers
    options = wanted.options | {"folder": str(tmp_path)}
    tier = tier_named(wanted.path, TierPlace(RecordIdentity(bytes(32)), 0, wanted.limit, options))
    tier.open()
    assert (tmp_path / "rank-0").is_dir()


def test_the_commands_it_shows_are_understood() -> None:
    commands = re.findall(r"^\$ kvtide (inspect|verify|clear) (.*)$", PAGE, re.M)
    assert {verb for verb, _ in commands} == {"inspect", "verify", "clear"}
    for verb, arguments in commands:
        result = CliRunner().invoke(app, [verb, *arguments.replace("/var/cache", "/nowhere").split()])
        assert result.exit_code == 2
        assert "PATH = '/nowhere/kvtide': cannot be read" in result.stderr
