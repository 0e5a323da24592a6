"""From which size of piece on the copy engine is the faster way, found by trying at start.

Waits for the device: for the start only. What it measures is kept by whoever asked, for the life of the
process.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtide.jobs import Direction
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.transfer.cuda_runtime import CudaError, CudaRuntime, Event, Stream
from kvtide.transfer.plans import CopyPlan

SIZES = (4 << 10, 8 << 10, 16 << 10, 24 << 10, 32 << 10, 48 << 10, 64 << 10, 96 << 10)
"""Of pieces, in bytes; what is larger goes by the engine in any case."""

SCRATCH_BYTES = 16 << 20
"""On either side; pieces lie in every other place of their size, so that none follow one another."""

TRIES = 3
"""Of which the fastest counts."""

KERNEL_COSTS = 1.25
"""So much faster has the kernel to be: it runs on processors that the model would use."""

LIMIT_S = 10.0
"""For one try; compiling comes before."""


class ProbedRuntime(CudaRuntime, Protocol):
    """A runtime that can lend memory of the device."""

    def device_memory(self, byte_count: int) -> AbstractContextManager[int]:
        """Take device memory for a while; its address."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Seconds for the same pieces either way."""

    engine_s: float
    kernel_s: float


def engine_from_bytes(measured: Mapping[int, Ways]) -> int:
    """Choose the size from which on pieces go by the engine.

    Args:
        measured: By size of piece, in bytes.

    Returns:
        The smallest size at which, and at all larger ones, the kernel is not ``KERNEL_COSTS`` times as fast.
        If it still is at the largest, the next byte.
    """
    chosen = max(measured) + 1
    for size in sorted(measured, reverse=True):
        ways = measured[size]
        if ways.kernel_s * KERNEL_COSTS < ways.engine_s:
            break
        chosen = size
    return chosen


def measure_ways(
    runtime: ProbedRuntime,
    device: CudaDevice,
    direction: Direction,
    host_address: int,
    sizes: Sequence[int] = SIZES,
    scratch_bytes: int = SCRATCH_BYTES,
) -> dict[int, Ways]:
    """Copy the same bytes in pieces of each size, either way.

    Args:
        runtime: Of the device.
        device: Lends tables.
        direction: Which way.
        host_address: Of ``scratch_bytes`` of registered memory; overwritten.
        sizes: Of pieces, in bytes.
        scratch_bytes: How much of either memory is used.

    Raises:
        CudaError: Something cannot be had; nothing is under way.
        RuntimeError: What was submitted does not end, so that its memory cannot be given back either.
    """
    stream = runtime.new_stream(urgent=False)
    events = [runtime.new_event(), runtime.new_event()]
    measured = {}
    refused = None
    with runtime.device_memory(scratch_bytes) as device_address:
        try:
            for size in sizes:
                at = np.arange(0, scratch_bytes - size + 1, 2 * size, dtype=np.int64)[:1024]
                ends = (device_address + at, host_address + at)
                source, target = ends if direction is Direction.STORE else ends[::-1]
                plan = CopyPlan(source, target, np.full(len(at), size, dtype=np.int64))
                measured[size] = _both_ways(runtime, device, stream, events, plan)
        except CudaError as error:
            refused = error
            # Nobody else may be given memory that a copy still writes into.
            _drain(runtime, stream, events[1])
    runtime.drop([stream], events)
    if refused is not None:
        raise refused
    return measured


def _both_ways(
    runtime: CudaRuntime, device: CudaDevice, stream: Stream, events: list[Event], plan: CopyPlan
) -> Ways:
    index, table = device.take_table(plan)
    best_s = [float("inf"), float("inf")]
    begin, end = events
    for attempt in range(1 + TRIES):
        for way in range(2):
            runtime.record(begin, stream)
            if way == 0:
                runtime.copy_pieces(plan, stream)
            else:
                runtime.move_pieces(table, len(plan.size), True, stream)
            runtime.record(end, stream)
            _await(runtime, end)
            if attempt:  # the first one compiles, and touches everything for the first time
                best_s[way] = min(best_s[way], runtime.elapsed_s(begin, end))
    device.free_table(index)
    return Ways(*best_s)


def _drain(runtime: CudaRuntime, stream: Stream, event: Event) -> None:
    try:
        runtime.record(event, stream)
        _await(runtime, event)
    except CudaError as error:
        raise RuntimeError(f"the device does not end what it was given: {error}") from error


def _await(runtime: CudaRuntime, event: Event) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not runtime.has_ended(event):
        if time.monotonic() > until_s:
            raise CudaError("a trial copy", f"has not ended after {LIMIT_S:g} s")
        time.sleep(0)
