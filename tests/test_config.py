"""Settings: what is taken, what is refused and with which words, and who wins."""

import json
import logging
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.config import (
    COMMAND_LINE,
    CONFIDENTIAL,
    DEFAULT,
    ENVIRONMENT,
    EXTRA_CONFIG,
    KVTideConfig,
    hint_of,
    load_config,
    resolve,
    sized_for,
)
from kvtide.errors import ConfigError

GIB = 1 << 30
ENOUGH = {"host_memory": "8GiB"}

WRONG: dict[str, list[Any]] = {
    "host_memory": ["lots", "", "8 XiB", "0.5", 0, -1, "-1", 1.5, math.nan, True, False, None, [8], {}],
    "blocks_per_chunk": [0, -1, 1025, 2.5, "2.5", "two", "", True, None, [1]],
    "offload_prompt_only": ["maybe", 2, -1, "", None, [True]],
    "store_threshold": [0, 65, "often", 1.5, True, None],
    "store_filter_entries": [0, (1 << 24) + 1, "all", True, None],
    "restore_interval": [-1, (1 << 20) + 1, "all", 1.5, True, None],
    "eviction_policy": ["mru", "", "LRU ", 3, True, None],
    "store_policy": ["late", "", "Lazy", 1, True, None],
    "store_queue": ["long", 0, -5, "0", True, None],
    "defer_limit_s": [-0.1, 600.1, "2s", math.nan, "nan", math.inf, True, None],
    "transfer_deadline_s": [0, -1, 3601, "soon", math.nan, True, None],
    "flush_limit_s": [0, 60.5, "", math.inf, True, None],
    "copy_threads": [-1, 65, 1.5, "all", True, None],
    "disk": [3, None, True, ["/a"]],
    "disk_limit": ["much", -1, True, None, 5],
    "disk_reserve": ["some", -1, True, None],
    "disk_threads": [0, 33, "all", 1.5, True, None],
    "disk_queue": ["long", 0, -5, True, None],
    "disk_deadline_s": [0, -1, 601, "soon", math.nan, True, None],
    "disk_direct": ["perhaps", 3, None],
    "disk_demotion": ["never", "", "AT_ONCE", 1, True, None],
    "disk_eviction_policy": ["mru", "", 3, True, None],
    "promotion_share": [0, 0.91, -0.1, "all", math.nan, True, None],
    "probe_wait_s": [-1, 11, "soon", math.nan, True, None],
    "reset_keeps_tiers": ["perhaps", 3, None],
    "record_trace": [3, None, True, ["/a"]],
    "record_trace_limit": ["much", 0, -1, True, None],
    "adviser": ["perhaps", 3, None],
    "prefault": ["perhaps", 3, None],
    "self_test": ["perhaps", 3, None],
}
LIMITS: dict[str, list[Any]] = {
    "host_memory": [1, "1"],
    "blocks_per_chunk": [1, 1024, "4"],
    "offload_prompt_only": [True, False, "true", "no", "1"],
    "store_threshold": [1, 64],
    "store_filter_entries": [1, 1 << 24],
    "restore_interval": [0, 1 << 20],
    "eviction_policy": ["lru", "arc", "s3fifo", "sieve", "lfu", "gdsf", "adaptive"],
    "store_policy": ["eager", "lazy"],
    "store_queue": [1, "1GiB"],
    "defer_limit_s": [0, 600, "0.5"],
    "transfer_deadline_s": [0.001, 3600],
    "flush_limit_s": [0.001, 60],
    "copy_threads": [0, 1, 64],
    "disk": [""],
    "disk_limit": [0],
    "disk_reserve": [0, "1GiB"],
    "disk_threads": [1, 32, "4"],
    "disk_queue": [1, "1GiB"],
    "disk_deadline_s": [0.001, 600],
    "disk_direct": [True, False, "off"],
    "disk_demotion": ["at_once", "second_sight", "on_eviction"],
    "disk_eviction_policy": ["lru", "arc", "s3fifo", "sieve", "lfu", "gdsf", "adaptive"],
    "promotion_share": [0.01, 0.9, "0.5"],
    "probe_wait_s": [0, 10, "0.1"],
    "reset_keeps_tiers": [True, False, "off"],
    "tiers": [[], "[]", '[{"class": "a.B", "limit": "1GiB"}, {"class": "a.B", "limit": 1, "name": "x"}]'],
    "record_trace": ["", "/var/log/trace.jsonl"],
    "record_trace_limit": [1, "1GiB"],
    "adviser": [True, False, "off"],
    "prefault": [True, False, "off"],
    "self_test": [True, False, "off"],
}


