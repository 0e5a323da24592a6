"""One round trip of random bytes through the real copy path, before the engine trusts it.

The bytes are written and read through the engine's own tensors, not through the addresses under test: a
stride that was misread shows up as bytes in the wrong place.
"""

import time
from collections.abc import Mapping, Sequence

import torch

from kvtide.errors import LayoutError
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId, ids
from kvtide.transfer.handler import SingleDirectionOffloadingHandler

TIMEOUT_S = 30.0


def round_trip(
    kv_caches: Mapping[str, torch.Tensor],
    group_layers: Sequence[Sequence[str]],
    num_blocks: int,
    blocks_per_chunk: Sequence[int],
    store: SingleDirectionOffloadingHandler,
    load: SingleDirectionOffloadingHandler,
) -> None:
    """Store a chunk of random blocks, load it elsewhere, compare, and put back what was there.

    Args:
        kv_caches: The engine's tensors by layer, all zero or not.
        group_layers: Layer names per KV cache group.
        num_blocks: Logical blocks.
        blocks_per_chunk: Blocks of one chunk, per KV cache group.
        store: Device to host, its slot 0 unused.
        load: Host to device.

    Raises:
        LayoutError: Bytes did not come back, or came to another place.
    """
    for group_index, names in enumerate(group_layers):
        count = min(blocks_per_chunk[group_index], (num_blocks - 1) // 2)
        if count < 1:
            return
        # Not neighbours, and not block 0, which the engine keeps as its placeholder.
        sources = list(range(1, 1 + count))
        targets = list(range(num_blocks - count, num_blocks))
        beside = {0, count + 1, num_blocks - count - 1}
        watched = sorted({*sources, *targets, *beside})
        views = {
            (name, block): _block(kv_caches[name], block, num_blocks) for name in names for block in watched
        }
        saved = {key: view.clone() for key, view in views.items()}
        try:
            expected = dict(saved)
            for name in names:
                for source, target in zip(sources, targets, strict=True):
                    expected[name, source] = expected[name, target] = _randomise(views[name, source])
            _copy_chunk(store, load, sources, targets, group_index, len(group_layers))
            for (name, block), view in views.items():
                if not torch.equal(_bytes(expected[name, block]), _bytes(view)):
                    raise LayoutError(
                        f"layer {name}: shape {tuple(kv_caches[name].shape)}, strides"
                        f" {kv_caches[name].stride()}: after a test chunk was stored and loaded again, block"
                        f" {block} does not hold the bytes it should"
                    )
        finally:
            for key, view in views.items():
                view.copy_(saved[key])


def _copy_chunk(
    store: SingleDirectionOffloadingHandler,
    load: SingleDirectionOffloadingHandler,
    sources: list[int],
    targets: list[int],
    group_index: int,
    group_count: int,
) -> None:
    def sizes(count: int) -> tuple[int, ...]:
        return tuple(count if group == group_index else 0 for group in range(group_count))

    host = CPULoadStoreSpec(ids((0,)), sizes(1))
    for handler, blocks in ((store, sources), (load, targets)):
        device = GPULoadStoreSpec(ids(blocks), sizes(len(blocks)), (0,) * group_count)
        storing = handler.direction is Direction.STORE
        job_id = JobId(-1 - storing)
        handler.forward_ended()  # what was written on the device's stream so far comes first
        handler.transfer_async(job_id, Hop(device, host) if storing else Hop(host, device), TIMEOUT_S)
        deadline_s = time.monotonic() + TIMEOUT_S
        handler.wait({job_id}, TIMEOUT_S)
        outcomes = handler.get_finished()
        while not outcomes and time.monotonic() < deadline_s:
            outcomes = handler.get_finished()
        if not all(outcome.success for outcome in outcomes) or not outcomes:
            raise LayoutError(f"the {handler.direction.value} of a test chunk did not end well")


def _block(tensor: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    kernel_blocks = tensor.shape[0] // num_blocks
    return tensor[block * kernel_blocks : (block + 1) * kernel_blocks]


def _randomise(view: torch.Tensor) -> torch.Tensor:
    noise = torch.randint(0, 256, (view.numel() * view.element_size(),), dtype=torch.uint8)
    content = noise.view(view.dtype).reshape(view.shape).to(view.device)
    view.copy_(content)
    return content


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
