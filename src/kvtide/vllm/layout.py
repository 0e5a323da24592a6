"""vLLM's description of its KV cache, translated; what nobody has verified is refused by name.

Reads ``VllmConfig`` and ``KVCacheConfig``; the tensors themselves are looked at in
``kvtide.transfer.region``.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, get_kv_cache_spec_kind

from kvtide.errors import ConfigError, LayoutError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry, OtherGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

STATE_WINDOW_TOKENS = 2
"""See ``GroupGeometry.window_tokens``."""

DENSE_LAYOUT = "BLHNC"
"""One block of all layers is one piece: the cheapest speed there is."""


def refuse_unverified(vllm_config: "VllmConfig") -> None:
    """Refuse what this release was not verified with, before memory is taken for it.

    Raises:
        ConfigError: Names vLLM's own option, its value and what would do.
    """
    transfer = vllm_config.kv_transfer_config
    checks = (
        (
            "prefill_context_parallel_size",
            getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1),
            1,
        ),
        ("enable_sleep_mode", bool(vllm_config.model_config.enable_sleep_mode), False),
        ("kv_role", transfer.kv_role if transfer is not None else None, "kv_both"),
    )
    for name, value, verified in checks:
        if value != verified:
            raise ConfigError(name, value, f"this kvtide is verified with {verified!r} only")


def refuse_blind_stores(vllm_config: "VllmConfig", store_policy: str) -> None:
    """Refuse lazy stores where the engine keeps no hashes by which a free block could be known again.

    Raises:
        ConfigError: Names the setting.
    """
    if store_policy == "lazy" and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "store_policy", store_policy, "needs vLLM's prefix caching, which is off; give eager"
        )


def required_layout(vllm_config: "VllmConfig") -> str | None:
    """Name the layout to ask for; None where vLLM offers no choice (its CPU backend reads one only)."""
    return None if vllm_config.device_config.device_type == "cpu" else DENSE_LAYOUT


def geometry_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", blocks_per_chunk: int
) -> KVGeometry:
    """Translate vLLM's groups; those that cannot be cached by prefix stay out.

    Raises:
        ConfigError: An option, or a setting, that does not fit these groups.
        LayoutError: A group of a kind that is not verified; names it.
    """
    specs = [_one_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    chosen = kv_cache_config.prefix_cacheable_group_ids
    others = tuple(index for index in range(len(specs)) if index not in chosen)
    resident = [index for index, group in enumerate(kv_cache_config.kv_cache_groups) if group.host_resident]
    if resident:
        raise LayoutError(
            f"this model keeps KV cache groups {resident} in host memory. Serve it without kvtide"
        )
    _refuse_unverified_groups(specs, chosen, others)
    context_ranks = vllm_config.parallel_config.decode_context_parallel_size
    block_tokens = [resolve_dcp_kv_block_size(spec, context_ranks) for spec in specs]
    tokens_per_hash = kv_cache_config.hash_block_size or math.gcd(*(block_tokens[index] for index in chosen))
    lookahead_hashes = -(-vllm_config.num_prefill_lookahead_tokens // tokens_per_hash)
    return KVGeometry(
        tuple(
            _group(
                group_index,
                specs[engine_index],
                block_tokens[engine_index],
                blocks_per_chunk,
                tokens_per_hash,
                lookahead_hashes,
                engine_index,
            )
            for group_index, engine_index in enumerate(chosen)
        ),
        shard_count=vllm_config.parallel_config.world_size,
        others=tuple(_other(index, specs[index], block_tokens[index]) for index in others),
        engine_interval=math.lcm(*block_tokens),
        takes_hits_back=any(spec.prefix_replay_tokens for spec in specs),
    )


def _other(engine_index: int, spec: "KVCacheSpec", tokens_per_block: int) -> OtherGroup:
    window = getattr(spec, "sliding_window", None)
    # A ring is one block, whatever a request's length.
    return OtherGroup(engine_index, tokens_per_block, window) if window else OtherGroup(engine_index)


def _group(
    group_index: int,
    spec: "KVCacheSpec",
    tokens_per_block: int,
    blocks_per_chunk: int,
    tokens_per_hash: int,
    lookahead_hashes: int,
    engine_index: int,
) -> GroupGeometry:
    kind = GroupKind(get_kv_cache_spec_kind(spec).value)
    window = local = None
    if kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA):
        window = spec.sliding_window + spec.extra_retained_tokens
    elif kind is GroupKind.MAMBA:
        window = STATE_WINDOW_TOKENS
    elif kind is GroupKind.CHUNKED_LOCAL:
        local = spec.attention_chunk_size
    if window is not None or local is not None:
        # Of several states only the last is of use; behind a window shorter than a chunk the engine has let
        # go of the chunk's first block before the last is written.
        blocks_per_chunk = 1
    return GroupGeometry(
        group_index,
        kind,
        tokens_per_block,
        blocks_per_chunk,
        tokens_per_hash,
        window,
        local,
        lookahead_hashes,
        engine_index,
    )


def _one_spec(spec: "KVCacheSpec") -> "KVCacheSpec":
    """Of layers whose pages differ in size alone, vLLM's scheduler sees the first; so do we everywhere."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _kind_of(spec: "KVCacheSpec") -> str:
    """Name what a group keeps, as vLLM does; but what only looks like full attention by its own name."""
    if hasattr(spec, "rswa_window"):
        # Blocks between a prompt and the last tokens are let go of, and what is in the last ones depends on
        # where the prompt ended: no hash says that.
        return "reference sliding window"
    return str(get_kv_cache_spec_kind(spec).value)