def test_a_disk_needs_a_limit_and_a_limit_a_disk() -> None:
    config = load_config(extra_config=ENOUGH | {"disk": "/cache", "disk_limit": "2GiB"})
    assert (config.tier_names, int(config.disk_limit)) == (("disk",), 2 << 30)
    with pytest.raises(ConfigError, match="disk_limit"):
        load_config(extra_config=ENOUGH | {"disk": "/cache"})
    with pytest.raises(ConfigError, match="disk_limit"):
        load_config(extra_config=ENOUGH | {"disk_limit": "2GiB"})


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        3,
        "3",
        None,
        True,
        [{"class": "a.B", "limit": -1, "options": {"password": "hush"}}],
        [{"limit": 1}],
        [{"class": "a.B", "limit": 1, "no": 1}],
        [{"class": "a.B", "limit": 1}, {"class": "c.B", "limit": 1}],
        '[{"class": "a.B", "limit": "some", "options": {"password": "hush"}}]',
    ],
)
def test_wrong_tiers_are_refused_by_name_and_nothing_of_them_is_shown(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ENOUGH | {"tiers": wrong})
    assert caught.value.setting == "tiers"
    assert "hush" not in str(caught.value) + repr(caught.value)


def test_a_tier_s_options_are_not_shown() -> None:
    tier = {"class": "a.Remote", "limit": 1, "options": {"password": "hush"}}
    config = load_config(extra_config=ENOUGH | {"tiers": [tier]})
    assert config.tiers[0].options == {"password": "hush"}
    assert "hush" not in repr(config)
    assert config.tier_names == ("remote",)


def every(values: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, one, id=f"{name}={one!r}") for name, ones in values.items() for one in ones]


def test_the_lists_here_leave_no_setting_out() -> None:
    assert list(LIMITS) == list(KVTideConfig.model_fields)
    assert list(WRONG) == [name for name in KVTideConfig.model_fields if name not in CONFIDENTIAL]


@pytest.mark.parametrize(("name", "value"), every(WRONG))
def test_a_wrong_value_is_refused_with_the_setting_the_value_and_what_would_do(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ENOUGH | {name: value})
    assert caught.value.setting == name
    assert caught.value.value is value
    assert caught.value.hint.startswith(hint_of(name))
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), every(LIMITS))
def test_what_the_hint_allows_is_taken_from_every_source(name: str, value: Any) -> None:
    assert getattr(load_config(ENOUGH | {name: value}), name) is not None
    assert getattr(load_config({}, json.loads(json.dumps(ENOUGH | {name: value}))), name) is not None
    environment = {"KVTIDE_HOST_MEMORY": "8GiB", f"KVTIDE_{name.upper()}": str(value)}
    assert getattr(load_config({}, {}, environment), name) == getattr(
        load_config(ENOUGH | {name: value}), name
    )


@pytest.mark.parametrize("name", KVTideConfig.model_fields)
def test_every_setting_says_what_would_do(name: str) -> None:
    assert hint_of(name)
    assert KVTideConfig.model_fields[name].description


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("8GiB", 8 * GIB),
        ("8 GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("512MiB", GIB // 2),
        ("1.5GiB", 3 * GIB // 2),
        ("8GB", 8 * 10**9),
        ("8G", 8 * 10**9),
        (8 * GIB, 8 * GIB),
        (str(8 * GIB), 8 * GIB),
        ("1B", 1),
    ],
)
def test_a_size_is_read_in_bytes(written: str | int, size_bytes: int) -> None:
    assert load_config({"host_memory": written}).host_memory == size_bytes


@given(size_bytes=st.integers(1, 1 << 60))
def test_any_number_of_bytes_is_taken_exactly_as_a_number_and_as_text(size_bytes: int) -> None:
    assert load_config({"host_memory": size_bytes}).host_memory == size_bytes
    assert load_config({"host_memory": str(size_bytes)}).host_memory == size_bytes


def test_without_host_memory_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="host_memory = None: say how much host memory") as caught:
        load_config({"blocks_per_chunk": 2})
    assert "8GiB" in caught.value.hint


@pytest.mark.parametrize(
    ("sources", "shown", "suggestion"),
    [
        (({"host_memry": "8GiB"},), "host_memry", "did you mean host_memory?"),
        (({}, {"block_per_chunk": 4}), "block_per_chunk", "did you mean blocks_per_chunk?"),
        (({}, {}, {"KVTIDE_STORE_TRESHOLD": "2"}), "KVTIDE_STORE_TRESHOLD", "did you mean store_threshold?"),
        (({"colour": "blue"},), "colour", "known settings: host_memory, blocks_per_chunk"),
    ],
)
def test_an_unknown_setting_suggests_the_near_one(
    sources: tuple[dict[str, Any], ...], shown: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError, match="no such setting") as caught:
        load_config(*sources)
    assert caught.value.setting == shown
    assert suggestion in caught.value.hint


def test_other_environment_variables_are_none_of_our_business() -> None:
    assert load_config(ENOUGH, {}, {"PATH": "/bin", "VLLM_KVTIDE_X": "1", "kvtide_host": "x"})


