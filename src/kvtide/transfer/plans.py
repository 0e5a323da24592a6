"""Every address of a copy: block ids on one side, slots on the other, pieces out.

Pieces that follow one another on both sides become one: below about 256 KiB a piece, the cost of a copy
is its beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec
from kvtide.transfer.region import GroupRegions


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
    on_device, on_host, sizes = [], [], []
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
        # Region after region: along blocks both sides may be contiguous, across regions never.
        on_device.append((group.base[:, None] + ids * group.stride[:, None]).ravel())
        on_host.append((places + group.offset[:, None] + block_in_chunk * group.size[:, None]).ravel())
        sizes.append(np.repeat(group.size, block_count))
        block_at += block_count
        slot_at += slot_count
    ends = (np.concatenate(on_device), np.concatenate(on_host))
    source, target = ends if direction is Direction.STORE else ends[::-1]
    return merged(CopyPlan(source, target, np.concatenate(sizes)))


def merged(plan: CopyPlan) -> CopyPlan:
    """Join pieces that follow one another on both sides."""
    if len(plan.size) < 2:
        return plan
    begins = np.ones(len(plan.size), dtype=bool)
    begins[1:] = (plan.source[1:] != plan.source[:-1] + plan.size[:-1]) | (
        plan.target[1:] != plan.target[:-1] + plan.size[:-1]
    )
    first = np.flatnonzero(begins)
    return CopyPlan(plan.source[first], plan.target[first], np.add.reduceat(plan.size, first))
