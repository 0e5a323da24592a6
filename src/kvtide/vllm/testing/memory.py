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
        tokens_per_block: Tokens a block holds; the same in all groups.
        window_tokens: Tokens a query sees, itself included; None for all before it.
    """

    layer_names: tuple[str, ...]
    tokens_per_block: int
    window_tokens: int | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.tokens_per_block * WORD_BYTES

    def first_read(self, position: int) -> int:
        """First token whose KV is read by a query at ``position``."""
        return 0 if self.window_tokens is None else max(0, position - self.window_tokens + 1)


class DeviceMemory:
    """One shard of every group on each rank.

    The groups share their bytes, as in vLLM: a block belongs to one group at a time. Places are counted per
    group: token ``t`` of block ``b`` is at ``b * tokens_per_block + t``.

    Args:
        groups: The groups.
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
        tokens = self.groups[0].tokens_per_block
        layers = max(len(group.layer_names) for group in groups)
        shape = (num_blocks, layers, tokens) if block_first else (layers, num_blocks, tokens)
        self._words = np.zeros((rank_count, num_blocks * layers * tokens), dtype=np.uint64)
        index = np.arange(self._words.shape[1]).reshape(shape)
        at = np.ascontiguousarray(index.transpose(1, 0, 2) if block_first else index)
        at = at.reshape(layers, num_blocks * tokens)
        # Per group, int64[layers, places]: where in a rank's words.
        self._at = [at[: len(group.layer_names)] for group in groups]
        self.kv_caches: list[dict[str, torch.Tensor]] = []
        for words in self._words:
            storage = torch.from_numpy(words.view(np.int64)).view(shape)
            views = [one[:, None, :, None] for one in storage.unbind(1 if block_first else 0)]
            self.kv_caches.append(
                {name: view for group in groups for name, view in zip(group.layer_names, views, strict=False)}
            )

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
