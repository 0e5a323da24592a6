"""One GGUF file to a folder that vLLM loads: ``python -m kvtide.demo.convert FILE.gguf FOLDER``.

Knows transformers and torch; nothing else in the demo does.
"""

import os
import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of ``gguf`` into ``folder``: bfloat16 safetensors, configuration and tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The saved weights are not quantised any more; with the note left in, vLLM would look for GGUF.
    model.config.__dict__.pop("quantization_config", None)
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
