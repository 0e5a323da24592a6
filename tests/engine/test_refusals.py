"""What cannot work is refused at start, by name, with what would do; and nothing is left behind.

Through vLLM's real start: the message is the last line of what vLLM prints when it gives up.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import models
from engine.tiny_engine import tiny_engine
from kvtide.errors import ConfigError, KVTideError

POOL_BLOCKS = 64
DUMMY = {"load_format": "dummy"}
# Without vLLM's own cache of prefixes no states are kept at the ends of blocks.
NO_STATES = DUMMY | {"block_size": None, "num_gpu_blocks_override": None, "enable_prefix_caching": False}
FITS = {"host_memory": "24MiB"}


@pytest.mark.parametrize(
    ("model", "settings", "transfer", "options", "kind", "said"),
    [
        pytest.param(
            models.llama,
            {"host_memory": "16KiB"},
            {},
            {},
            ConfigError,
            "host_memory = 16384: holds 0 chunks: .* give at least 32768 bytes",
            id="a pool of 0 chunks",
        ),
        pytest.param(
            models.llama,
            {"host_memory": "100TiB"},
            {},
            {},
            ConfigError,
            r"host_memory = '100 TiB': does not fit: [\d.]+ .?iB are free of .*; give at most [\d.]+.?iB",
            id="a pool larger than memory",
        ),
        pytest.param(
            models.llama,
            {},
            {},
            {},
            ConfigError,
            "host_memory = None: say how much host memory kvtide may use: give a size such as 8GiB",
            id="no budget",
        ),
        pytest.param(
            models.llama,
            FITS | {"block_per_chunk": 4},
            {},
            {},
            ConfigError,
            "block_per_chunk = 4: no such setting .*; did you mean blocks_per_chunk",
            id="an unknown setting",
        ),
        pytest.param(
            models.llama,
            FITS,
            {"kv_role": "kv_producer"},
            {},
            ConfigError,
            "kv_role = 'kv_producer': .*'kv_both' only",
            id="another role",
        ),
        pytest.param(
            models.qwen3_next,
            FITS,
            {},
            NO_STATES,
            ConfigError,
            "mamba_cache_mode = 'none': this kvtide is verified with 'align' only",
            id="recurrent layers without states at the ends of blocks",
        ),
    ],
)
def test_refused_by_name(
    model: Callable[[], Path],
    settings: dict[str, Any],
    transfer: dict[str, Any],
    options: dict[str, Any],
    kind: type[KVTideError],
    said: str,
) -> None:
    with (
        pytest.raises(kind) as refused,
        tiny_engine(model(), POOL_BLOCKS, settings, transfer, **options),
    ):
        pass
    assert re.search(said, str(refused.value)), str(refused.value)
    assert "\n" not in str(refused.value)
