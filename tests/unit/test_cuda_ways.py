"""Which pieces go which way, which copies share bytes, and what is found out at start."""

import itertools
import random

import numpy as np
import pytest
from cuda_world import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.jobs import Direction
from kvtide.testing import LazyCuda
from kvtide.transfer import cuda_device, cuda_ways
from kvtide.transfer.cuda_calibration import KERNEL_COSTS, Ways, engine_from_bytes, measure_ways
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.transfer.cuda_devices import calibrate
from kvtide.transfer.cuda_order import Ranges, Touched
from kvtide.transfer.cuda_ways import FEW_PIECES, PORTION_PIECES, cut_at, portions_of
from kvtide.transfer.plans import CopyPlan
from kvtide.transfer.pool import HostPool

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=8)
PIECES = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(1, 300)), max_size=12)


def ranges(pieces: list[tuple[int, int]]) -> Ranges:
    address, size = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
    return Ranges.of(address, size)


def covered(pieces: list[tuple[int, int]]) -> set[int]:
    return set(itertools.chain.from_iterable(range(begin, begin + size) for begin, size in pieces))


@settings(max_examples=200, deadline=None)
@given(one=RANGES, other=RANGES)
def test_ranges_meet_when_a_byte_is_in_both(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert ranges(one).meets(ranges(other)) == bool(covered(one) & covered(other))


@pytest.mark.parametrize(
    ("source", "target", "conflict"),
    [(0, 500, False), (190, 500, True), (200, 500, False), (0, 195, True), (90, 210, False), (0, 95, True)],
)
def test_copies_conflict_when_one_writes_what_the_other_touches(
    source: int, target: int, conflict: bool
) -> None:
    one = Touched(plan_of([(0, 100, 100)]))  # reads 0 to 100, writes 100 to 200
    other = Touched(plan_of([(source, target, 10)]))
    assert one.conflicts(other) == conflict
    assert other.conflicts(one) == conflict


def bytes_of(plan: CopyPlan) -> list[tuple[int, int]]:
    """Every byte: from where to where."""
    columns = zip(plan.source.tolist(), plan.target.tolist(), plan.size.tolist(), strict=True)
    return [(source + at, target + at) for source, target, size in columns for at in range(size)]


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES, bounds=st.sets(st.integers(0, 1300), max_size=9), storing=st.booleans())
def test_pieces_are_cut_where_a_registration_ends_and_nowhere_else(
    pieces: list[tuple[int, int, int]], bounds: set[int], storing: bool
) -> None:
    plan = plan_of(pieces)
    edges = np.array(sorted(bounds), dtype=np.int64)
    cut = cut_at(plan, plan.target if storing else plan.source, edges)
    assert bytes_of(cut) == bytes_of(plan)
    host = cut.target if storing else cut.source
    for begin, size in zip(host.tolist(), cut.size.tolist(), strict=True):
        assert size > 0
        assert not bounds & set(range(begin + 1, begin + size))
    inside = sum(
        len(bounds & set(range((to if storing else begin) + 1, (to if storing else begin) + size)))
        for begin, to, size in pieces
    )
    assert len(cut.size) == len(pieces) + inside


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES, from_bytes=st.sampled_from([0, 50, 150, 1000]))
def test_portions_hold_every_byte_once_and_small_pieces_go_by_the_kernel(
    pieces: list[tuple[int, int, int]], from_bytes: int
) -> None:
    portions = portions_of(plan_of(pieces), from_bytes)
    everything = [*map(bytes_of, (p for portion in portions for p in (portion.engine, portion.kernel)))]
    assert sorted(itertools.chain.from_iterable(everything)) == sorted(bytes_of(plan_of(pieces)))
    for portion in portions:
        assert portion.byte_count > 0
        assert (portion.kernel.size < from_bytes).all()
        assert len(portion.kernel.size) == 0 or len(portion.kernel.size) >= FEW_PIECES


def test_a_portion_is_bounded_in_bytes_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ways, "PORTION_BYTES", 1000)
    size = np.full(2 * PORTION_PIECES + 5, 1, dtype=np.int64)
    many = portions_of(CopyPlan(np.cumsum(size), np.cumsum(size), size), 0)
    assert sum(portion.byte_count for portion in many) == len(size)
    assert max(len(portion.engine.size) for portion in many) <= 1000
    monkeypatch.setattr(cuda_ways, "PORTION_BYTES", 1 << 30)
    many = portions_of(CopyPlan(np.cumsum(size), np.cumsum(size), size), 2)
    assert [len(portion.kernel.size) for portion in many] == [PORTION_PIECES, PORTION_PIECES, 0]
    assert len(many[2].engine.size) == 5  # too few for a kernel


def test_empty_pieces_are_left_out() -> None:
    assert portions_of(plan_of([(0, 0, 0)]), 0) == []
    (portion,) = portions_of(plan_of([(0, 0, 0), (5, 9, 3)]), 0)
    assert bytes_of(portion.engine) == [(5, 9), (6, 10), (7, 11)]


