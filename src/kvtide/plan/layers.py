"""What each layer of a model keeps, by its configuration.

Knows the fields of published configurations and what vLLM makes of them. Does not know ranks, blocks or
groups. A field that says a layer keeps something else is refused by name: a wrong number of bytes would look
like a right one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtide.geometry import GroupKind
from kvtide.plan.fields import DTYPE_BYTES, Fields

FULL, SLIDING, CHUNKED, RECURRENT = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
)
"""As in ``layer_types``, the names of the library transformers."""

PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
"""The last of so many layers is of full attention, where nothing else is said: the classes' defaults."""

WINDOW_EVERYWHERE = ("mistral", "mixtral", "phi3", "starcoder2")
"""With a ``sliding_window``, all layers of these have it."""

WINDOW_BEHIND = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""With ``use_sliding_window``, layers from ``max_window_layers`` on have it."""

NOT_READ = {
    "is_encoder_decoder": "cross attention keeps what no prefix names",
    "index_topk": "sparse attention keeps the keys of an indexer as well",
    "indexer_budget": "sparse attention keeps the keys of an indexer as well",
    "compress_ratios": "compressed layers keep fewer states than tokens",
    "num_kv_shared_layers": "layers that share KV cache are not counted right",
    "global_head_dim": "layers that differ in the size of their heads are not counted right",
    "num_global_key_value_heads": "layers that differ in KV heads are not counted right",
    "block_configs": "layers that differ in KV heads are not counted right",
    "num_key_value_heads_per_layer": "layers that differ in KV heads are not counted right",
    "swa_num_key_value_heads": "layers that differ in KV heads are not counted right",
    "swa_head_dim": "layers that differ in the size of their heads are not counted right",
    "hybrid_layer_pattern": "layers that differ in KV heads are not counted right",
    "hybrid_override_pattern": "the states of these recurrent layers are not known here",
    "layers_block_type": "the states of these recurrent layers are not known here",
    "attn_layer_period": "the states of these recurrent layers are not known here",
    "attn_type_list": "the states of these recurrent layers are not known here",
    "linear_attn_config": "the states of these recurrent layers are not known here",
    "layer_group_size": "the states of these recurrent layers are not known here",
    "mamba_d_state": "the states of these recurrent layers are not known here",
    "ssm_state_size": "the states of these recurrent layers are not known here",
    "state_size": "the states of these recurrent layers are not known here",
    "attention_free": "a model without attention has no KV cache to speak of",
}
"""Fields that say that a model keeps something this reader would count wrong, and what."""


MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps. Layers that are equal here can share a group.

    Attributes:
        kind: As vLLM calls it.
        kv_heads: Shared out among tensor-parallel ranks; 1 for latents, which every rank has.
        numbers_per_head: Per token and KV head: of a key and a value, or of a latent.
        pair_flops: Floating-point operations for a token to look at one token before it, all heads together.
        window_tokens: With a sliding window, tokens that a query sees, itself included.
        local_tokens: Chunked-local attention: a query sees from the last multiple of so many tokens on.
        convolution_numbers: Of a recurrent layer's state, what its convolution keeps.
        state_numbers: The rest of that state.
        state_heads: Into so many parts at most the state can be shared out; 0 for attention.
    """

    kind: GroupKind
    kv_heads: int = 1
    numbers_per_head: int = 0
    pair_flops: int = 0
    window_tokens: int | None = None
    local_tokens: int | None = None
    convolution_numbers: int = 0
    state_numbers: int = 0
    state_heads: int = 0


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """All of a model's layers, in their order.

    Attributes:
        layers: What each keeps.
        query_heads: Shared out among tensor-parallel ranks.
        dtype_bytes: Of one number as the model computes, which is how KV is kept unless asked otherwise.
        state_bytes: Of one number of a recurrent state.
        longest_tokens: What the model was made for; None where it does not say.
    """

    layers: tuple[Layer, ...]
    query_heads: int
    dtype_bytes: int
    state_bytes: int
    longest_tokens: int | None


def layers_of(fields: Fields) -> ModelLayers:
    """Read what the layers keep.

    Raises:
        ConfigError: A field is missing, wrong, or says something that is not understood; names it.
    """
    for field, reason in NOT_READ.items():
        if fields.has(field) and not _is_plain(fields, field):
            fields.refuse(field, f"{reason}: this model cannot be planned for")
    count = fields.count("num_hidden_layers")
    if count > MOST_LAYERS:
        fields.refuse("num_hidden_layers", f"no model has more than {MOST_LAYERS}")
    heads = fields.count("num_attention_heads")
    kinds = _kinds(fields, count)
    if set(kinds) == {RECURRENT}:
        field = "layer_types" if fields.has("layer_types") else "full_attention_interval"
        fields.refuse(field, "no layer of this model keeps KV cache by tokens")
    known = {kind: MAKERS[kind](fields, heads) for kind in dict.fromkeys(kinds)}
    dtype_bytes = fields.dtype_bytes()
    state_dtype = fields.text("mamba_ssm_dtype")
    if state_dtype and state_dtype not in DTYPE_BYTES:
        fields.refuse("mamba_ssm_dtype", f"known are {', '.join(DTYPE_BYTES)}")
    return ModelLayers(
        tuple(known[kind] for kind in kinds),
        heads,
        dtype_bytes,
        DTYPE_BYTES.get(state_dtype, dtype_bytes),
        fields.count("max_position_embeddings") if fields.has("max_position_embeddings") else None,
    )