@pytest.mark.parametrize("mask", range(1, 8))
def test_the_command_line_wins_over_extra_config_over_environment(mask: int) -> None:
    names = (COMMAND_LINE, EXTRA_CONFIG, ENVIRONMENT)
    given_by = [bool(mask & 1 << place) for place in range(3)]
    sources: list[dict[str, Any]] = [ENOUGH, {}, {}]
    for place, key in enumerate(("blocks_per_chunk", "blocks_per_chunk", "KVTIDE_BLOCKS_PER_CHUNK")):
        if given_by[place]:
            sources[place] = sources[place] | {key: str(place + 2)}
    winner = given_by.index(True)
    resolved = resolve(*sources)
    assert resolved.config.blocks_per_chunk == winner + 2
    assert resolved.origins["blocks_per_chunk"] == names[winner]
    assert resolved.given["blocks_per_chunk"] == str(winner + 2)


def test_every_setting_has_an_origin_and_defaults_say_so() -> None:
    resolved = resolve(ENOUGH, {"prefault": False}, {"KVTIDE_SELF_TEST": "no"})
    assert resolved.origins == dict.fromkeys(KVTideConfig.model_fields, DEFAULT) | {
        "host_memory": COMMAND_LINE,
        "prefault": EXTRA_CONFIG,
        "self_test": ENVIRONMENT,
    }
    assert set(resolved.given) == {"host_memory", "prefault", "self_test"}


def test_a_conflict_is_logged_with_both_values_and_where_they_stood(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvtide"):
        load_config(ENOUGH, {"host_memory": "4GiB"}, {"KVTIDE_HOST_MEMORY": "2GiB"})
    assert [record.getMessage() for record in caplog.records] == [
        "host_memory: '8GiB' (command line) wins over '4GiB' (kv_connector_extra_config)",
        "host_memory: '8GiB' (command line) wins over '2GiB' (environment)",
    ]


def test_one_value_written_in_two_ways_is_no_conflict(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvtide"):
        load_config(
            ENOUGH | {"prefault": True, "defer_limit_s": "2"},
            {"host_memory": 8 * GIB, "defer_limit_s": 2.0},
            {"KVTIDE_PREFAULT": "true", "KVTIDE_HOST_MEMORY": "8 GiB"},
        )
    assert caplog.records == []


def test_a_wrong_value_that_loses_is_logged_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvtide"):
        assert load_config(ENOUGH, {}, {"KVTIDE_HOST_MEMORY": "lots"}).host_memory == 8 * GIB
    assert "'lots' (environment)" in caplog.text


def test_settings_cannot_be_changed_afterwards() -> None:
    config = load_config(ENOUGH)
    with pytest.raises(ValueError, match="frozen"):
        config.blocks_per_chunk = 7


def test_settings_and_their_errors_cross_a_process_border() -> None:
    config = load_config(ENOUGH)
    assert pickle.loads(pickle.dumps(config)) == config
    error = ConfigError("host_memory", "lots", "give less")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.setting, copy.value, copy.hint, str(copy)) == (
        "host_memory",
        "lots",
        "give less",
        str(error),
    )


@pytest.mark.parametrize(
    "name",
    ["KVTIDE_PORT", "KVTIDE_SERVICE_HOST", "KVTIDE_SERVICE_PORT_HTTP", "KVTIDE_PORT_80_TCP_ADDR"],
)
def test_what_kubernetes_says_of_a_service_called_kvtide_is_no_setting(name: str) -> None:
    config = load_config({"host_memory": "1GiB"}, None, {name: "tcp://10.0.0.1:80"})
    assert config.host_memory == 1 << 30


GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("step_bytes", "ranks", "queue_bytes"),
    [
        (MIB, 1, 256 * MIB),  # a small model: the default
        (GIB, 1, 4 * GIB),  # 8,192 tokens of 128 KiB
        (GIB, 4, 4 * GIB),
        (GIB, 16, GIB),  # a quarter of a rank's 4 GiB
        (GIB, 256, 256 * MIB),  # and no less than the default
        (1 << 60, 1, 16 * GIB),
        (0, 1, 256 * MIB),
    ],
)
def test_a_tiers_queue_that_nobody_has_set_takes_four_steps(
    step_bytes: int, ranks: int, queue_bytes: int
) -> None:
    tiers = [{"class": "a.B", "name": "one"}, {"class": "a.B", "name": "two", "queue": "1MiB"}]
    config = load_config({"host_memory": "64GiB", "tiers": tiers})
    sized = sized_for(config, step_bytes, ranks)
    assert int(sized.disk_queue) == queue_bytes
    assert [int(tier.queue) for tier in sized.tiers] == [queue_bytes, MIB]
    same = {name: value for name, value in sized if name not in ("disk_queue", "tiers")}
    assert same == {name: getattr(config, name) for name in same}


def test_a_queue_that_somebody_has_set_stays_as_it_is() -> None:
    for queue in ("1MiB", "256MiB", "100GiB"):
        config = load_config({"host_memory": "64GiB"}, environment={"KVTIDE_DISK_QUEUE": queue})
        assert sized_for(config, GIB, 1) == config
