"""The KV tensors of all ranks, as vLLM hands them to a connector and as one array to look at.

Knows layouts and addresses; does not know what the bytes ought to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

WORD_BYTES = 8
"""A token takes one word in each layer of each rank."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group.

    Attributes:
        layer_names: Its layers.
        tokens_per_block: Tokens a block holds.
    """

    layer_names: tuple[str, ...]
    tokens_per_block: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.tokens_per_block * WORD_BYTES


class DeviceMemory:
    """One shard of every group on each rank.

    Places are counted per group: token ``t`` of block ``b`` is at ``b * tokens_per_block + t``.

    Args:
        groups: The groups; each has its own bytes.
        num_blocks: Of the device, the null block included.
        rank_count: Ranks.
        block_first: All layers of a block lie together.

    Attributes:
        kv_caches: Per rank and layer ``int64[num_blocks, 1, tokens_per_block, 1]``.
    """

    def __init__(
        self, groups: Sequence[GroupShape], num_blocks: int, rank_count: int, block_first: bool
    ) -> None:
        self.groups = tuple(groups)
        words = [num_blocks * group.tokens_per_block * len(group.layer_names) for group in groups]
        self._words = np.zeros((rank_count, sum(words)), dtype=np.uint64)
        self._at: list[np.ndarray] = []  # per group, int64[layers, places]: where in a rank's words
        self.kv_caches: list[dict[str, torch.Tensor]] = [{} for _ in range(rank_count)]
        begin = 0
        for group, count in zip(self.groups, words, strict=True):
            layers, tokens = len(group.layer_names), group.tokens_per_block
            index = np.arange(begin, begin + count)
            if block_first:
                blocks = index.reshape(num_blocks, layers, tokens).transpose(1, 0, 2)
            else:
                blocks = index.reshape(layers, num_blocks, tokens)
            self._at.append(np.ascontiguousarray(blocks).reshape(layers, num_blocks * tokens))
            for rank, caches in enumerate(self.kv_caches):
                storage = torch.from_numpy(self._words[rank, begin : begin + count].view(np.int64))
                if block_first:
                    views = storage.view(num_blocks, layers, 1, tokens, 1).unbind(1)
                else:
                    views = storage.view(layers, num_blocks, 1, tokens, 1).unbind(0)
                caches.update(zip(group.layer_names, views, strict=True))
            begin += count

    def read(self, group_index: int, places: np.ndarray) -> np.ndarray:
        """Look at ``uint64[ranks, layers, places]``."""
        return self._words[:, self._at[group_index][:, places]]

    def read_rank(self, rank: int, group_index: int, places: np.ndarray) -> np.ndarray:
        """Look at ``uint64[layers, places]`` of one rank."""
        words: np.ndarray = self._words[rank, self._at[group_index][:, places]]
        return words

    def write(self, group_index: int, places: np.ndarray, words: np.ndarray) -> None:
        """Write ``uint64[ranks, layers, places]``."""
        self._words[:, self._at[group_index][:, places]] = words

    def write_rank(self, rank: int, group_index: int, places: np.ndarray, words: np.ndarray) -> None:
        """Write ``uint64[layers, places]`` of one rank."""
        self._words[rank, self._at[group_index][:, places]] = words

    def clear(self, group_index: int, block_ids: Sequence[int]) -> None:
        """Zero whole blocks on all ranks, as the engine does for some models."""
        tokens = self.groups[group_index].tokens_per_block
        self.write(group_index, places_of(block_ids, tokens), np.uint64(0))  # type: ignore[arg-type]


def places_of(block_ids: Sequence[int], tokens_per_block: int) -> np.ndarray:
    """Places of all tokens of these blocks, in order."""
    first = np.array(block_ids, dtype=np.int64) * tokens_per_block
    places: np.ndarray = first[:, None] + np.arange(tokens_per_block)
    return places.ravel()
