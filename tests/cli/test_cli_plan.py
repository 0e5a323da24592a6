"""``kvtide plan``: what it prints, what it refuses, how it exits."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli.main import app
from kvtide.cli.plan import tokens_of
from kvtide.config import resolve
from kvtide.errors import ConfigError
from kvtide.plan.models import known_models

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
WHOLE = ("--host-memory", "64GiB", "--disk", "1TB", "--accelerator", "h200", "--tp", "8", "--kv-dtype", "fp8")


def run(*arguments: object, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": str(columns)})


def found_in(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("model", "columns"),
    [*((name, 100) for name in known_models() if "next" not in name), ("gemma-3-27b", 80), ("qwen3-8b", 140)],
)
def test_tables_are_no_wider_than_a_hundred_columns_and_what_can_be_copied_is_whole(
    model: str, columns: int
) -> None:
    result = run(model, *WHOLE, columns=columns)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    command = next(line for line in lines if line.startswith("kvtide serve"))
    plain = next(line for line in lines if line.startswith("--kv-transfer-config"))
    for line in lines:
        assert len(line) <= 100 or line in (command, plain)
    assert "…" not in result.stdout
    given = json.loads(shlex.split(plain)[1])["kv_connector_extra_config"]
    words = shlex.split(command)
    for setting, value in given.items():
        assert words[words.index("--" + setting.replace("_", "-")) + 1] == str(value)
    assert resolve({}, given).config.disk_limit == 10**12
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"


def test_json_has_all_that_is_shown() -> None:
    found = found_in(run("gemma-3-27b", "--host-memory", "64GiB", "--accelerator", "h100", "--json"))
    assert found["bytes_per_token"] == 507_904
    assert [group["kind"] for group in found["groups"]] == ["sliding_window"] * 6 + ["full_attention"]
    assert found["groups"][0]["bytes_per_sequence"] == 1024 * 9 * 8192
    assert found["groups"][-1]["bytes_per_sequence"] is None
    assert [fit["tier"] for fit in found["fits"]] == ["device", "host memory"]
    assert [one["tokens"] for one in found["break_evens"]] == [4096, 32_768, 131_072]
    assert "google/gemma-3-27b-it" in found["command"]


def test_fp8_halves_what_a_token_takes() -> None:
    plain = found_in(run("llama-3.1-8b", "--host-memory", "1GiB", "--json"))
    half = found_in(run("llama-3.1-8b", "--host-memory", "1GiB", "--json", "--kv-dtype", "fp8"))
    assert (plain["bytes_per_token"], half["bytes_per_token"]) == (131_072, 65_536)
    assert half["fits"][0]["tokens"] == 2 * plain["fits"][0]["tokens"]


def test_a_configuration_of_ones_own_is_served_from_its_folder(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = found_in(run(tmp_path, "--host-memory", "1MiB", "--json"))
    assert (found["bytes_per_token"], found["weight_bytes"]) == (2 * 4 * 16 * 4, None)
    assert f"kvtide serve {tmp_path}" in found["command"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("llama-3.1-8b",), "--host-memory = None"),
        (("llama", "--host-memory", "1GiB"), "one of deepseek-v3"),
        (("llama-3.1-8b", "--host-memory", "lots"), "give a size such as 64GiB"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--disk", "1TB@"), "give a size such as 1TB"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--disk", "1TB@0"), "give a size such as 1TB"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--accelerator", "v100"), "known are a100"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--kv-dtype", "int4"), "--kv-dtype = 'int4'"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--block-size", "0"), "--block-size = 0"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--blocks-per-chunk", "0"), "--blocks-per-chunk = 0"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--conversation", "8q"), "such as 8192 or 8k"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--max-num-batched-tokens", "0"), "batched-tokens = 0"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--active-parameters", "nan"), "such as 8e9"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--accelerator", "h100", "--utilisation", "nan"), "share"),
        (("llama-3.1-8b", "--host-memory", "1GiB", "--restore-interval", "-1"), "from 0"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    found = json.loads(run(*arguments, "--json").stdout)
    assert found["ok"] is False
    assert found["errors"][0]["hint"]


def test_help_teaches_with_examples_and_names_models_and_accelerators() -> None:
    shown = run("--help", columns=100).output
    for word in ("Examples", "llama-3.1-8b", "h100", "--conversation", "qwen3-next-80b-a3b"):
        assert word in shown


@pytest.mark.parametrize(("text", "tokens"), [("8k", 8192), ("8192", 8192), ("1M", 1 << 20), ("1_000", 1000)])
def test_tokens_are_read_as_people_write_them(text: str, tokens: int) -> None:
    assert tokens_of("--conversation", text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5k", "9" * 30, "٣"])
def test_tokens_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--conversation"):
        tokens_of("--conversation", text)


def test_the_page_shows_what_the_commands_in_it_print() -> None:
    blocks = PAGE.read_text().split("```")
    shown = [(blocks[at], blocks[at + 2]) for at in range(1, len(blocks), 2) if "$ kvtide plan" in blocks[at]]
    assert len(shown) == 2
    for command, expected in shown:
        result = run(*shlex.split(command)[4:])
        printed = "\n".join(line.rstrip() for line in result.stdout.splitlines())
        assert expected.removeprefix("text\n").strip() in printed
