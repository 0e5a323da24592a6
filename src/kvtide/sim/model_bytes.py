"""How many bytes of KV cache a token takes: as somebody says it, or by a model's configuration.

A replay has blocks of one size, so every layer is counted as one that keeps all tokens: with sliding windows
or recurrent layers that is an upper bound. What each kind of layer keeps is read in ``kvtide.plan``.
"""

from kvtide.errors import ConfigError
from kvtide.plan.groups import ModelKV
from kvtide.plan.models import configuration_of
from kvtide.plan.planning import kv_of_configuration

HINT = "give bytes of KV cache per token"


def bytes_per_token(model: str) -> int:
    """Read ``--model``.

    Args:
        model: A whole number of bytes; or a name or a path as ``configuration_of`` takes it.

    Raises:
        ConfigError: Neither, or a configuration that is not understood; names the field.
    """
    text = model.strip().replace("_", "")
    if text.lstrip("+-").isdigit():
        if int(text) < 1:
            raise ConfigError("model", model, f"{HINT}; at least 1")
        return int(text)
    return at_most_per_token(kv_of_configuration(configuration_of(model, f"{HINT}, or ")))


def at_most_per_token(kv: ModelKV) -> int:
    """Count a recurrent layer like one of attention: its block is as large."""
    attention = [group for group in kv.groups if not group.geometry.keeps_states]
    kept = sum(kv.token_bytes(group) for group in attention)
    layers = sum(len(group.layers) for group in attention)
    return kept * len(kv.layers.layers) // layers
