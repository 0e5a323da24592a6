"""Models small enough to start in seconds, written once into ``build/models``.

Knows configurations and where the files lie. The weights are random but saved: vLLM's dummy weights emit one
or two distinct tokens, and such a model cannot notice a wrong load.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS_DIR = Path(__file__).parents[2] / "build" / "models"
RECIPE = 1
"""Part of every directory's name: another recipe must not meet the files of this one."""

VOCAB_SIZE = 512
WINDOW_TOKENS = 64
SEED = 20
# Wide enough that logits differ and greedy answers do not end in a loop of one token.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
_DENSE: dict[str, Any] = _COMMON | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def llama() -> Path:
    """Llama: four layers of full attention."""
    return _saved("llama", lambda t: t.LlamaConfig(num_hidden_layers=4, **_DENSE))


def llama_wide() -> Path:
    """Llama, wide enough that computing a prompt takes far longer than everything around it."""
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
    return _saved("llama-wide", lambda t: t.LlamaConfig(num_hidden_layers=8, **(_DENSE | wide)))


def qwen3() -> Path:
    """Qwen3: three layers of full attention, normalised queries and keys."""
    return _saved("qwen3", lambda t: t.Qwen3Config(num_hidden_layers=3, **_DENSE))


def gemma2() -> Path:
    """Gemma 2: two layers with a sliding window, two with full attention."""
    return _saved(
        "gemma2",
        lambda t: t.Gemma2Config(
            num_hidden_layers=4, sliding_window=WINDOW_TOKENS, query_pre_attn_scalar=32, **_DENSE
        ),
    )


def gemma3() -> Path:
    """Gemma 3: five layers with a sliding window, one with full attention; six KV cache groups."""
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    return _saved(
        "gemma3-real",
        lambda t: t.Gemma3TextConfig(
            num_hidden_layers=len(layers), layer_types=layers, sliding_window=WINDOW_TOKENS, **_DENSE
        ),
    )


def gpt_oss() -> Path:
    """gpt-oss: one layer with a sliding window and one with full attention, with sinks and experts."""
    return _saved(
        "gpt-oss",
        lambda t: t.GptOssConfig(
            num_hidden_layers=2,
            sliding_window=WINDOW_TOKENS,
            num_local_experts=4,
            num_experts_per_tok=2,
            **(_DENSE | {"intermediate_size": 128}),
        ),
    )


def qwen3_next() -> Path:
    """Qwen3-Next: three recurrent layers and one with full attention, experts."""
    return _saved(
        "qwen3-next",
        lambda t: t.Qwen3NextConfig(
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
            **(_DENSE | {"head_dim": 64}),
        ),
    )


def llama4() -> Path:
    """Llama 4: three layers that see the last multiple of 64 tokens at most, one with full attention."""
    return _saved(
        "llama4",
        lambda t: t.Llama4TextConfig(
            num_hidden_layers=4,
            attention_chunk_size=WINDOW_TOKENS,
            no_rope_layers=[1, 1, 1, 0],
            num_local_experts=2,
            num_experts_per_tok=1,
            intermediate_size_mlp=256,
            interleave_moe_layer_step=1,
            **_DENSE,
        ),
    )


def llama_drafter() -> Path:
    """An EAGLE head for ``llama``: its first layer and embeddings, and random weights to join them."""
    import torch
    from safetensors.torch import load_file, save_file

    def write(draft: Path) -> None:
        config = json.loads((llama() / "config.json").read_text())
        config |= {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
        (draft / "config.json").write_text(json.dumps(config))
        weights = load_file(next(llama().glob("*.safetensors")))
        # Such a head has no norm before its layer.
        chosen = {
            name.removeprefix("model."): tensor.clone()
            for name, tensor in weights.items()
            if name == "model.embed_tokens.weight" or (".layers.0." in name and "input_layernorm" not in name)
        }
        width = config["hidden_size"]
        chosen["fc.weight"] = (
            torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(SEED)) / 10
        )
        save_file(chosen, draft / "model.safetensors", metadata={"format": "pt"})

    return _written("llama-drafter", write)


def mla() -> Path:
    """DeepSeek V2: latent attention, experts."""
    return _saved(
        "mla-real",
        lambda t: t.DeepseekV2Config(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            **_COMMON,
        ),
    )


def _saved(name: str, config: Callable[[Any], Any]) -> Path:
    """Write a model, or find it there; ``config`` makes its configuration out of ``transformers``."""
    import torch
    import transformers

    def write(draft: Path) -> None:
        # The generator of whoever calls us is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = transformers.AutoModelForCausalLM.from_config(config(transformers), dtype=torch.float32)
        model.save_pretrained(draft)

    return _written(name, write)


def _written(name: str, write: Callable[[Path], None]) -> Path:
    """Have a directory of this name, as ``write`` fills it, or as it was filled before."""
    path = MODELS_DIR / f"tiny-{name}-{RECIPE}"
    if path.exists():
        return path
    MODELS_DIR.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=MODELS_DIR))
    try:
        write(draft)
        os.replace(draft, path)  # whole or not at all, also when two runs write at once
    except OSError:
        if not path.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path