def _refuse_unverified_groups(
    specs: "Sequence[KVCacheSpec]", chosen: Sequence[int], others: Sequence[int]
) -> None:
    kinds = [_kind_of(spec) for spec in specs]
    verified = {kind.value for kind in GroupKind}
    # What a request could use and nobody brings back would be missing after a load.
    kept_from_us = any(specs[index].prefix_cacheable for index in others)
    if not chosen or kept_from_us or not {kinds[index] for index in chosen} <= verified:
        raise LayoutError(
            f"this model has {len(specs)} KV cache groups: {', '.join(kinds)}"
            f"{' (kept out of transfers)' if kept_from_us else ''}; this kvtide is verified with groups of"
            f" {', '.join(sorted(verified))} only. Serve the model without kvtide"
        )
    for index in chosen:
        mode = getattr(specs[index], "mamba_cache_mode", "align")
        if mode != "align":
            raise ConfigError("mamba_cache_mode", mode, "this kvtide is verified with 'align' only")


def writes_new_blocks_first(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Whether new blocks are zeroed or copied into before workers may wait for copies that read them.

    vLLM's newer model runner prepares blocks first, for models that need it, and calls the connector then.
    """
    return bool(vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing)


def blocks_per_step(vllm_config: "VllmConfig", geometry: KVGeometry) -> int:
    """Blocks that a step hands out at most, loads left aside: each request may begin one in each group."""
    limits = vllm_config.scheduler_config
    tokens, requests = limits.max_num_batched_tokens, limits.max_num_seqs
    return sum(min(tokens, tokens // group.tokens_per_block + requests) for group in geometry.groups)


def step_bytes_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", geometry: KVGeometry) -> int:
    """Bytes that one rank stores of one step at most: of every block that the step hands out."""
    block_count: int = kv_cache_config.num_blocks
    return blocks_per_step(vllm_config, geometry) * kv_bytes_of(kv_cache_config) // max(1, block_count)


def kv_bytes_of(kv_cache_config: "KVCacheConfig") -> int:
    """Bytes of the engine's own KV cache on one rank."""
    # All tensors are views of one backing buffer and share its size.
    return max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
