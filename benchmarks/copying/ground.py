"""The memory on both sides, and copies of pieces between scattered places of it.

The device is a torch tensor, as vLLM's is; the host a ``HostPool``. Both are touched before anything is
measured. Knows places and bytes; does not know clocks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.copying.vocabulary import RUN_BLOCKS, STORE
from benchmarks.frame.registry import UnfitError
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId, ids
from kvtide.transfer.cores import CopyCores
from kvtide.transfer.devices import CPUCopier
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import GroupRegions

SLOT_BYTES = 4096  # a chunk takes several of them: so one pool does for chunks of all sizes
READY_S = 120.0
COMPARED_BYTES = 16 << 20
JOB = JobId(1)


class Ground:
    """Device and host memory, twice as much as a copy takes: every other place stays free.

    Args:
        copy_bytes: Bytes of one copy.
        cores: Who copies.
    """

    def __init__(self, copy_bytes: int, cores: CopyCores) -> None:
        self.cores = cores
        self._tensor = torch.zeros(2 * copy_bytes, dtype=torch.uint8)
        self.device = self._tensor.numpy()
        self.pool = HostPool(2 * copy_bytes // SLOT_BYTES, SLOT_BYTES)
        if not self.pool.await_slots(self.pool.slot_count, READY_S):
            raise UnfitError(f"the machine did not give {2 * copy_bytes >> 20} MiB of host memory")
        self.host = self.pool.view

    def fill(self, view: np.ndarray, seed: int) -> None:
        """Write words of which no two are alike."""
        words = view.view(np.uint64)
        step = COMPARED_BYTES // 8
        factor = np.uint64(2 * seed + 0x9E3779B97F4A7C15)  # odd: words that differ stay different
        for begin in range(0, len(words), step):
            part = words[begin : begin + step]
            np.multiply(np.arange(begin, begin + len(part), dtype=np.uint64), factor, out=part)

    def close(self) -> None:
        """Give the host memory back."""
        self.pool.close()


@dataclass(frozen=True, slots=True)
class Places:
    """Where the blocks of a copy lie: ``int64[blocks]`` each, among twice as many."""

    on_device: np.ndarray
    on_host: np.ndarray


def scattered(count: int, seed: int) -> Places:
    """Draw places of which no two are neighbours, on either side."""
    chance = np.random.default_rng(seed)
    return Places(*(2 * chance.permutation(count).astype(np.int64) + 1 for _ in range(2)))


def in_runs(count: int, seed: int) -> Places:
    """Draw runs of neighbours, the same on both sides; the runs are no neighbours."""
    run = min(RUN_BLOCKS, count)
    places = scattered(count // run, seed)
    steps = np.arange(run)
    return Places(*((side[:, None] * run + steps).ravel() for side in (places.on_device, places.on_host)))


class PieceCopy:
    """Copies between places, through the handler and copier that production has.

    Args:
        ground: The memory.
        direction: ``STORE`` or ``LOAD``.
        piece_bytes: Of one block in one layer.
        layers: Pieces of a block; layer after layer on the device, together in a slot.
        places: Of the blocks.
    """

    def __init__(self, ground: Ground, direction: str, piece_bytes: int, layers: int, places: Places) -> None:
        self._ground = ground
        self._shape = (layers, piece_bytes)
        self._places = places
        self._is_store = direction == STORE
        count = len(places.on_device)
        row = np.arange(layers, dtype=np.int64)
        sizes = np.full(layers, piece_bytes, dtype=np.int64)
        base = ground.device.ctypes.data + row * (2 * count * piece_bytes)
        regions = GroupRegions(base, sizes, sizes, row * piece_bytes, 1)
        device = GPULoadStoreSpec(ids(places.on_device.tolist()), (count,), (0,))
        slots = places.on_host * (layers * piece_bytes // SLOT_BYTES)
        host = CPULoadStoreSpec(ids(slots.tolist()), (count,))
        self._hop = Hop(device, host) if self._is_store else Hop(host, device)
        copier = CPUCopier("bench", ground.cores.thread_count, ground.cores.cores)
        way = Direction.STORE if self._is_store else Direction.LOAD
        self._handler = SingleDirectionOffloadingHandler(way, [regions], ground.pool, copier)
        self.byte_count = count * layers * piece_bytes

    def run(self) -> None:
        """Copy, and wait for the end.

        Raises:
            UnfitError: Not every byte was copied.
        """
        self._handler.transfer_async(JOB, self._hop, 60.0)
        ended = self._handler.wait([JOB], 60.0)
        outcomes = self._handler.get_finished()
        if not ended or [(one.success, one.byte_count) for one in outcomes] != [(True, self.byte_count)]:
            raise UnfitError(f"a copy ended as {outcomes}")

    def wrong_bytes(self, seed: int) -> int:
        """Copy fresh words into zeroed memory, and count the bytes that are not where they belong."""
        ground = self._ground
        source, target = (ground.device, ground.host) if self._is_store else (ground.host, ground.device)
        ground.fill(source, seed)
        target[:] = 0
        self.run()
        layers, piece_bytes = self._shape
        count = len(self._places.on_device)
        used = 2 * count * layers * piece_bytes
        device = ground.device[:used].reshape(layers, 2 * count, piece_bytes)
        host = ground.host[:used].reshape(2 * count, layers, piece_bytes)
        step = max(1, COMPARED_BYTES // piece_bytes)
        wrong = written = 0
        for layer in range(layers):
            for begin in range(0, count, step):
                part = slice(begin, begin + step)
                one = device[layer, self._places.on_device[part]]
                other = host[self._places.on_host[part], layer]
                wrong += int(np.count_nonzero(one != other))
                written += int(np.count_nonzero(other if self._is_store else one))
        # Where nobody asked for anything, there are still zeros.
        return wrong + int(np.count_nonzero(target)) - written

    def close(self) -> None:
        """End the thread."""
        self._handler.close()
