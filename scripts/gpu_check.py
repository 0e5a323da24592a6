#!/usr/bin/env python3
"""Try the CUDA copier on one device: whether the bytes are right, how fast they are, and what asking costs.

``scripts/gpu_check.py --json FILE`` with torch, triton and cuda-bindings (which torch brings) beside
kvtide's own sources; no vLLM. Takes about a minute, most of it for comparing bytes, and 3 GiB on either side.

Ends with 0 when every byte was right, 1 when not, 3 where there is no device to try.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from kvtide.jobs import COPIES, CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId, ids
from kvtide.transfer.cuda import CudaCopier
from kvtide.transfer.cuda_bound import device_count
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.transfer.cuda_devices import current_device
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.plans import CopyPlan
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import group_regions, layer_views

NO_DEVICE = 3
LIMIT_S = 30.0
"""For one copy; one that takes longer has failed."""

PAGES = (1_000, 4 << 10, 12 << 10, 24 << 10, 32 << 10, 64 << 10, 360 << 10)
"""Bytes of a layer's block in the round trips; the first is no multiple of 16."""

PIECES = tuple(4096 << power for power in range(13))  # 4 KiB to 16 MiB
POISON = 0xA5


class WrongBytesError(Exception):
    """Bytes are not what they should be."""


@dataclass
class Bench:
    """A device to try, or a double of one.

    Attributes:
        device: Of the copiers.
        allocate: Device memory, ``uint8[n]``.
        settle: Waits for all that was submitted to the current stream.
    """

    device: CudaDevice
    allocate: Callable[[int], torch.Tensor]
    settle: Callable[[], None]
    copiers: dict[Direction, CudaCopier] = field(init=False)
    jobs: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.copiers = {direction: CudaCopier(direction, self.device) for direction in COPIES}
        self.jobs = iter(range(1 << 30))

    def done(self, directions: Sequence[Direction], job_ids: Sequence[JobId]) -> None:
        """Wait for copies; one that has not ended well ends the try."""
        for direction in directions:
            if not self.copiers[direction].wait(job_ids, LIMIT_S):
                raise WrongBytesError(f"a {direction.value} has not ended after {LIMIT_S:g} s")
            if not all(outcome.success for outcome in self.copiers[direction].poll()):
                raise WrongBytesError(f"a {direction.value} has failed")


# -- are the bytes right -------------------------------------------------------------------------------


def layers_of(bench: Bench, page_bytes: int, layers: int, blocks: int, packed: bool) -> torch.Tensor:
    """Device memory as ``[layers, blocks, page_bytes]``; packed: all layers of a block lie side by side."""
    memory = bench.allocate(layers * blocks * page_bytes)
    if packed:
        return memory.view(blocks, layers, page_bytes).transpose(0, 1)
    return memory.view(layers, blocks, page_bytes)


