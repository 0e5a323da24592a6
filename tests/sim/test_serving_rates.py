"""Where rates come from: the package's table, a file, a server's own page; and what a token takes."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.sim.model_bytes import bytes_per_token
from kvtide.sim.serving_media import MediumRates
from kvtide.sim.serving_rates import EngineRates, known_rates, rates_named

PAGE = """\
# HELP vllm:request_prefill_time_seconds Histogram of time spent in PREFILL phase for request.
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 4.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 5.2
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="m"} 10.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 10000.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 200.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 5.4
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 0.1
vllm:kvtide_transfer_bytes_total{direction="load",engine="0",model_name="m"} 3e+09
vllm:kvtide_transfer_bytes_total{direction="store",engine="0",model_name="m"} 4e+09
vllm:kvtide_transfer_seconds_total{direction="load",engine="0",model_name="m"} 0.5
vllm:kvtide_transfer_seconds_total{direction="store",engine="0",model_name="m"} 0.4
"""


def test_rates_of_a_page_are_means_of_what_it_counts(tmp_path: Path) -> None:
    (tmp_path / "page").write_text(PAGE)
    rates = rates_named(str(tmp_path / "page"))
    assert rates.step_s == pytest.approx(0.02)
    # 5.2 s less ten steps, for 10,000 tokens.
    assert rates.prompt_tokens_per_s == pytest.approx(10_000 / 5.0)
    assert rates.front_s == pytest.approx(0.54 - 0.01 - 0.52)
    assert (rates.load_bytes_per_s, rates.store_bytes_per_s) == (6e9, 1e10)
    assert "page" in rates.source


def test_a_page_of_a_server_that_was_asked_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page").write_text('vllm:num_requests_running{engine="0"} 0.0\n')
    with pytest.raises(ConfigError, match="ask the server first"):
        rates_named(str(tmp_path / "page"))


def test_every_entry_of_the_table_says_where_it_comes_from_and_computes() -> None:
    table = known_rates()
    assert len(table) >= 3
    for name, rates in table.items():
        assert len(rates.source) > 20, name
        assert 0 < rates.prompt_s(0, 1000) < rates.prompt_s(1000, 1000) < 10
        assert rates_named(name) == rates


def test_attention_counts_every_pair_once() -> None:
    rates = EngineRates(1e12, pair_s=1.0)
    assert rates.prompt_s(0, 4) == pytest.approx(1 + 2 + 3 + 4)
    assert rates.prompt_s(2, 2) == pytest.approx(3 + 4)
    # In pieces as in one.
    whole = rates.prompt_s(0, 100)
    assert sum(rates.prompt_s(at, 10) for at in range(0, 100, 10)) == pytest.approx(whole)


def test_a_file_of_rates_is_read_as_it_was_written(tmp_path: Path) -> None:
    rates = EngineRates(123.0, step_s=0.5, source="my own server")
    (tmp_path / "rates.json").write_text(json.dumps(asdict(rates)))
    assert rates_named(str(tmp_path / "rates.json")) == rates


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither JSON"),
        ("[1]", "no object"),
        ("{}", "prompt_tokens_per_s is missing"),
        ('{"prompt_tokens_per_s": 0}', "above 0"),
        ('{"prompt_tokens_per_s": "fast"}', "give a number"),
        ('{"prompt_tokens_per_s": true}', "give a number"),
        ('{"prompt_tokens_per_s": NaN}', "above 0"),
        ('{"prompt_tokens_per_s": 5, "step_s": -1}', "from 0"),
        ('{"prompt_tokens_per_s": 5, "idle_s": 0}', "above 0"),
        ('{"prompt_token_per_s": 5}', "no such rate"),
        ("\x00\xff", "neither JSON"),
    ],
)
def test_a_file_of_something_else_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "rates").write_text(text)
    with pytest.raises(ConfigError, match=says):
        rates_named(str(tmp_path / "rates"))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rates").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="cannot be read"):
        rates_named(str(tmp_path / "rates"))


@pytest.mark.parametrize("name", ["", "h100", "/", "/no/such/file"])
def test_a_name_nobody_knows_is_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b-h100"):
        rates_named(name)


@pytest.mark.parametrize(
    "changes", [{"bytes_per_s": 0.0}, {"bytes_per_s": math.nan}, {"call_s": -1.0}, {"threads": 0}]
)
def test_a_medium_that_never_ends_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(MediumRates(1e9), **changes)  # type: ignore[arg-type]


LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA | {"torch_dtype": "bfloat16"}, 131_072),
        (LLAMA | {"head_dim": 64, "dtype": "float16"}, 65_536),
        (LLAMA | {"num_key_value_heads": None, "dtype": "float32"}, 4 * 2 * 131_072),
        ({"text_config": LLAMA, "num_hidden_layers": 3}, 131_072),
        # DeepSeek-V3: 61 layers of 512 + 64 numbers.
        (LLAMA | {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 70_272),
    ],
)
def test_a_models_configuration_says_what_a_token_takes(
    config: dict[str, object], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bytes_per_token(str(tmp_path)) == bytes_per_token(str(tmp_path / "config.json")) == expected


def test_a_number_is_taken_as_it_is() -> None:
    assert bytes_per_token("131_072") == 131_072


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "no configuration"),
        ("{", "cannot be read"),
        ("{}", "num_hidden_layers is None"),
        (json.dumps(LLAMA | {"num_hidden_layers": "many"}), "num_hidden_layers is 'many'"),
        (json.dumps(LLAMA | {"dtype": "int3"}), "known are float32"),
        (json.dumps(LLAMA | {"num_attention_heads": 0}), "above 0"),
    ],
)
def test_a_configuration_that_does_not_say_enough_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        bytes_per_token(str(tmp_path))


@pytest.mark.parametrize("model", ["", "0", "-5", "llama", "/no/such/folder"])
def test_a_model_that_is_neither_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="bytes of KV cache per token"):
        bytes_per_token(model)
