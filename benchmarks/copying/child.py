"""The process in which the arms take turns.

Size by size and direction by direction, a few rounds at a time and then again from the beginning, so that no
size has one minute of the machine to itself. Knows turns and clocks; what is copied is in ``ground``.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.copying import plain
from benchmarks.copying.ground import Ground, PieceCopy, in_runs, scattered
from benchmarks.copying.vocabulary import (
    DIRECTIONS,
    LOAD,
    MERGED,
    OURS,
    PLAIN,
    SUBMIT,
    arms_of,
    block_count,
    byte_count,
    layers_of,
    size_name,
)
from benchmarks.frame.children import Tell
from benchmarks.frame.machine import Bystanders, wait_quiet
from benchmarks.frame.registry import UnfitError
from benchmarks.frame.rounds import rounds
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId, ids
from kvtide.testing import HeldDevice
from kvtide.transfer.cores import copy_cores
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import GroupRegions

Arm = Callable[[], object]

LEAST_PASSES = 2
WAIT_LIMIT_S = 2.0  # for quiet, before each pass
SEED = 7


def measure_copies(
    tell: Tell, sizes: Sequence[int], copy_bytes: int, pass_count: int, block_rounds: int, limit_s: float
) -> list[dict[str, Any]]:
    """Take all samples.

    Args:
        tell: Is told before each size of each pass.
        sizes: Bytes of a piece.
        copy_bytes: Of one copy, about.
        pass_count: How often each size has its turn.
        block_rounds: Rounds of a turn.
        limit_s: No pass but the first two begins later than this: on a busy machine what there is has to do.
    """
    cores = copy_cores(0, torch.get_num_threads(), 1)
    ground = Ground(copy_bytes, cores)
    samples: list[dict[str, Any]] = []
    with ThreadPoolExecutor(cores.thread_count) as threads:
        began_s = time.monotonic()
        for index in range(pass_count):
            if index >= LEAST_PASSES and time.monotonic() - began_s > limit_s:
                break
            wait_quiet(WAIT_LIMIT_S)
            for size in sizes:
                tell(f"pieces of {size_name(size)}, pass {index + 1} of {pass_count}")
                for direction in DIRECTIONS:
                    with _arms(ground, threads, size, direction, copy_bytes, check=index == 0) as arms:
                        found = _turn(arms, index * block_rounds, block_rounds)
                    about = {
                        "what": direction,
                        "piece_bytes": size,
                        "threads": cores.thread_count,
                        "byte_count": byte_count(size, copy_bytes),
                    }
                    samples += [about | one for one in found]
    ground.close()
    return samples


@contextmanager
def _arms(
    ground: Ground, threads: ThreadPoolExecutor, size: int, direction: str, copy_bytes: int, check: bool
) -> Iterator[dict[str, Arm]]:
    """Make the arms; the first time, all they copy is looked at."""
    blocks = block_count(size, copy_bytes)
    copies = {OURS: PieceCopy(ground, direction, size, layers_of(size), scattered(blocks, SEED))}
    if MERGED in arms_of(size):
        whole = blocks * layers_of(size)  # one layer: of more, blocks are no neighbours in their slots
        copies[MERGED] = PieceCopy(ground, direction, size, 1, in_runs(whole, SEED))
    ends = (ground.device.ctypes.data, ground.host.ctypes.data)
    source, target = ends[::-1] if direction == LOAD else ends
    total = byte_count(size, copy_bytes)
    arms: dict[str, Arm] = {arm: copy.run for arm, copy in copies.items()}
    arms[PLAIN] = lambda: plain.copy(threads, target, source, total)
    for arm, copy in copies.items():
        wrong = copy.wrong_bytes(SEED) if check else copy.run()
        if wrong:
            raise UnfitError(
                f"{direction}, {size_name(size)}, {arm}: {wrong} bytes are not where they belong"
            )
    arms[PLAIN]()
    yield {arm: arms[arm] for arm in arms_of(size)}
    for copy in copies.values():
        copy.close()


def _turn(arms: dict[str, Arm], first_round: int, count: int) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    with Bystanders() as bystanders:
        for index, order in rounds(list(arms), count):
            for arm in order:
                began_s = time.perf_counter()
                arms[arm]()
                samples.append(
                    {"round": first_round + index, "arm": arm, "wall_s": time.perf_counter() - began_s}
                )
    # One copy is too short for the clock that counts processor time; a turn is not.
    about = {"others_cores": bystanders.others_cores, "stolen_cores": bystanders.stolen_cores}
    return [one | about for one in samples]


def measure_submission(tell: Tell, chunk_count: int, layers: int, count: int) -> list[dict[str, Any]]:
    """Measure what handing over a copy costs whoever does: no byte is copied.

    Args:
        tell: Is told once.
        chunk_count: Chunks of one block, scattered on both sides.
        layers: Pieces of each.
        count: Samples.
    """
    tell("submission")
    page = 24_576
    row = np.arange(layers, dtype=np.int64)
    sizes = np.full(layers, page, dtype=np.int64)
    regions = GroupRegions(row * 4 * chunk_count * page, sizes, sizes, row * page, 1)
    pool = HostPool(1, page, prefault=False)
    held = HeldDevice(Direction.LOAD)
    handler = SingleDirectionOffloadingHandler(Direction.LOAD, [regions], pool, held)
    places = scattered(chunk_count, SEED)
    device = GPULoadStoreSpec(ids(places.on_device.tolist()), (chunk_count,), (0,))
    hop = Hop(CPULoadStoreSpec(ids(places.on_host.tolist()), (chunk_count,)), device)
    samples = []
    for index in range(count):
        began_s = time.perf_counter()
        handler.transfer_async(JobId(index), hop, 60.0)
        samples.append(
            {
                "what": SUBMIT,
                "round": index,
                "wall_s": time.perf_counter() - began_s,
                "chunks": chunk_count,
                "layers": layers,
            }
        )
        held.fail()
    return samples
