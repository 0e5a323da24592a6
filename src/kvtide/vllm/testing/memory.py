"""The KV tensors of all ranks, as vLLM hands them to a connector and as one array to look at.

Knows layouts and addresses; does not know what the bytes ought to be.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtide.vllm.testing.groups import WORD_BYTES, GroupShape

ALL_RANKS = slice(None)


class DeviceMemory:
    """One shard of every group on each rank.

    The groups share their bytes, as in vLLM: a block belongs to one group at a time. Places are counted per
    group: slot ``s`` of block ``b`` is at ``b * slots_per_block + s``. A lane is one word of every slot in
    one layer.

    Args:
        groups: The groups.
        configs: Per rank, vLLM's description; they differ in the names of layers.

    Attributes:
        kv_caches: Per rank, vLLM's own views by layer: ``[num_blocks, heads, slots, content]``.
    """

    def __init__(self, groups: Sequence[GroupShape], configs: Sequence[KVCacheConfig]) -> None:
        self.groups = tuple(groups)
        self.rank_count = len(configs)
        word_count = configs[0].kv_cache_tensors[0].size // WORD_BYTES
        self._words = np.zeros((len(configs), word_count), dtype=np.uint64)
        self.kv_caches = [
            _views(config, torch.from_numpy(words.view(np.int8)), self.groups)
            for config, words in zip(configs, self._words, strict=True)
        ]
        first, num_blocks = self.kv_caches[0], configs[0].num_blocks
        # Per group, int64[lanes, places]: where in a rank's words.
        self._at = [
            np.concatenate(
                [
                    _lanes(first[name], self._words[0], num_blocks, group.slots_per_block, words)
                    for name, words in zip(spec.layer_names, group.words_of_layers, strict=True)
                ]
            )
            for group, spec in zip(self.groups, configs[0].kv_cache_groups, strict=True)
        ]
        # Per block, int64[num_blocks, words of all groups]: what the engine zeroes and copies.
        self._of_block = np.concatenate(
            [
                at.reshape(len(at), num_blocks, -1).transpose(1, 0, 2).reshape(num_blocks, -1)
                for at in self._at
            ],
            axis=1,
        )

    def lane_count(self, group_index: int) -> int:
        """Count the lanes of a group on one rank."""
        return len(self._at[group_index])

    def read(self, group_index: int, places: np.ndarray, ranks: slice = ALL_RANKS) -> np.ndarray:
        """Look at ``uint64[ranks, lanes, places]``."""
        return self._words[ranks][:, self._at[group_index][:, places]]

    def write(
        self, group_index: int, places: np.ndarray, words: np.ndarray, ranks: slice = ALL_RANKS
    ) -> None:
        """Write ``uint64[ranks, lanes, places]``."""
        self._words[ranks][:, self._at[group_index][:, places]] = words

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let somebody write as they like, and put back what was there, on all ranks."""
        before = self._words.copy()
        try:
            yield
        finally:
            self._words[:] = before

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks on all ranks, as the engine does for some models."""
        self._words[:, self._of_block[block_ids]] = np.uint64(0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks on all ranks, all sources being read before the first target is written."""
        self._words[:, self._of_block[targets]] = self._words[:, self._of_block[sources]]


def _views(config: KVCacheConfig, raw: torch.Tensor, groups: Sequence[GroupShape]) -> dict[str, torch.Tensor]:
    layout = KVCacheLayout[config.kv_cache_layout]
    of_layer = {
        name: (getattr(spec.kv_cache_spec, "kv_cache_specs", {}).get(name, spec.kv_cache_spec), group)
        for spec, group in zip(config.kv_cache_groups, groups, strict=True)
        for name in spec.layer_names
    }
    views: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        spec, group = of_layer[tensor.layers[0]]
        dense = spec.num_heads * spec.num_states * spec.state_content_size_bytes == tensor.block_stride
        kernel_block_size = group.tokens_per_block // 2 if group.split and dense else None
        of_layers = create_kv_cache_views(raw, spec, config.num_blocks, layout, tensor, kernel_block_size)
        views.update(zip(tensor.layers, of_layers, strict=True))
    return views


def _lanes(
    view: torch.Tensor, memory: np.ndarray, num_blocks: int, slots_per_block: int, words: int
) -> np.ndarray:
    """Find ``int64[words of a slot, places]`` of one layer, head after head."""
    unit = view.element_size()
    first = (view.data_ptr() - memory.ctypes.data) // WORD_BYTES
    block, head, slot = (view.stride(axis) * unit // WORD_BYTES for axis in range(3))
    kernel_blocks = view.shape[0] // num_blocks
    kernel_block, slots = np.divmod(np.arange(slots_per_block), slots_per_block // kernel_blocks)
    blocks = np.arange(num_blocks)[:, None] * kernel_blocks + kernel_block
    places = (first + blocks * block + slots * slot).ravel()
    of_head = np.arange(view.shape[1])[:, None] * head + np.arange(words // view.shape[1])
    lanes: np.ndarray = places + of_head.reshape(-1, 1)
    return lanes
