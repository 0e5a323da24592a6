"""Whether what lies in host memory, or below it, is what its names demand, whoever may load it or not.

Each chunk that can be read is laid out on the device for a moment, as a load would, so that the oracle
judges it as it judges the engine's own cache; then the device gets back what it held. The connector says
which chunks those are and where; what they have to be is the oracle's business.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtide.geometry import GroupGeometry
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, ids
from kvtide.manager.cpu import HOST
from kvtide.manager.residency import ABSENT
from kvtide.transfer.engine import OffloadingWorker
from kvtide.transfer.plans import plan_copy
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import LeakError, WrongBytesError
from kvtide.vllm.testing.ranks import own_connector


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of one group, to be looked at.

    Attributes:
        group: The group.
        names: The hash that stands for each.
        memory: Per rank, ``uint8[n]`` in whose slots they are; None for the rank's host pool.
        slots: Where; one after another from the first on without.
    """

    group: GroupGeometry
    names: Sequence[bytes]
    memory: Sequence[np.ndarray] | None = None
    slots: Sequence[int] | None = None


def check_stored(engine: ModelEngine) -> int:
    """Check every chunk that can be read from host memory, on every rank.

    Returns:
        Chunks looked at.

    Raises:
        WrongBytesError: One does not hold what its name stands for.
        LeakError: One is of nobody who has ever asked.
    """
    engine.note_hashes()
    checked = 0
    for group in engine.connector._geometry.groups:
        chunks = list(ready_in(engine, group.group_index, HOST))
        at_once = (engine.shape.num_blocks - 1) // group.blocks_per_chunk
        for begin in range(0, len(chunks), at_once):
            names, slots = zip(*chunks[begin : begin + at_once], strict=True)
            check_bytes(engine, Chunks(group, names, None, slots), "host memory")
        checked += len(chunks)
    return checked


def ready_in(engine: ModelEngine, group_index: int, tier: int) -> Iterator[tuple[bytes, int]]:
    """Name the chunks of a group that a tier has: the hash that stands for each, and its slot."""
    catalog = engine.connector._deciding._manager.catalog
    at = tier * len(engine.connector._geometry.groups) + group_index
    row, have = catalog._slots[at], catalog._have[at]
    for node in catalog.tree.nodes():
        count, entry, width = have[node], catalog.tree.entry[node], catalog.tree.width
        hashes = catalog.tree.hashes(node, 0, count)
        for index in np.flatnonzero(row[entry : entry + count] != ABSENT).tolist():
            yield hashes[index * width : (index + 1) * width], int(row[entry + index])


def check_bytes(engine: ModelEngine, chunks: Chunks, where: str) -> None:
    """Check the bytes of chunks on every rank.

    Raises:
        WrongBytesError: One does not hold what its name stands for.
        LeakError: One is of nobody who has ever asked.
    """
    group, per_chunk = chunks.group, chunks.group.blocks_per_chunk
    for name in chunks.names:
        if not engine.oracle.knows(name):
            raise LeakError(f"{where}, group {group.engine_index}: nobody has asked for {name.hex()}")
    slots = list(range(len(chunks.names)) if chunks.slots is None else chunks.slots)
    with engine.memory.put_back():
        for index, rank in enumerate(engine.ranks):
            worker = own_connector(rank)._worker
            assert worker is not None
            pool = worker._pool
            address = pool.address if chunks.memory is None else chunks.memory[index].ctypes.data
            _lay_out(worker, group.group_index, address, slots, len(slots) * per_chunk)
        for index in range(per_chunk):
            blocks = [(name, 1 + place * per_chunk + index) for place, name in enumerate(chunks.names)]
            tokens_before = (per_chunk - 1 - index) * group.tokens_per_block
            tokens_before += group.lookahead_hashes * group.tokens_per_hash
            try:
                engine.oracle.check_cached(group.engine_index, blocks, tokens_before)
            except WrongBytesError as error:
                # Block 1 is the first of the first slot.
                what = f"{where}, group {group.engine_index}, slots {slots} of {per_chunk} blocks"
                raise WrongBytesError(f"{what}: {error}") from error


def _lay_out(
    worker: OffloadingWorker, group_index: int, address: int, slots: list[int], block_count: int
) -> None:
    """Copy chunks to the device, from block 1 on: block 0 is nobody's."""
    handler: Any = worker._handlers[Direction.LOAD]

    def of_this_group(count: int) -> tuple[int, ...]:
        return tuple(count if index == group_index else 0 for index in range(len(handler._groups)))

    plan = plan_copy(
        handler._groups,
        address,
        handler._pool.slot_bytes,
        GPULoadStoreSpec(ids(range(1, 1 + block_count)), of_this_group(block_count), of_this_group(0)),
        CPULoadStoreSpec(ids(slots), of_this_group(len(slots))),
        Direction.LOAD,
    )
    columns = zip(plan.target.tolist(), plan.source.tolist(), plan.size.tolist(), strict=True)
    for target, source, size in columns:
        ctypes.memmove(target, source, size)