def _is_plain(fields: Fields, field: str) -> bool:
    """Whether a field that could say something else says that all layers are of full attention."""
    value = fields.fields[field]
    return field == "attn_type_list" and isinstance(value, list) and all(kind == 1 for kind in value)


def _kinds(fields: Fields, count: int) -> list[str]:
    """Say which kind each layer is of, in the words of ``layer_types``."""
    if fields.has("layer_types"):
        kinds = [str(kind) for kind in fields.numbers("layer_types", count)]
        for kind in kinds:
            if kind not in MAKERS:
                fields.refuse("layer_types", f"known are {', '.join(MAKERS)}", kind)
        return kinds
    if fields.has("linear_num_value_heads") or fields.has("full_attention_interval"):
        return _every(fields.count("full_attention_interval"), RECURRENT, count)
    if fields.has("attention_chunk_size"):
        return _local_kinds(fields, count)
    return _window_kinds(fields, count)


def _local_kinds(fields: Fields, count: int) -> list[str]:
    """Llama 4: layers with rotary positions look back to a multiple of ``attention_chunk_size``."""
    if fields.has("no_rope_layers"):
        return [CHUNKED if rotary else FULL for rotary in fields.numbers("no_rope_layers", count)]
    return _every(fields.count("no_rope_layer_interval", 4), CHUNKED, count)


def _window_kinds(fields: Fields, count: int) -> list[str]:
    model_type = fields.text("model_type")
    pattern = "sliding_window_pattern"
    if model_type in PATTERNS or fields.has(pattern):
        return _every(fields.count(pattern, PATTERNS.get(model_type)), SLIDING, count)
    if not fields.has("sliding_window") or fields.fields.get("use_sliding_window") is False:
        return [FULL] * count
    if model_type in WINDOW_EVERYWHERE:
        return [SLIDING] * count
    if model_type in WINDOW_BEHIND:
        first = count if not fields.has("use_sliding_window") else fields.count("max_window_layers")
        return [FULL if layer < first else SLIDING for layer in range(count)]
    return fields.refuse(
        "sliding_window", f"it is not known which layers of a {model_type!r} have it: add layer_types"
    )


def _every(interval: int, others: str, count: int) -> list[str]:
    return [FULL if (layer + 1) % interval == 0 else others for layer in range(count)]


def _attention(fields: Fields, heads: int) -> Layer:
    """Full attention; or latents (MLA, DeepSeek-V2, 2024): one compressed vector and one rotary key."""
    if fields.has("kv_lora_rank"):
        rotary = fields.count("qk_rope_head_dim")
        looked_at = fields.count("qk_nope_head_dim", 0) + rotary + fields.count("v_head_dim", 0)
        kept = fields.count("kv_lora_rank") + rotary
        return Layer(GroupKind.MLA_ATTENTION, 1, kept, 2 * heads * looked_at)
    if fields.has("v_head_dim") and fields.fields["v_head_dim"] != _head_dim(fields, heads):
        fields.refuse("v_head_dim", "values of another size than keys are not counted right")
    kv_heads = fields.count("num_key_value_heads", heads)
    numbers = 2 * _head_dim(fields, heads)
    return Layer(GroupKind.FULL_ATTENTION, kv_heads, numbers, 2 * heads * numbers)


def _head_dim(fields: Fields, heads: int) -> int:
    if fields.fields.get("head_dim") is not None:
        return fields.count("head_dim")
    width = fields.count("hidden_size")
    if width % heads:
        fields.refuse(
            "hidden_size", f"should be a multiple of num_attention_heads ({heads}), or add head_dim"
        )
    return width // heads


def _windowed(fields: Fields, heads: int) -> Layer:
    full = _attention(fields, heads)
    if full.kind is not GroupKind.FULL_ATTENTION:
        fields.refuse("kv_lora_rank", "latents behind a sliding window are not counted right")
    window = fields.count("sliding_window")
    return Layer(
        GroupKind.SLIDING_WINDOW,
        full.kv_heads,
        full.numbers_per_head,
        full.pair_flops,
        window_tokens=window,
    )


def _local(fields: Fields, heads: int) -> Layer:
    full = _attention(fields, heads)
    size = fields.count("attention_chunk_size")
    return Layer(
        GroupKind.CHUNKED_LOCAL, full.kv_heads, full.numbers_per_head, full.pair_flops, local_tokens=size
    )


def _recurrent(fields: Fields, heads: int) -> Layer:
    """Gated DeltaNet (Yang et al., 2024): a matrix for each value head, and a convolution's last inputs."""
    key_heads = fields.count("linear_num_key_heads")
    value_heads = fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    kernel = fields.count("linear_conv_kernel_dim")
    return Layer(
        GroupKind.MAMBA,
        convolution_numbers=channels * (kernel - 1),
        state_numbers=value_heads * value_dim * key_dim,
        state_heads=key_heads,
    )


MAKERS: dict[str, Callable[[Fields, int], Layer]] = {
    FULL: _attention,
    SLIDING: _windowed,
    CHUNKED: _local,
    RECURRENT: _recurrent,
}
