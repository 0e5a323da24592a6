"""A model so small that a prompt of 32k tokens is computed in a second on two cores.

One layer, one head, saved random weights. A request that has nine tenths of such a prompt computes the rest
in 0.17 s and then takes 3 ms a token. An accelerator with a model of some billion parameters is in that
region, so that what a connector costs a request and a step weighs here about what it weighs there. KV cache
is small in proportion (256 bytes a token): copies weigh less.
"""

import os
import shutil
import tempfile
from pathlib import Path

from benchmarks.frame.children import Tell, in_child
from benchmarks.frame.models import MODELS

RECIPE = 1
"""Part of the folder's name: another recipe must not meet the files of this one."""

CONTEXT_TOKENS = 40_960
SEED = 7
WRITE_LIMIT_S = 120.0


def tiny_model(log: Path, tell: Tell) -> Path:
    """Return its folder; written once, in a process of its own.

    Args:
        log: What that process prints.
        tell: Is told what is going on.

    Raises:
        UnfitError: It could not be written.
    """
    folder = MODELS / f"long-contexts-{RECIPE}"
    if not folder.exists():
        in_child("benchmarks.serve.tiny:write_model", (folder,), log, tell, WRITE_LIMIT_S)
    return folder


def write_model(tell: Tell, folder: Path) -> None:
    """Write the model, whole or not at all."""
    import torch
    import transformers

    tell("writing the model for long contexts")
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=CONTEXT_TOKENS,
        # Wide enough that answers do not end in a loop of one token.
        initializer_range=0.2,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        torch.manual_seed(SEED)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(draft)
        os.replace(draft, folder)
    except OSError:
        if not folder.exists():  # else another run has written it meanwhile
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
