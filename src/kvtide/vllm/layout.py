"""vLLM's description of its KV cache, translated; what nobody has verified is refused by name.

Reads ``VllmConfig`` and ``KVCacheConfig``; the tensors themselves are looked at in
``kvtide.transfer.region``.
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, get_kv_cache_spec_kind
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtide.errors import ConfigError, LayoutError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry, OtherGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = logging.getLogger(__name__)

STATE_WINDOW_TOKENS = 2
"""See ``GroupGeometry.window_tokens``."""


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
    """Name the layout to ask for; None to leave the choice to vLLM.

    vLLM chooses among what the attention backends of its workers support, and does not tell us here; what is
    not among that is dropped with a warning. So the backends are asked again: those of the model's layers
    where these are in this process, or else the one that vLLM selects for such a model.
    """
    if vllm_config.device_config.device_type == "cpu":
        return None  # its attention reads one layout only
    try:
        # Not at the top: a release that has moved them is one in which vLLM chooses alone.
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

        with set_current_vllm_config(vllm_config):
            backends = get_current_attn_backends(vllm_config)
            candidates = get_supported_kv_cache_layouts(backends)
            splits = any(_splits_blocks(backend, vllm_config) for backend in backends)
    except Exception as error:  # whatever vLLM raises there: a wish is no reason not to start
        logger.info("kvtide asks for no KV cache layout: the attention backend is not known: %s", error)
        return None
    return layout_among(candidates, splits)


def layout_among(candidates: Sequence[KVCacheLayout], splits_blocks: bool) -> str | None:
    """Choose what to ask for.

    Args:
        candidates: What vLLM would choose among, the most preferred first.
        splits_blocks: Kernels see a block as several, which they can only where those of a layer lie densely.

    Returns:
        A layout in which a block of all layers is one piece, the cheapest speed there is. Where there is
        none, and vLLM prefers one in which not even a block of one layer is one piece, one in which it is.
        Otherwise None.
    """
    compact = [layout for layout in candidates if layout.is_block_compact]
    for layout in compact:
        if layout.is_block_outermost and not splits_blocks:
            return str(layout.name)
    if compact and not candidates[0].is_block_compact:
        # Among compact ones that with the layers outermost, if it is because of splitting.
        return str(min(compact, key=lambda layout: layout.is_block_outermost).name)
    return None


def _splits_blocks(backend: "type[AttentionBackend]", vllm_config: "VllmConfig") -> bool:
    """Whether kernels of this backend see a block as several; if it cannot be told, yes."""
    if backend.is_ssm():
        return False
    # Sizes, and objects that stand for all multiples of one.
    sizes = backend.get_supported_kernel_block_sizes()
    bases = [size.base for size in sizes if hasattr(size, "base")]
    cache = vllm_config.cache_config
    if not vllm_config.compilation_config.static_forward_context:
        # Workers have yet to choose: what kernels take, or a multiple of that which is as large as a state.
        if vllm_config.model_config.is_hybrid:
            return not bases
        if not cache.user_specified_block_size:
            return False
    return cache.block_size not in sizes and not any(cache.block_size % base == 0 for base in bases)


def geometry_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", blocks_per_chunk: int
) -> KVGeometry:
    """Translate vLLM's groups; those that cannot be cached by prefix stay out.

    Raises:
        ConfigError: An option, or a setting, that does not fit these groups.
        LayoutError: A group of a kind that is not verified; names it.
    """
    specs = [_one_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    _refuse_scattered(kv_cache_config.kv_cache_layout, specs)
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


def _refuse_scattered(layout: str | None, specs: "Sequence[KVCacheSpec]") -> None:
    if layout is None or KVCacheLayout[layout].is_block_compact:
        return
    if any(spec.num_heads > 1 for spec in specs if spec.has_layer_views):  # one head is never apart
        known = ", ".join(one.name for one in KVCacheLayout if one.is_block_compact)
        raise LayoutError(
            f"KV cache layout {layout} keeps the heads of a block apart; kvtide copies whole blocks: {known}."
            " Give one of them that the attention backend reads as VLLM_KV_CACHE_LAYOUT"
        )


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
