"""How many parameters a model has, and how many of them a prompt token meets, by its configuration.

Knows families whose layers are gated feed-forward blocks, alone or as experts. Of any other it says nothing:
whoever plans gives the numbers. Norms and biases, below a thousandth, are left aside.
"""

from dataclasses import dataclass

from kvtide.geometry import GroupKind
from kvtide.plan.fields import EXPERT_COUNTS, Fields
from kvtide.plan.layers import Layer, ModelLayers

GATED = {
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "glm4_moe",
    "kimi_k2",
    "deepseek_v2",
    "deepseek_v3",
}
"""Values of ``model_type`` whose feed-forward blocks are three matrices."""

MXFP4_BITS = 4.25
"""Four bits a number, and one scale of eight for 32 of them (OCP Microscaling Formats 1.0, 2023)."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of a model.

    Attributes:
        total: All of them.
        met: By each token of a prompt; tables of embeddings are looked up, and only the last token is turned
            into words.
        in_experts: Of all, those in experts, which some formats alone make smaller.
    """

    total: int
    met: int
    in_experts: int


def parameters_of(fields: Fields, layers: ModelLayers) -> Parameters | None:
    """Count parameters; None for a family whose layers are not known here.

    Raises:
        ConfigError: A field is missing or wrong; names it.
    """
    if fields.text("model_type") not in GATED:
        return None
    width = fields.count("hidden_size")
    total = met = in_experts = 0
    for number, layer in enumerate(layers.layers):
        mixing = _mixing(fields, layer, width)
        dense, routed, chosen = _feed_forward(fields, number, width)
        total += mixing + dense + routed
        met += mixing + dense + chosen
        in_experts += routed
    # The classes of Gemma use one table both ways unless told otherwise.
    usual = fields.text("model_type").startswith("gemma")
    tables = (
        width * fields.count("vocab_size") * (1 if fields.fields.get("tie_word_embeddings", usual) else 2)
    )
    return Parameters(total + tables, met, in_experts)


def weight_bytes(fields: Fields, parameters: Parameters, dtype_bytes: int) -> int | None:
    """Bytes of the weights as they were published; None where their format is not known here."""
    quantization = fields.fields.get("quantization_config")
    if not quantization:
        return parameters.total * dtype_bytes
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "fp8":
        return parameters.total
    if method == "mxfp4":
        outside = parameters.total - parameters.in_experts
        return int(parameters.in_experts * MXFP4_BITS / 8) + outside * dtype_bytes
    return None


def computes_in_fp8(fields: Fields) -> bool:
    """Whether the matrices are multiplied in FP8, where a device can."""
    quantization = fields.fields.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"


def _mixing(fields: Fields, layer: Layer, width: int) -> int:
    """Parameters of what mixes tokens: attention or a recurrent layer."""
    if layer.state_heads:
        keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
        value_heads = fields.count("linear_num_value_heads")
        values = value_heads * fields.count("linear_value_head_dim")
        kernel = fields.count("linear_conv_kernel_dim")
        gates = 2 * value_heads * width
        return width * (2 * keys + 2 * values) + gates + (2 * keys + values) * kernel + values * width
    heads = fields.count("num_attention_heads")
    if layer.kind is GroupKind.MLA_ATTENTION:
        return _latent_mixing(fields, heads, width)
    head_dim = layer.numbers_per_head // 2
    queries = heads * head_dim
    gated = fields.text("model_type") == "qwen3_next"  # a gate as wide as the queries
    return width * queries * (3 if gated else 2) + 2 * width * layer.kv_heads * head_dim


def _latent_mixing(fields: Fields, heads: int, width: int) -> int:
    latent, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    plain, values = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    queries = heads * (plain + rotary)
    if fields.has("q_lora_rank"):
        squeezed = fields.count("q_lora_rank")
        asking = width * squeezed + squeezed * queries
    else:
        asking = width * queries
    return asking + width * (latent + rotary) + latent * heads * (plain + values) + heads * values * width


def _feed_forward(fields: Fields, number: int, width: int) -> tuple[int, int, int]:
    """Parameters of a layer's feed-forward part: met by all tokens, in experts, met of those."""
    counts = [field for field in EXPERT_COUNTS if fields.has(field)]
    if not counts or not _has_experts(fields, number):
        dense = "intermediate_size_mlp" if fields.has("intermediate_size_mlp") else "intermediate_size"
        return 3 * width * fields.count(dense), 0, 0
    experts = fields.count(counts[0])
    size = "moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size"
    one = 3 * width * fields.count(size)
    chosen = fields.count("num_experts_per_tok")
    if fields.has("shared_expert_intermediate_size"):
        shared = 3 * width * fields.count("shared_expert_intermediate_size")
    elif fields.text("model_type") == "llama4_text":
        shared = one
    else:
        shared = fields.count("n_shared_experts") * one if fields.has("n_shared_experts") else 0
    return width * experts + shared, experts * one, min(chosen, experts) * one


def _has_experts(fields: Fields, number: int) -> bool:
    if fields.has("first_k_dense_replace") and number < fields.count("first_k_dense_replace"):
        return False
    listed = fields.fields.get("mlp_only_layers")
    if isinstance(listed, list) and number in listed:
        return False
    step = next(
        (name for name in ("interleave_moe_layer_step", "decoder_sparse_step") if fields.has(name)), None
    )
    return step is None or (number + 1) % fields.count(step) == 0