def round_trip(bench: Bench, page_bytes: int, packed: bool, seed: int, chunks: int = 24) -> int:
    """Store random blocks, then load them elsewhere while others are stored; compare all memory.

    Returns:
        Bytes that were compared.

    Raises:
        WrongBytesError: Some were wrong.
    """
    noise = np.random.default_rng(seed)
    layers, per_chunk = 4, 3
    blocks = 4 * chunks * per_chunk
    kv = layers_of(bench, page_bytes, layers, blocks, packed)
    kv.copy_(torch.from_numpy(noise.integers(0, 256, tuple(kv.shape), dtype=np.uint8)))
    expected = kv.cpu().numpy().copy()
    caches = {str(layer): kv[layer] for layer in range(layers)}
    regions = [group_regions(layer_views(caches, list(caches), blocks), per_chunk)]
    pool = HostPool(2 * chunks, regions[0].chunk_bytes, registrar=bench.device)
    if not pool.await_slots(2 * chunks, LIMIT_S):
        raise WrongBytesError("host memory could not be registered")
    pool.view[:] = POISON
    shuffled = noise.permutation(blocks).reshape(4, -1)
    slots = noise.permutation(2 * chunks).reshape(2, -1)
    handlers = {
        direction: SingleDirectionOffloadingHandler(direction, regions, pool, bench.copiers[direction])
        for direction in COPIES
    }

    def begin(direction: Direction, block_ids: np.ndarray, where: np.ndarray) -> JobId:
        on_device = GPULoadStoreSpec(ids(block_ids.tolist()), (len(block_ids),), (0,))
        host = CPULoadStoreSpec(ids(where.tolist()), (len(where),))
        hop = Hop(on_device, host) if direction is Direction.STORE else Hop(host, on_device)
        job_id = JobId(next(bench.jobs))
        handlers[direction].transfer_async(job_id, hop, LIMIT_S)
        return job_id

    for handler in handlers.values():
        handler.forward_ended()
    first = begin(Direction.STORE, shuffled[0], slots[0])
    bench.done(COPIES, [first])
    # The targets are poisoned on the engine's stream a moment before: the load has to come after that.
    kv[:, torch.from_numpy(shuffled[1]).to(kv.device)] = POISON
    load = begin(Direction.LOAD, shuffled[1], slots[0])
    second = begin(Direction.STORE, shuffled[2], slots[1])
    bench.done(COPIES, [load, second])
    bench.settle()
    expected[:, shuffled[1]] = expected[:, shuffled[0]]
    wrong = int((kv.cpu().numpy() != expected).sum())
    stored = np.concatenate([shuffled[0], shuffled[2]]).reshape(-1, per_chunk)
    host = pool.view.reshape(2 * chunks, -1)[np.concatenate([slots[0], slots[1]])]
    order = (1, 2, 0, 3) if packed else (1, 0, 2, 3)  # a slot holds region after region, block after block
    content = expected[:, stored].transpose(order).reshape(2 * chunks, -1)
    wrong += int((host != content).sum())
    pool.close()
    if wrong:
        raise WrongBytesError(
            f"pages of {page_bytes} bytes, packed {packed}, seed {seed}: {wrong} wrong bytes"
        )
    return int(expected.size + host.size)


# -- how fast ------------------------------------------------------------------------------------------


@dataclass
class Field:
    """Memory on both sides, to copy between in pieces.

    Attributes:
        on_device: Address of ``byte_count`` bytes of device memory.
        on_host: The same of registered host memory.
    """

    on_device: int
    on_host: int
    byte_count: int

    def plan(self, direction: Direction, piece_bytes: int, seed: int) -> CopyPlan:
        """The half of the memory that is the direction's, in pieces, in any order on both sides."""
        count = self.byte_count // 2 // piece_bytes
        begin = self.byte_count // 2 if direction is Direction.LOAD else 0
        noise = np.random.default_rng(seed)
        device, host = (
            base + begin + noise.permutation(count).astype(np.int64) * piece_bytes
            for base in (self.on_device, self.on_host)
        )
        source, target = (device, host) if direction is Direction.STORE else (host, device)
        return CopyPlan(source, target, np.full(count, piece_bytes, dtype=np.int64))


def timed(bench: Bench, plans: dict[Direction, CopyPlan], tries: int = 3) -> tuple[float, float]:
    """Copy; the best of some tries.

    Returns:
        GB/s of all bytes together, and microseconds of the calling thread for a piece while it asks.
    """
    best_s = ask_s = float("inf")
    byte_count = sum(plan.byte_count for plan in plans.values())
    piece_count = sum(len(plan.size) for plan in plans.values())
    for _ in range(1 + tries):
        bench.settle()
        began_s = time.perf_counter()
        job_ids = []
        for direction, plan in plans.items():
            job_ids.append(JobId(next(bench.jobs)))
            bench.copiers[direction].submit(job_ids[-1], plan, LIMIT_S)
        asked_s = time.perf_counter()
        bench.done(tuple(plans), job_ids)
        best_s = min(best_s, time.perf_counter() - began_s)
        ask_s = min(ask_s, asked_s - began_s)
    return byte_count / best_s / 1e9, ask_s / piece_count * 1e6