@pytest.mark.parametrize(
    ("odd", "wide"), [((0, 0, 0), True), ((8, 0, 0), False), ((0, 1, 0), False), ((0, 0, 4), False)]
)
def test_wide_accesses_are_for_multiples_of_sixteen(odd: tuple[int, int, int], wide: bool) -> None:
    pieces = [(at, at, 16) for at in range(0, 32 * FEW_PIECES, 32)]
    begin, to, size = pieces[3]
    pieces[3] = (begin + odd[0], to + odd[1], size + odd[2])
    (portion,) = portions_of(plan_of(pieces), 1000)
    assert (len(portion.kernel.size), portion.wide) == (FEW_PIECES, wide)


# -- what is found out at start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel_s", "chosen"),
    [
        ((1.0, 1.0, 1.0), 4),
        ((0.1, 1.0, 1.0), 8),
        ((1.0, 0.1, 1.0), 16),
        ((0.1, 0.1, 0.1), 17),
        ((0.9, 0.9, 0.9), 4),
    ],
)
def test_the_engine_takes_over_where_the_kernel_is_not_clearly_faster_any_more(
    kernel_s: tuple[float, ...], chosen: int
) -> None:
    measured = {size: Ways(1.0, seconds) for size, seconds in zip((4, 8, 16), kernel_s, strict=True)}
    assert engine_from_bytes(measured) == chosen


def test_the_size_where_the_engine_takes_over_is_found_by_trying() -> None:
    sizes = range(1024, 64 << 10, 1024)
    cuda = LazyCuda(random.Random(3), lambda size: 1.1e-6 + size / 25e9, lambda size: size / 20e9)
    device = CudaDevice(cuda)
    device.open_tables()
    scratch = np.zeros(128 << 10, dtype=np.uint8)
    assert device.register(int(scratch.ctypes.data), len(scratch))
    measured = measure_ways(cuda, device, Direction.LOAD, int(scratch.ctypes.data), sizes, len(scratch))
    expected = [size for size in sizes if KERNEL_COSTS * size / 20e9 >= 1.1e-6 + size / 25e9]
    assert engine_from_bytes(measured) == expected[0]
    assert not cuda.device  # what was borrowed was given back


def test_a_device_that_does_not_end_a_trial_is_not_used() -> None:
    cuda = LazyCuda(random.Random(9))
    cuda.fails["has_ended"] = set(range(5, 1000))
    with pytest.raises(RuntimeError, match="does not end what it was given"):
        calibrate(CudaDevice(cuda), cuda)


@pytest.mark.parametrize("name", ["move_pieces", "device_memory", "elapsed_s"])
def test_where_trying_fails_all_pieces_go_by_the_engine(name: str) -> None:
    cuda = LazyCuda(random.Random(4))
    cuda.fails[name] = {1}
    device = CudaDevice(cuda)
    calibrate(device, cuda)
    assert set(device.engine_from_bytes.values()) == {0}
    assert len(cuda.registered) == 1  # the tables; the memory that was tried with is given back


def test_where_no_memory_can_be_registered_nothing_is_tried() -> None:
    cuda = LazyCuda(random.Random(5))
    cuda.fails["register"] = {2}
    device = CudaDevice(cuda)
    calibrate(device, cuda)
    assert not device.has_table
    assert not cuda.registered
    assert cuda.calls["move_pieces"] == 0


# -- the pool ------------------------------------------------------------------------------------------


def test_a_slot_counts_as_ready_once_the_device_may_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.transfer.pool.REGISTERED_PIECE_BYTES", 1 << 20)
    cuda = LazyCuda(random.Random(6))
    device = CudaDevice(cuda)
    pool = HostPool(10, 300 << 10, prefault=False, registrar=device)
    assert pool.await_slots(10, 20.0)
    assert sorted(cuda.registered.values()) == [(3000 << 10) - (2 << 20), 1 << 20, 1 << 20]
    assert sum(cuda.registered.values()) == pool.byte_count
    begins, ends, bounds = device.registered()
    assert bounds.tolist() == [*begins.tolist(), int(ends[-1])]
    pool.close()
    assert not cuda.registered


def test_a_pool_stays_as_large_as_the_device_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.transfer.pool.REGISTERED_PIECE_BYTES", 1 << 20)
    cuda = LazyCuda(random.Random(7))
    cuda.fails["register"] = {2}
    pool = HostPool(10, 300 << 10, registrar=CudaDevice(cuda))
    assert pool.await_slots(3, 20.0)
    assert not pool.await_slots(4, 20.0)
    assert pool.ready_slots == 3
    pool.close()
    assert not cuda.registered


def test_tables_are_not_handed_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "TABLES", 2)
    device = CudaDevice(LazyCuda(random.Random(8)))
    assert not device.has_table
    device.open_tables()
    plan = plan_of([(1, 2, 3)])
    (one, first), (other, second) = device.take_table(plan), device.take_table(plan)
    assert not device.has_table
    assert abs(first - second) >= 24 * PORTION_PIECES
    device.free_table(one)
    assert device.has_table
    assert device.take_table(plan) == (one, first)
    device.free_table(other)
