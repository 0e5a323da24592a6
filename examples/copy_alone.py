"""The copies alone: blocks out to host memory and back, without vLLM.

    python examples/copy_alone.py

A handler takes block ids on one side and slots on the other, works out every address and has a copier do
the rest in a thread of its own. Here the "device" is memory that numpy owns; an engine's KV tensors are
registered in the same way, and nothing is copied to do so.
"""

import numpy as np
import torch

from kvtide import (
    CPUCopier,
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    Hop,
    HostPool,
    SingleDirectionOffloadingHandler,
    group_regions,
    layer_views,
)

BLOCKS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM = 16, 2, 32, 64
BLOCKS_PER_CHUNK = 2
LAYERS = ("layer 0", "layer 1", "layer 2")


def main() -> None:
    draw = np.random.default_rng(0)
    shape = (BLOCKS, HEADS, TOKENS_PER_BLOCK, HEAD_DIM)
    arrays = {name: draw.standard_normal(shape, dtype=np.float32) for name in LAYERS}
    kv_caches = {name: torch.from_numpy(array) for name, array in arrays.items()}

    # Where a block of each layer lies, and where it goes in a slot.
    groups = [group_regions(layer_views(kv_caches, LAYERS, BLOCKS), BLOCKS_PER_CHUNK)]
    slot_bytes = groups[0].chunk_bytes
    pool = HostPool(slot_count=8, slot_bytes=slot_bytes, prefault=False)
    store = SingleDirectionOffloadingHandler(Direction.STORE, groups, pool, CPUCopier("store"))
    load = SingleDirectionOffloadingHandler(Direction.LOAD, groups, pool, CPUCopier("load"))

    # Four blocks of a request are two chunks; they go to slots 5 and 6.
    written = GPULoadStoreSpec(block_ids=(3, 9, 4, 12), group_sizes=(4,), block_indices=(0,))
    slots = CPULoadStoreSpec(slots=(5, 6), group_sizes=(2,))
    store.transfer_async(0, Hop(written, slots), deadline_s=10)
    assert store.wait([0], timeout_s=10)
    (outcome,) = store.get_finished()
    print(f"stored {outcome.byte_count} bytes: {outcome.success}")

    before = {name: array[[3, 9, 4, 12]].copy() for name, array in arrays.items()}
    for array in arrays.values():
        array[[3, 9, 4, 12]] = 0  # the engine has given these blocks to somebody else

    # Back into other blocks. The reader has the first one already: block 1 of the request comes first, from
    # the second half of slot 5.
    wanted = GPULoadStoreSpec(block_ids=(7, 1, 2), group_sizes=(3,), block_indices=(1,))
    load.transfer_async(1, Hop(slots, wanted), deadline_s=10)
    assert load.wait([1], timeout_s=10)
    (outcome,) = load.get_finished()
    same = all((array[[7, 1, 2]] == before[name][1:]).all() for name, array in arrays.items())
    print(f"loaded {outcome.byte_count} bytes: {outcome.success}; the very same: {same}")

    for part in (store, load, pool):
        part.close()
    if not same:
        raise SystemExit("what came back is not what was stored")


if __name__ == "__main__":
    main()