def speeds(bench: Bench, field_: Field, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """GB/s by size of piece: as the copier chooses, either way alone, and both directions at once."""
    chosen = dict(bench.device.engine_from_bytes)
    rows = []
    for size in sizes:
        row: dict[str, Any] = {"piece_bytes": size}
        plans = {direction: field_.plan(direction, size, size) for direction in COPIES}
        for direction in COPIES:
            one = {direction: plans[direction]}
            row[direction.value], row[f"{direction.value} us/piece"] = timed(bench, one)
            for way, from_bytes in (("engine", 0), ("kernel", size + 1)):
                bench.device.engine_from_bytes = dict.fromkeys(Direction, from_bytes)
                row[f"{direction.value} {way}"], row[f"{direction.value} {way} us/piece"] = timed(bench, one)
            bench.device.engine_from_bytes = dict(chosen)
        row["both"], _ = timed(bench, plans)
        rows.append(row)
    return rows


def whole(bench: Bench, field_: Field) -> dict[str, float]:
    """GB/s of the same bytes in as few pieces as registrations allow: what the others are held against."""
    half = field_.byte_count // 2
    plans = {direction: field_.plan(direction, half, 0) for direction in COPIES}
    figures = {direction.value: timed(bench, {direction: plans[direction]})[0] for direction in COPIES}
    return figures | {"both": timed(bench, plans)[0]}


# -- what is printed -----------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]], reference: dict[str, float]) -> str:
    """One line a size: GB/s, and the share of one large copy."""
    lines = [
        f"{'piece':>9}" + "".join(f"{name:>24}" for name in ("store GB/s", "load GB/s", "both GB/s")),
        f"{'one copy':>9}"
        + "".join(f"{reference[name]:>17.2f}       " for name in ("store", "load", "both")),
    ]
    for row in rows:
        shares = "".join(
            f"{row[name]:>17.2f} ({row[name] / reference[name]:.2f})" for name in ("store", "load", "both")
        )
        ways = ", ".join(
            f"{name} {way} {row[f'{name} {way}']:.1f} GB/s {row[f'{name} {way} us/piece']:.2f} us"
            for name in ("store", "load")
            for way in ("engine", "kernel")
        )
        lines.append(f"{row['piece_bytes'] >> 10:>5} KiB{shares}   {ways}")
    return "\n".join(lines)


def check(
    bench: Bench, field_: Field, sizes: Sequence[int], pages: Sequence[int], seed: int, chunks: int = 24
) -> dict[str, Any]:
    """All of it; the results."""
    began_s = time.monotonic()
    compared = 0
    chosen = dict(bench.device.engine_from_bytes)
    for number, from_bytes in enumerate(
        (None, 0, 1 << 30)
    ):  # as measured, the engine alone, the kernel alone
        if from_bytes is not None:
            bench.device.engine_from_bytes = dict.fromkeys(Direction, from_bytes)
        for page_bytes in pages:
            for packed in (False, True):
                compared += round_trip(bench, page_bytes, packed, seed + number, chunks)
        print(f"{compared} bytes compared, all right", file=sys.stderr)
    bench.device.engine_from_bytes = chosen
    return {
        "compared_bytes": compared,
        "engine_from_bytes": {direction.value: chosen[direction] for direction in COPIES},
        "whole": whole(bench, field_),
        "pieces": speeds(bench, field_, sizes),
        "wall_s": time.monotonic() - began_s,
    }


def try_device(field_bytes: int, seed: int) -> dict[str, Any]:
    """Try the current device."""
    device = current_device()
    bench = Bench(
        device,
        lambda count: torch.zeros(count, dtype=torch.uint8, device="cuda"),
        torch.cuda.synchronize,
    )
    pool = HostPool(field_bytes >> 20, 1 << 20, registrar=device)
    if not pool.await_slots(pool.slot_count, LIMIT_S):
        raise WrongBytesError("host memory could not be registered")
    memory = bench.allocate(field_bytes)
    field_ = Field(memory.data_ptr(), pool.address, field_bytes)
    results = check(bench, field_, PIECES, PAGES, seed)
    for copier in bench.copiers.values():
        copier.close()
    pool.close()
    return results | {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "seed": seed,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument(
        "--mib", type=int, default=1024, help="MiB of the field that is copied (default 1024)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.mib < 64:
        parser.error(f"--mib {args.mib}: give at least 64, so that every size of piece has several pieces")
    if not device_count():
        print("no CUDA device can be used here: nothing was checked", file=sys.stderr)
        return NO_DEVICE
    try:
        results = try_device(args.mib << 20, args.seed)
    except WrongBytesError as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return 1
    print(table(results["pieces"], results["whole"]))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
