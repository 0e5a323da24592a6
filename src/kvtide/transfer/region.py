"""Where the bytes of a block are on the device, and where they go in a slot.

Knows addresses, strides and sizes of tensors that the engine has allocated; copies nothing. A layer's
tensor becomes a canonical byte view ``(num_blocks, page_bytes)``; layers that lie side by side in every
block are taken together as one region, so that a block-outermost layout is one piece a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtide.errors import LayoutError


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's tensor as ``uint8[num_blocks, page_bytes]``.

    Attributes:
        name: The engine's name of the layer.
        address: Of block 0.
        block_stride_bytes: From one block to the next.
        page_bytes: Contiguous bytes of one block.
        num_blocks: Blocks there are.
    """

    name: str
    address: int
    block_stride_bytes: int
    page_bytes: int
    num_blocks: int


def layer_view(name: str, tensor: torch.Tensor, num_blocks: int) -> LayerView:
    """View a layer's tensor block by block.

    Args:
        name: For messages.
        tensor: ``[num_blocks * k, ...]``: a block may be split into k kernel blocks that lie densely.
        num_blocks: Logical blocks, as the scheduler counts them.

    Raises:
        LayoutError: The bytes of one block are not one dense piece.
    """
    shape, strides, item_bytes = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    described = f"layer {name}: shape {shape}, strides {tuple(strides)}, {num_blocks} blocks"
    if not shape or shape[0] % num_blocks:
        raise LayoutError(f"{described}: the first dimension does not count blocks")
    inner = sorted(zip(strides[1:], shape[1:], strict=True))
    dense = 1
    for stride, size in inner:
        if size > 1 and stride != dense:
            raise LayoutError(f"{described}: the bytes of a block are not one dense piece")
        dense *= size
    kernel_blocks = shape[0] // num_blocks
    if kernel_blocks > 1 and strides[0] != dense:
        raise LayoutError(f"{described}: kernel blocks of one block do not lie densely")
    return LayerView(
        name,
        tensor.data_ptr(),
        strides[0] * kernel_blocks * item_bytes,
        dense * kernel_blocks * item_bytes,
        num_blocks,
    )


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """The pieces of one group's blocks, and their order in a slot.

    A slot holds region after region, and within a region block after block of the chunk.

    Attributes:
        base: ``int64[regions]``, address of block 0.
        stride: ``int64[regions]``, bytes from block to block on the device.
        size: ``int64[regions]``, bytes of one block.
        offset: ``int64[regions]``, where the region begins in a slot.
        blocks_per_chunk: Blocks of one chunk.
    """

    base: np.ndarray
    stride: np.ndarray
    size: np.ndarray
    offset: np.ndarray
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in a slot."""
        return int(self.size.sum()) * self.blocks_per_chunk


def group_regions(layers: Sequence[LayerView], blocks_per_chunk: int) -> GroupRegions:
    """Take layers together that lie side by side in every block."""
    merged: list[list[int]] = []
    for layer in sorted(layers, key=lambda view: view.address):
        last = merged[-1] if merged else None
        if (
            last
            and last[0] + last[2] == layer.address
            and last[1] == layer.block_stride_bytes >= last[2] + layer.page_bytes
        ):
            last[2] += layer.page_bytes
        else:
            merged.append([layer.address, layer.block_stride_bytes, layer.page_bytes])
    # A rank of a pipeline may have none of a group's layers.
    base, stride, size = np.array(merged, dtype=np.int64).reshape(-1, 3).T.copy()
    offset = (np.cumsum(size) - size) * blocks_per_chunk
    return GroupRegions(base, stride, size, offset, blocks_per_chunk)


def slot_bytes_of(groups: Sequence[GroupRegions]) -> int:
    """Bytes of one slot: the largest chunk of any group."""
    return max(group.chunk_bytes for group in groups)


def layer_views(
    kv_caches: Mapping[str, torch.Tensor], names: Sequence[str], num_blocks: int
) -> list[LayerView]:
    """View the named layers of what the engine has registered.

    Raises:
        LayoutError: A layer is missing, or is of a shape nobody has verified.
    """
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise LayoutError(f"no KV tensor was registered for layers {missing}")
    return [layer_view(name, kv_caches[name], num_blocks) for name in names]
