"""Every address of a copy: block ids on one side, slots on the other, pieces out.

Pieces that follow one another on both sides become one: below about 256 KiB a piece, the cost of a copy
is its beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec
from kvtide.transfer.region import GroupRegions

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Pieces to copy, in order.

    Attributes:
        source: ``int64[pieces]``, addresses.
        target: ``int64[pieces]``, addresses.
        size: ``int64[pieces]``, bytes.
    """

    source: np.ndarray
    target: np.ndarray
    size: np.ndarray

    @property
    def byte_count(self) -> int:
        """Bytes of all pieces."""
        return int(self.size.sum())


def plan_copy(
    groups: Sequence[GroupRegions],
    pool_address: int,
    slot_bytes: int,
    device: GPULoadStoreSpec,
    host: CPULoadStoreSpec,
    direction: Direction,
) -> CopyPlan:
    """Work out the pieces of one hop between device and host.

    Raises:
        ValueError: Blocks and slots do not fit together: our bug, and the job fails.
    """
    on_device, on_host, sizes = [_NONE], [_NONE], [_NONE]
    block_ids = np.array(device.block_ids, dtype=np.int64)
    slots = np.array(host.slots, dtype=np.int64)
    block_at = slot_at = 0
    for group, block_count, slot_count, first_block in zip(
        groups, device.group_sizes, host.group_sizes, device.block_indices, strict=True
    ):
        ids = block_ids[block_at : block_at + block_count]
        index = first_block % group.blocks_per_chunk + np.arange(block_count, dtype=np.int64)
        chunk, block_in_chunk = np.divmod(index, group.blocks_per_chunk)
        if block_count != len(ids) or (int(chunk[-1]) + 1 if block_count else 0) != slot_count:
            raise ValueError(f"{block_count} blocks from {first_block} on do not fit {slot_count} slots")
        places = pool_address + slots[slot_at : slot_at + slot_count][chunk] * slot_bytes
        # Along blocks both sides may be contiguous, across regions never: what joins is worked out once for
        # all regions that are alike, mostly all there are, and only what is left is written out for each.
        for stride, size in dict.fromkeys(zip(group.stride.tolist(), group.size.tolist(), strict=True)):
            alike = (group.stride == stride) & (group.size == size)
            from_base, from_offset, lengths = _joined(ids * stride, places + block_in_chunk * size, size)
            on_device.append((group.base[alike, None] + from_base).ravel())
            on_host.append((group.offset[alike, None] + from_offset).ravel())
            sizes.append(np.tile(lengths, int(alike.sum())))
        block_at += block_count
        slot_at += slot_count
    ends = (np.concatenate(on_device), np.concatenate(on_host))
    source, target = ends if direction is Direction.STORE else ends[::-1]
    return CopyPlan(source, target, np.concatenate(sizes))


def _joined(one: np.ndarray, other: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join pieces of ``size`` bytes that follow one another on both sides; returns begins, begins, bytes."""
    begins = np.ones(len(one), dtype=bool)
    begins[1:] = (one[1:] != one[:-1] + size) | (other[1:] != other[:-1] + size)
    first = np.flatnonzero(begins)
    return one[first], other[first], np.diff(first, append=len(one)) * size
