"""What a configuration says that a model keeps: eight published ones worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.plan.fields import Fields
from kvtide.plan.groups import ModelKV, kv_of
from kvtide.plan.layers import layers_of
from kvtide.plan.models import configuration_of, known_models
from kvtide.plan.planning import kv_of_configuration
from kvtide.plan.weights import Parameters, parameters_of, weight_bytes

GEMMA_LAYER = 16 * 128 * 2 * 2
NEXT_STATE = (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 2
FULL, SLIDING, LATENT, STATE = "full_attention", "sliding_window", "mla_attention", "mamba"

PUBLISHED: dict[str, tuple[int, list[tuple[str, int, int, int, int | None]]]] = {
    # Bytes a token in all; then for each group: kind, layers, bytes a token, bytes of a state, window.
    "llama-3.1-8b": (131_072, [(FULL, 32, 131_072, 0, None)]),
    "llama-3.1-70b": (327_680, [(FULL, 80, 327_680, 0, None)]),
    "qwen3-8b": (147_456, [(FULL, 36, 147_456, 0, None)]),
    "qwen3-32b": (262_144, [(FULL, 64, 262_144, 0, None)]),
    "deepseek-v3": (70_272, [(LATENT, 61, 61 * (512 + 64) * 2, 0, None)]),
    "gpt-oss-120b": (
        73_728,
        [(SLIDING, 18, 18 * 8 * 64 * 2 * 2, 0, 128), (FULL, 18, 18 * 8 * 64 * 2 * 2, 0, None)],
    ),
    # 62 layers, every sixth of full attention: 52 of the others in six groups that fit beside those ten.
    "gemma-3-27b": (
        507_904,
        [(SLIDING, n, n * GEMMA_LAYER, 0, 1024) for n in (9, 9, 9, 9, 8, 8)]
        + [(FULL, 10, 10 * GEMMA_LAYER, 0, None)],
    ),
    "qwen3-next-80b-a3b": (
        24_576,
        [(STATE, 12, 0, 12 * NEXT_STATE, None)] * 3 + [(FULL, 12, 12 * 2 * 256 * 2 * 2, 0, None)],
    ),
}


def kept(name: str) -> ModelKV:
    return kv_of_configuration(configuration_of(name))


def test_the_table_has_every_model_that_is_shipped_and_each_names_its_source_and_licence() -> None:
    assert set(PUBLISHED) == set(known_models())
    assert len(PUBLISHED) == 8
    for configuration in known_models().values():
        assert configuration.served_as in configuration.fields["_source"]
        assert len(configuration.fields["_licence"]) > 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_keeps_what_its_report_says_group_by_group(name: str) -> None:
    in_all, groups = PUBLISHED[name]
    kv = kept(name)
    assert sum(kv.token_bytes(group) for group in kv.groups) == in_all
    assert [
        (g.geometry.kind.value, len(g.layers), kv.token_bytes(g), kv.state_bytes(g), g.layer.window_tokens)
        for g in kv.groups
    ] == groups
    layers = sorted(layer for group in kv.groups for layer in group.layers)
    assert layers == list(range(len(layers)))


def test_blocks_grow_until_one_of_attention_holds_a_recurrent_state() -> None:
    # 1,097,728 bytes of state, 2,048 a token: 536 tokens, in steps of 16.
    assert NEXT_STATE == 1_097_728
    assert kept("qwen3-next-80b-a3b").block_tokens == 544


@pytest.mark.parametrize(
    ("name", "billions", "met_billions"),
    [
        # As published; of what a token meets those without embeddings, where a report says it.
        ("llama-3.1-8b", 8.03, None),
        ("llama-3.1-70b", 70.6, None),
        ("qwen3-8b", 8.19, 6.95),
        ("qwen3-32b", 32.8, 31.2),
        ("deepseek-v3", 671.0, None),
        ("gpt-oss-120b", 116.83, 5.13 - 201_088 * 2880 / 1e9),
        ("gemma-3-27b", 27.02, 25.6),
        ("qwen3-next-80b-a3b", 79.7, None),
    ],
)
def test_parameters_are_as_many_as_were_published(
    name: str, billions: float, met_billions: float | None
) -> None:
    found, _ = counted(configuration_of(name).fields)
    assert found.total / 1e9 == pytest.approx(billions, rel=0.01)
    if met_billions is not None:
        assert found.met / 1e9 == pytest.approx(met_billions, rel=0.01)


def test_of_deepseek_v3_37_billion_parameters_are_met_with_both_tables() -> None:
    found, _ = counted(configuration_of("deepseek-v3").fields)
    assert found.met + 2 * 129_280 * 7168 == pytest.approx(37e9, rel=0.02)


def test_formats_that_are_known_say_what_weights_take_and_others_nothing() -> None:
    # The model card: a checkpoint of 60.8 GiB.
    assert counted(configuration_of("gpt-oss-120b").fields)[1] == pytest.approx(60.8 * 2**30, rel=0.01)
    assert counted(configuration_of("deepseek-v3").fields)[1] == pytest.approx(671e9, rel=0.01)
    plain = configuration_of("llama-3.1-8b").fields
    assert counted(plain)[1] == pytest.approx(16.06e9, rel=0.01)
    assert counted({**plain, "quantization_config": {"quant_method": "awq"}})[1] is None
    assert counted({**plain, "quantization_config": "odd"})[1] is None
    strange = Fields({**plain, "model_type": "strange"}, "strange")
    assert parameters_of(strange, layers_of(strange)) is None


def counted(config: Any) -> tuple[Parameters, int | None]:
    fields = Fields(config, "a model")
    layers = layers_of(fields)
    found = parameters_of(fields, layers)
    assert found is not None
    return found, weight_bytes(fields, found, layers.dtype_bytes)


LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, "FFFF"),
        ({"model_type": "mistral", "sliding_window": 64}, "SSSS"),
        ({"model_type": "mistral", "sliding_window": None}, "FFFF"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "FFFF"),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
            "FFFS",
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, "SFSF"),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 3}, "SSFS"),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}, "FSFS"),
        ({"attention_chunk_size": 64, "no_rope_layers": [1, 1, 0, 1]}, "CCFC"),
        ({"attention_chunk_size": 64}, "CCCF"),
        ({"attn_type_list": [1, 1, 1, 1]}, "FFFF"),
        ({"attention_chunk_size": None, "layer_types": ["full_attention"] * 4}, "FFFF"),
    ],
)
def test_each_way_to_say_which_layers_have_a_window_is_understood(more: dict[str, Any], kinds: str) -> None:
    letters = {FULL: "F", SLIDING: "S", "chunked_local_attention": "C"}
    layers = layers_of(Fields(LLAMA | more, "a model")).layers
    assert "".join(letters[layer.kind.value] for layer in layers) == kinds


ALWAYS = ("num_hidden_layers", "num_attention_heads")
NEEDED = {
    "llama-3.1-8b": (*ALWAYS, "hidden_size"),
    "deepseek-v3": (*ALWAYS, "qk_rope_head_dim"),
    "gpt-oss-120b": (*ALWAYS, "sliding_window"),
    "gemma-3-27b": (*ALWAYS, "sliding_window"),
    "qwen3-next-80b-a3b": (
        *ALWAYS,
        "full_attention_interval",
        "linear_num_value_heads",
        "linear_conv_kernel_dim",
    ),
}


@pytest.mark.parametrize("name", NEEDED)
def test_every_field_that_is_needed_is_missed_by_name(name: str) -> None:
    fields = configuration_of(name).fields
    for field in NEEDED[name]:
        with pytest.raises(ConfigError, match=f"{field} is None there"):
            layers_of(Fields({k: v for k, v in fields.items() if k != field}, name))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "no model has more"),
        ({"num_attention_heads": 7}, "hidden_size is 512"),
        ({"index_topk": 2048}, "index_topk is 2048 there, and sparse attention"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern is 'M-M"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"attn_type_list": [0, 0, 0, 1]}, "attn_type_list is [0, 0, 0, 1] there, and the states"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer of this model keeps KV"),
        ({"full_attention_interval": 9}, "full_attention_interval is 9 there, and no layer"),
        ({"full_attention_interval": 4}, "linear_num_key_heads is None"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": "full"}, "layer_types is no list"),
        ({"layer_types": ["mamba"] * 4}, "layer_types is 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
        ({"sliding_window": 64, "model_type": "new"}, "add layer_types"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is None"),
        ({"dtype": "int3"}, "known are float32"),
        ({"v_head_dim": 80}, "v_head_dim is 80"),
        ({"linear_num_value_heads": 4}, "full_attention_interval is None"),
    ],
)
def test_what_is_wrong_or_not_understood_is_refused_by_its_field(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        layers_of(Fields(LLAMA | more, "tiny"))
    assert says in str(refused.value)
    assert refused.value.value == "tiny"


ODD = st.sampled_from([None, True, False, 0, -1, 1, 3, 1.5, "x", [], {}, [1, 2], float("nan"), 2**70, 10**6])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(PUBLISHED)), st.data())
def test_a_garbled_configuration_is_refused_as_one_or_makes_sense(name: str, data: st.DataObject) -> None:
    fields = dict(configuration_of(name).fields)
    for field in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[field] = data.draw(ODD)
    try:
        kv = kv_of(layers_of(Fields(fields, name)))
        parameters = parameters_of(Fields(fields, name), kv.layers)
    except ConfigError:
        return
    assert all(kv.chunk_bytes(group, 0) > 0 for group in kv.groups)
    assert parameters is None or parameters.total >= parameters.met > 0


def test_a_name_is_known_with_its_owner_and_in_any_case() -> None:
    for name in ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B", " llama-3.1-8b "):
        assert configuration_of(name).served_as == "meta-llama/Llama-3.1-8B"


def test_a_file_or_its_folder_is_read_and_of_several_parts_that_for_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA, "num_hidden_layers": 99}))
    for path in (tmp_path, tmp_path / "config.json"):
        found = configuration_of(str(path))
        assert found.served_as == str(tmp_path)
        assert len(layers_of(Fields(found.fields, "tiny")).layers) == 4


@pytest.mark.parametrize("model", ["", "llama", "/no/such/folder", "x" * 5000, "a\0b"])
def test_a_model_nobody_knows_is_answered_with_those_there_are(model: str) -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        configuration_of(model)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, "\x00"])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"give a (model's )?config\.json"):
        configuration_of(str(tmp_path))
