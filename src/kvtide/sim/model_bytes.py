"""How many bytes of KV cache a token takes, by a model's configuration.

Counts every layer as one that keeps all tokens: with sliding windows or recurrent layers that is an upper
bound. Knows the names in a ``config.json``; reads no weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
HINT = "give bytes of KV cache per token, or the config.json of a model (or its folder)"


def bytes_per_token(model: str) -> int:
    """Read ``--model``.

    Args:
        model: A whole number of bytes, or a configuration's path.

    Raises:
        ConfigError: Neither, or a configuration that does not say enough.
    """
    text = model.strip().replace("_", "")
    if text.lstrip("+-").isdigit():
        if int(text) < 1:
            raise ConfigError("model", model, f"{HINT}; at least 1")
        return int(text)
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not model or not path.is_file():
        raise ConfigError("model", model, HINT)
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model", model, f"cannot be read ({error}); {HINT}") from None
    if not isinstance(config, dict):
        raise ConfigError("model", model, f"is JSON, but no configuration; {HINT}")
    return bytes_per_token_of(config, model)


def bytes_per_token_of(config: Mapping[str, Any], name: str) -> int:
    """Work it out of a configuration.

    Latent attention (MLA, DeepSeek-V2, 2024) keeps one compressed vector and one rotary key a layer; any
    other a key and a value for each KV head.

    Args:
        config: As in ``config.json``; of a model for text and more, the part for text counts.
        name: Of the file, for errors.

    Raises:
        ConfigError: Something is missing or is no number above 0.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    layers, dtype_bytes = _number(config, name, "num_hidden_layers"), _dtype_bytes(config, name)
    if config.get("kv_lora_rank"):
        numbers = _number(config, name, "kv_lora_rank") + _number(config, name, "qk_rope_head_dim")
        return layers * numbers * dtype_bytes
    heads = _number(config, name, "num_attention_heads")
    kv_heads = (
        heads if config.get("num_key_value_heads") is None else _number(config, name, "num_key_value_heads")
    )
    if config.get("head_dim") is None:
        head_dim = _number(config, name, "hidden_size") // heads
    else:
        head_dim = _number(config, name, "head_dim")
    return layers * kv_heads * head_dim * 2 * dtype_bytes


def _number(config: Mapping[str, Any], name: str, field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("model", name, f"{field} is {value!r} there, and should be a whole number above 0")
    return value


def _dtype_bytes(config: Mapping[str, Any], name: str) -> int:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError("model", name, f"dtype is {dtype!r} there; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
