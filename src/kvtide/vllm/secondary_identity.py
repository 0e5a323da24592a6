"""Whose bytes a row of vLLM's host memory holds: the parts of its ``Fingerprint``.

A row is a chunk of all ranks side by side, so one record has it all. vLLM tells a tier the model's name,
geometry and ranks; weights, overrides and quantisation stand only in the ``VllmConfig`` that the connector
was made with.
"""

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvtide.errors import ConfigError
from kvtide.tiers.fingerprint import Fingerprint
from kvtide.tiers.records import FORMAT_VERSION
from kvtide.vllm.identity import model_parts, refuse_random_hashes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

ROW_FORMAT = 1
"""Of how a row becomes a payload: as it is."""


def row_fingerprint_of(spec: "TieringOffloadingSpec", row_bytes: int, identity: str) -> Fingerprint:
    """Collect what shapes the bytes of a row.

    Args:
        spec: As vLLM made it.
        row_bytes: Of one row, padding included.
        identity: What the user adds, in words.

    Raises:
        ConfigError: It cannot be told, or differs from process to process; names the option.
    """
    config = spec.config
    vllm_config = vllm_config_behind(spec)
    if vllm_config is None:
        if not identity:
            raise ConfigError(
                "secondary_tiers.identity",
                identity,
                "vLLM does not say which weights it runs here; give a text that changes when they do",
            )
        model: dict[str, Any] = {"name": config.model.name}
    else:
        model = _model_of(vllm_config, identity)
    parallel = config.parallel
    return Fingerprint.of(
        {
            "format": FORMAT_VERSION,
            "row_format": ROW_FORMAT,
            **model,
            "identity": identity,
            "row": {
                "bytes": row_bytes,
                "worker_bytes": config.worker_kv_bytes_per_block,
                "dtype": config.model.dtype,
                "layout": config.kv_cache_layout,
                "canonical": config.canonical_layout,
                "replicated": spec.replicated_layout,
                "blocks": config.cache.blocks_per_chunk,
            },
            "groups": [[one.group_id, one.tokens_per_block, list(one.layer_names)] for one in config.groups],
            "hash_tokens": config.cache.tokens_per_hash,
            "ranks": [
                parallel.world_size,
                parallel.tp_size,
                parallel.pp_size,
                parallel.pcp_size,
                parallel.dcp_size,
            ],
        }
    )


def _model_of(vllm_config: "VllmConfig", identity: str) -> dict[str, Any]:
    from vllm.platforms import current_platform

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    refuse_random_hashes(algorithm, os.environ)
    if vllm_config.lora_config is not None and not identity:
        raise ConfigError(
            "secondary_tiers.identity",
            identity,
            "vLLM does not tell a tier which requests use an adapter, and names adapters without their"
            " weights; give a text that changes when an adapter's weights do, or switch adapters off",
        )
    return {
        **model_parts(vllm_config),
        "hashes": [algorithm, os.environ.get("PYTHONHASHSEED")],
        # How a backend of attention arranges the bytes within a block, vLLM does not say.
        "attention": [current_platform.device_type, str(vllm_config.attention_config.backend)],
        "runner": bool(vllm_config.use_v2_model_runner),
    }


def vllm_config_behind(spec: "TieringOffloadingSpec") -> "VllmConfig | None":
    """Find the configuration that a spec was made from, among those who are calling now.

    vLLM hands a tier a part of it. The whole is in the connector's constructor, which is what calls us, and
    nowhere else in this process. One is the right one if its settings are the very object that the spec has.

    Returns:
        It, or None when there is none: a vLLM that builds its tiers in another way.
    """
    from vllm.config import VllmConfig

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            # By its type: of a proxy whose object is gone, isinstance() would ask that, and fail.
            transfer = value.kv_transfer_config if issubclass(type(value), VllmConfig) else None
            if transfer is not None and transfer.kv_connector_extra_config is spec.extra_config:
                return value
        frame = frame.f_back
    return None
