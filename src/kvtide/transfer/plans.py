"""Every address of a copy: block ids on one side, slots on the other, pieces out.

Pieces that follow one another on both sides become one: below about 256 KiB a piece, the cost of a copy
is its beginning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec
from kvtide.transfer.region import GroupRegions

_NONE = np.zeros(0, dtype=np.int64)

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of pieces: source, target, size; ``int64[pieces]`` each."""


class CopyPlan:
    """Pieces to copy, in order.

    Args:
        source: ``int64[pieces]``, addresses.
        target: ``int64[pieces]``, addresses.
        size: ``int64[pieces]``, bytes.

    Attributes:
        byte_count: Bytes of all pieces.
    """

    __slots__ = ("_columns", "_write_out", "byte_count")

    def __init__(self, source: np.ndarray, target: np.ndarray, size: np.ndarray) -> None:
        self._columns: Columns | None = (source, target, size)
        self._write_out: Callable[[], Columns] | None = None
        self.byte_count = int(size.sum())

    @classmethod
    def later(cls, byte_count: int, write_out: Callable[[], Columns]) -> Self:
        """Make a plan whose columns are written out when somebody looks at them.

        Of a long prefix in a layout of many layers they are megabytes, whose pages alone cost milliseconds
        when they are touched: those of the thread that copies, not of the engine's step.
        """
        plan = cls(_NONE, _NONE, _NONE)
        plan._columns, plan._write_out, plan.byte_count = None, write_out, byte_count
        return plan

    @property
    def columns(self) -> Columns:
        """Source, target and size."""
        if self._columns is None and self._write_out is not None:
            self._columns = self._write_out()
        return self._columns or (_NONE, _NONE, _NONE)

    @property
    def source(self) -> np.ndarray:
        return self.columns[0]

    @property
    def target(self) -> np.ndarray:
        return self.columns[1]

    @property
    def size(self) -> np.ndarray:
        return self.columns[2]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Regions of one stride and size: their pieces lie alike, each from its own begin on.

    Attributes:
        device_base: ``int64[regions]``, addresses.
        device_at: ``int64[pieces]``, from there.
        host_base: ``int64[regions]``, bytes within a slot.
        host_at: ``int64[pieces]``, addresses of slots, and where a block begins in its region.
        size: ``int64[pieces]``, bytes.
    """

    device_base: np.ndarray
    device_at: np.ndarray
    host_base: np.ndarray
    host_at: np.ndarray
    size: np.ndarray

    @property
    def byte_count(self) -> int:
        return len(self.device_base) * int(self.size.sum())


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
    found: list[_Alike] = []
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
        # all regions that are alike, mostly all there are.
        for stride, size in dict.fromkeys(zip(group.stride.tolist(), group.size.tolist(), strict=True)):
            alike = (group.stride == stride) & (group.size == size)
            device_at, host_at, lengths = _joined(ids * stride, places + block_in_chunk * size, size)
            found.append(_Alike(group.base[alike], device_at, group.offset[alike], host_at, lengths))
        block_at += block_count
        slot_at += slot_count
    return CopyPlan.later(sum(one.byte_count for one in found), partial(_written_out, found, direction))


def _written_out(found: Sequence[_Alike], direction: Direction) -> Columns:
    on_device = [(one.device_base[:, None] + one.device_at).ravel() for one in found]
    on_host = [(one.host_base[:, None] + one.host_at).ravel() for one in found]
    sizes = [np.tile(one.size, len(one.device_base)) for one in found]
    device, host, size = (_together(columns) for columns in (on_device, on_host, sizes))
    return (device, host, size) if direction is Direction.STORE else (host, device, size)


def _together(columns: Sequence[np.ndarray]) -> np.ndarray:
    return columns[0] if len(columns) == 1 else np.concatenate([_NONE, *columns])


def _joined(one: np.ndarray, other: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join pieces of ``size`` bytes that follow one another on both sides; returns begins, begins, bytes."""
    begins = np.ones(len(one), dtype=bool)
    begins[1:] = (one[1:] != one[:-1] + size) | (other[1:] != other[:-1] + size)
    first = np.flatnonzero(begins)
    return one[first], other[first], np.diff(first, append=len(one)) * size
