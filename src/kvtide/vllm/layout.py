"""vLLM's description of its KV cache, translated; what nobody has verified is refused by name.

Reads ``VllmConfig`` and ``KVCacheConfig``; the tensors themselves are looked at in
``kvtide.transfer.region``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvtide.errors import ConfigError, LayoutError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

WINDOWED_KINDS = {GroupKind.SLIDING_WINDOW.value}
VERIFIED_KINDS = {GroupKind.FULL_ATTENTION.value, GroupKind.MAMBA.value, *WINDOWED_KINDS}

STATE_WINDOW_TOKENS = 2
"""See ``GroupGeometry.window_tokens``."""

DENSE_LAYOUT = "BLHNC"
"""One block of all layers is one piece: the cheapest speed there is."""


def refuse_unverified(vllm_config: "VllmConfig") -> None:
    """Refuse what this release was not verified with, before memory is taken for it.

    Raises:
        ConfigError: Names vLLM's own option, its value and what would do.
    """
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    checks = (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1), 1),
        ("enable_sleep_mode", bool(vllm_config.model_config.enable_sleep_mode), False),
        ("kv_role", transfer.kv_role if transfer is not None else None, "kv_both"),
    )
    for name, value, verified in checks:
        if value != verified:
            raise ConfigError(name, value, f"this kvtide is verified with {verified!r} only")
    if vllm_config.speculative_config is not None:
        method = vllm_config.speculative_config.method
        raise ConfigError(
            "speculative_config", method, "this kvtide is verified without speculative decoding only"
        )


def required_layout(vllm_config: "VllmConfig") -> str | None:
    """Name the layout to ask for; None where vLLM offers no choice (its CPU backend reads one only)."""
    return None if vllm_config.device_config.device_type == "cpu" else DENSE_LAYOUT


def geometry_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", blocks_per_chunk: int
) -> KVGeometry:
    """Translate vLLM's groups.

    Raises:
        LayoutError: A group of a kind that is not verified; names it.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in groups]
    drafts = any(group.is_eagle_group for group in groups)
    if drafts or not groups or not set(kinds) <= VERIFIED_KINDS:
        raise LayoutError(
            f"this model has {len(groups)} KV cache groups: {', '.join(kinds)}"
            f"{' (of a drafter)' if drafts else ''}; this kvtide is verified with groups of"
            f" {', '.join(sorted(VERIFIED_KINDS))} only. Serve the model without kvtide"
        )
    _refuse_unverified_states(vllm_config, [group.kv_cache_spec for group in groups])
    if len(kv_cache_config.prefix_cacheable_group_ids) < len(groups):
        raise LayoutError(
            "this model has a KV cache group that cannot be cached by prefix. Serve it without kvtide"
        )
    return KVGeometry(
        tuple(
            _group(
                index, kinds[index], group.kv_cache_spec, kv_cache_config.hash_block_size, blocks_per_chunk
            )
            for index, group in enumerate(groups)
        ),
        shard_count=vllm_config.parallel_config.world_size,
    )


def _group(
    index: int, kind: str, spec: "KVCacheSpec", tokens_per_hash: int | None, blocks_per_chunk: int
) -> GroupGeometry:
    window = spec.sliding_window if kind in WINDOWED_KINDS else None
    if kind == GroupKind.MAMBA.value:
        window = STATE_WINDOW_TOKENS
    if window is not None:
        # Of several states only the last is of use; behind a window shorter than a chunk the engine has let
        # go of the chunk's first block before the last is written.
        blocks_per_chunk = 1
    return GroupGeometry(
        index,
        GroupKind(kind),
        spec.block_size,
        blocks_per_chunk,
        tokens_per_hash or spec.block_size,
        window,
    )


def _refuse_unverified_states(vllm_config: "VllmConfig", specs: "Sequence[KVCacheSpec]") -> None:
    """Refuse recurrent layers whose states are not kept at boundaries, or may be zeroed under a copy."""
    for spec in specs:
        mode = getattr(spec, "mamba_cache_mode", "align")
        if mode != "align":
            raise ConfigError("mamba_cache_mode", mode, "this kvtide is verified with 'align' only")
    device = vllm_config.device_config.device_type
    if device != "cpu" and any(hasattr(spec, "mamba_cache_mode") for spec in specs):
        # vLLM's newer model runner zeroes blocks before it lets a connector wait for their copies.
        raise ConfigError("device", device, "recurrent layers are verified on vLLM's CPU backend only")


def kv_bytes_of(kv_cache_config: "KVCacheConfig") -> int:
    """Bytes of the engine's own KV cache on one rank."""
    # All tensors are views of one backing buffer and share its size.
    return max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
