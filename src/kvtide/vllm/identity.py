"""What of vLLM's configuration shapes the bytes of KV cache: the parts of a ``Fingerprint``.

Reads ``VllmConfig`` and ``KVCacheConfig``, and the files of the weights. What is left out here is what two
servers may differ in and still read each other's records: pool sizes, limits, scheduling.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from kvtide.errors import ConfigError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.spec_tiers import TierIdentity
from kvtide.tiers.fingerprint import Fingerprint, weights_digest
from kvtide.tiers.records import FORMAT_VERSION, Shard

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SEEDED_ALGORITHMS = ("sha256", "sha256_cbor")
"""Hashes with a seed that vLLM fixes by itself; of others each process draws its own."""

LATENTS = (GroupKind.MLA_ATTENTION, GroupKind.SLIDING_WINDOW_MLA)

NOT_OF_THE_BYTES = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}
"""Values of a model's configuration that say where it came from, or stand under another name here."""


def fingerprint_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", geometry: KVGeometry
) -> Fingerprint:
    """Collect what shapes the bytes of this engine's KV cache.

    Raises:
        ConfigError: It cannot be told, or differs from process to process; names the option.
    """
    refuse_random_hashes(vllm_config.cache_config.prefix_caching_hash_algo, os.environ)
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    return Fingerprint.of(
        {
            "format": FORMAT_VERSION,
            **model_parts(vllm_config),
            "layout": str(kv_cache_config.kv_cache_layout),
            # How a backend of attention arranges the bytes within a block, vLLM does not say.
            "attention": [
                vllm_config.device_config.device_type,
                str(vllm_config.attention_config.backend),
            ],
            "ranks": {
                "tensor": parallel.tensor_parallel_size,
                "pipeline": parallel.pipeline_parallel_size,
                "decode_context": parallel.decode_context_parallel_size,
            },
            "hashes": {
                "algorithm": cache.prefix_caching_hash_algo,
                "seed": os.environ.get("PYTHONHASHSEED"),
                "tokens": geometry.finest.tokens_per_hash,
                "lookahead": geometry.finest.lookahead_hashes,
            },
            "groups": [
                [group.kind.value, group.tokens_per_block, group.blocks_per_chunk, group.window_tokens]
                for group in geometry.groups
            ],
        }
    )


def model_parts(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Say which model computes the bytes, and in which numbers.

    Raises:
        ConfigError: Its weights cannot be told; names the option.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    return {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "weights": weights_of(model),
        "model": _told(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "drafter": None if speculative is None else _drafter(speculative),
    }


def tier_identity_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", geometry: KVGeometry
) -> TierIdentity:
    """Say whose bytes this rank writes below host memory.

    Raises:
        ConfigError: As ``fingerprint_of``.
    """
    return TierIdentity(
        vllm_config.parallel_config.rank,
        fingerprint_of(vllm_config, kv_cache_config, geometry),
        vllm_config.model_config.model,
        tuple(shards_of(vllm_config, geometry, rank) for rank in range(geometry.shard_count)),
        f"{vllm_config.kv_transfer_config.engine_id}/{vllm_config.instance_id}",
    )


def shards_of(vllm_config: "VllmConfig", geometry: KVGeometry, rank: int) -> tuple[Shard, ...]:
    """Say, per group, which part of each chunk a rank holds: the same as others with identical bytes.

    Bytes are identical where latents are kept, which each rank computes, and where there are more ranks than
    KV heads; with decode-context parallelism neighbours among those have other tokens.
    """
    parallel = vllm_config.parallel_config
    ranks, token_shards = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    stage, place = divmod(rank, ranks)
    found = []
    for group in geometry.groups:
        parts = _parts_of(vllm_config, geometry, group)
        count = min(ranks, parts * token_shards)
        index = place if count == ranks else place // (ranks // parts) * token_shards + place % token_shards
        found.append(Shard(stage * count + index, parallel.pipeline_parallel_size * count))
    return tuple(found)


def _parts_of(vllm_config: "VllmConfig", geometry: KVGeometry, group: GroupGeometry) -> int:
    """Into how many parts the ranks of a stage divide what is kept of a token."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if group.kind in LATENTS:
        return 1
    heads = int(vllm_config.model_config.get_total_num_kv_heads())
    # Where layers may differ in heads, each rank is taken to have bytes of its own.
    alike = geometry.is_one_prefix and vllm_config.speculative_config is None
    if alike and group.kind is GroupKind.FULL_ATTENTION and 0 < heads < ranks and ranks % heads == 0:
        return heads
    return ranks


def weights_of(model: "ModelConfig") -> str:
    """Tell weights by content, for a folder, or by commit, for a model of the hub.

    Raises:
        ConfigError: Neither can be had.
    """
    if Path(model.model).is_dir():
        return weights_digest(Path(model.model))
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if commit is None:
        raise ConfigError(
            "model", model.model, "its commit is not known; give --revision, or a folder with its files"
        )
    return f"{model.model}@{commit}"


def refuse_random_hashes(algorithm: str, environment: Mapping[str, str]) -> None:
    """Refuse block hashes that no other process can compute.

    Raises:
        ConfigError: Names the algorithm and what would do.
    """
    if algorithm not in SEEDED_ALGORITHMS and "PYTHONHASHSEED" not in environment:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "its seed differs from process to process, so nothing below host memory could be found again;"
            f" use {SEEDED_ALGORITHMS[0]}, or set PYTHONHASHSEED to one value everywhere",
        )


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in NOT_OF_THE_BYTES}


def _drafter(speculative: Any) -> dict[str, Any]:
    """What a drafter keeps lies in the same blocks."""
    draft = speculative.draft_model_config
    has_kv = speculative.uses_draft_kv_cache()
    return {
        "method": speculative.method,
        "weights": weights_of(draft) if has_kv and draft is not None else None,
    }
