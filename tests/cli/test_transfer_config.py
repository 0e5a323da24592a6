"""``--kv-transfer-config`` in every form that vLLM takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.transfer_config import (
    EXTRA,
    composed,
    extra_config_of,
    from_file_or_json,
    from_vllm_config_file,
    merged,
    object_of,
    take_from,
)
from kvtide.errors import ConfigError

HOST = {EXTRA: {"host_memory": "8GiB"}}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-transfer-config", json.dumps(HOST)],
        ["--kv-transfer-config=" + json.dumps(HOST)],
        ["--kv_transfer_config", json.dumps(HOST)],
        ["--kv-transfer", json.dumps(HOST)],
        ["--kv-t=" + json.dumps(HOST)],
        ["--kv-transfer-config.kv_connector_extra_config.host_memory", "8GiB"],
        ["--kv-transfer-config.kv_connector_extra_config.host_memory=8GiB"],
        ["--kv_transfer_config.kv_connector_extra_config.host_memory", "8GiB"],
        ["--kv-transfer-config.kv_connector_extra_config", json.dumps(HOST[EXTRA])],
    ],
    ids=" ".join,
)
def test_every_spelling_is_found_and_taken_out(arguments: list[str]) -> None:
    assert take_from(["M", "-tp", "2", *arguments, "--port", "1"]) == (["M", "-tp", "2", "--port", "1"], HOST)


def test_other_options_stay_even_when_they_look_alike() -> None:
    others = [
        "M",
        "--kv-cache-dtype",
        "auto",
        "--kv-events-config",
        "{}",
        "--kv-transfer-configs",
        "x",
        "--kv",
    ]
    assert take_from(others) == (others, {})


def test_a_value_that_looks_like_the_option_after_two_dashes_stays() -> None:
    assert take_from(["--", "--kv-transfer-config", "{}"]) == (["--", "--kv-transfer-config", "{}"], {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8GiB", "8GiB"),
        ("8G", 8 << 30),
        ("8g", 8 * 10**9),
        ("1.5g", 1_500_000_000),
        ("12", 12),
        ("true", True),
        ('"8G"', "8G"),
        ("lru", "lru"),
    ],
)
def test_a_dotted_value_is_read_as_vllm_reads_it(text: str, value: Any) -> None:
    _, found = take_from([f"--kv-transfer-config.{EXTRA}.x", text])
    assert found == {EXTRA: {"x": value}}


def test_a_dotted_list_is_read_as_vllm_reads_it() -> None:
    assert take_from(["--kv-transfer-config.a.b+", "x,y"])[1] == {"a": {"b": ["x", "y"]}}


def test_numbers_with_a_suffix_are_read_in_json_and_left_alone_in_strings() -> None:
    assert object_of('{"a": 8G, "b": "8G is 8G", "c": [1.5k], "d\\"8G": 80m}', "x") == {
        "a": 8 << 30,
        "b": "8G is 8G",
        "c": [1500],
        'd"8G': 80_000_000,
    }


def test_several_are_merged_and_the_dotted_form_wins() -> None:
    _, found = take_from(
        [
            "--kv-transfer-config.kv_connector_extra_config.blocks_per_chunk",
            "4",
            "--kv-transfer-config",
            '{"kv_port": 1, "kv_connector_extra_config": {"host_memory": "8GiB", "blocks_per_chunk": 2}}',
            "--kv-transfer-config",
            '{"kv_port": 2}',
        ]
    )
    assert found == {"kv_port": 2, EXTRA: {"host_memory": "8GiB", "blocks_per_chunk": 4}}


@pytest.mark.parametrize("text", ["{'host_memory': 1}", "", "host_memory", "[1]", "3", '"x"'])
def test_what_is_no_json_object_is_refused_with_what_would_do(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        take_from(["M", "--kv-transfer-config", text])
    assert (caught.value.setting, caught.value.value) == ("--kv-transfer-config", text)
    assert "JSON" in caught.value.hint


def test_a_missing_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="a value is missing"):
        take_from(["M", "--kv-transfer-config"])


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("kv_connector", "OffloadingConnector", "for another one run vllm serve"),
        ("kv_connector", "MultiConnector", "for another one run vllm serve"),
        ("kv_connector", None, "for another one run vllm serve"),
        ("kv_role", "kv_producer", "give kv_both"),
        ("kv_load_failure_policy", "fail", "give recompute"),
    ],
)
def test_what_kvtide_cannot_work_with_is_refused_by_name(key: str, value: Any, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        extra_config_of({key: value})
    assert caught.value.setting == f"--kv-transfer-config: {key}"
    assert caught.value.value == value
    assert advice in caught.value.hint


def test_extra_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=EXTRA):
        extra_config_of({EXTRA: "host_memory=8GiB"})


def test_what_else_was_given_goes_on_to_vllm() -> None:
    text = composed({"engine_id": "é1", "kv_port": 5, EXTRA: {"old": 1}}, {"host_memory": "8GiB"})
    assert text == (
        '{"kv_connector":"KVTideConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",'
        '"engine_id":"é1","kv_port":5,"kv_connector_extra_config":{"host_memory":"8GiB"}}'
    )


def test_joining_changes_neither_side() -> None:
    earlier, later = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merged(earlier, later) == {"a": {"b": 3, "c": 2}}
    assert (earlier, later) == ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})


@pytest.mark.parametrize("content", [HOST, HOST[EXTRA], {"kv_connector": "KVTideConnector"} | HOST])
def test_check_takes_the_whole_configuration_or_only_its_settings(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(content))
    for source in (str(file), json.dumps(content)):
        assert from_file_or_json(source)[EXTRA] == {"host_memory": "8GiB"}


@pytest.mark.parametrize("key", ["kv-transfer-config", "kv_transfer_config"])
def test_a_yaml_file_for_vllm_is_read_with_its_configuration_as_mapping_or_text(
    tmp_path: Path, key: str
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "vllm.yaml"
    file.write_text(f"port: 8001\n{key}:\n  {EXTRA}:\n    host_memory: 8GiB\n")
    assert from_vllm_config_file(str(file)) == from_file_or_json(str(file)) == HOST
    file.write_text(f"{key}: '{json.dumps(HOST)}'\n")
    assert from_vllm_config_file(str(file)) == HOST


def test_a_dotted_key_in_a_yaml_file_is_refused_because_it_would_replace_everything(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "vllm.yaml"
    file.write_text("kv-transfer-config.kv_role: kv_both\n")
    with pytest.raises(ConfigError, match="as one mapping"):
        from_vllm_config_file(str(file))


@pytest.mark.parametrize("content", ["port: 8001\n", "- a\n", "{", None])
def test_a_yaml_file_without_one_is_vllm_s_to_judge_and_refused_by_check(
    tmp_path: Path, content: str | None
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "vllm.yaml"
    if content is not None:
        file.write_text(content)
    assert from_vllm_config_file(str(file)) == {}
    with pytest.raises(ConfigError, match="no kv-transfer-config"):
        from_file_or_json(str(file))


def test_a_file_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json.*No such file"):
        from_file_or_json("nowhere.json")
