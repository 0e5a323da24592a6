"""From tensors to addresses to bytes, on the CPU backend's copier."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import LayoutError
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId
from kvtide.testing import HeldDevice
from kvtide.transfer.devices import CPUCopier
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.kernels import SEGMENT_BYTES
from kvtide.transfer.plans import CopyPlan, plan_copy
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import GroupRegions, group_regions, layer_view, layer_views
from kvtide.transfer.self_test import round_trip

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 12, 2, 4, 6, 3
# vLLM's names; the numbers are the order of [layer, block, head, token, content] in memory.
COMPACT = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
}
SCATTERED = {"LHBNC": (0, 2, 1, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}


def tensors(order: tuple[int, ...]) -> dict[str, torch.Tensor]:
    sizes = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    storage = torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16)
    logical = storage.permute([order.index(axis) for axis in range(5)])
    return {f"layer.{index}": logical[index] for index in range(LAYERS)}


def regions(kv_caches: dict[str, torch.Tensor], blocks_per_chunk: int) -> GroupRegions:
    return group_regions(layer_views(kv_caches, list(kv_caches), BLOCKS), blocks_per_chunk)


@pytest.fixture
def copier() -> Iterator[CPUCopier]:
    copier = CPUCopier("test")
    yield copier
    copier.close()


@pytest.mark.parametrize("layout", COMPACT)
def test_a_compact_layout_is_one_piece_a_block_and_layer_or_one_a_block(layout: str) -> None:
    group = regions(tensors(COMPACT[layout]), 1)
    page = HEADS * TOKENS * CONTENT * 2
    if layout.startswith("B"):
        assert list(group.size) == [LAYERS * page]
    else:
        assert list(group.size) == [page] * LAYERS
    assert group.chunk_bytes == LAYERS * page


@pytest.mark.parametrize("layout", SCATTERED)
def test_a_layout_whose_blocks_are_not_one_piece_is_refused_by_name(layout: str) -> None:
    with pytest.raises(LayoutError, match=r"layer layer\.0: shape \(12, 2, 4, 6\), strides .* not one dense"):
        regions(tensors(SCATTERED[layout]), 1)


def test_blocks_split_into_kernel_blocks_are_taken_whole() -> None:
    split = torch.zeros(BLOCKS * 2, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)
    view = layer_view("l", split, BLOCKS)
    assert (view.page_bytes, view.block_stride_bytes) == (192, 192)
    with pytest.raises(LayoutError, match="does not count blocks"):
        layer_view("l", split[:-1], BLOCKS)
    padded = torch.zeros(BLOCKS * 2, HEADS * 2, TOKENS, CONTENT)[:, :HEADS]
    with pytest.raises(LayoutError, match="kernel blocks"):
        layer_view("l", padded, BLOCKS)


def test_a_layer_that_was_not_registered_is_named() -> None:
    with pytest.raises(LayoutError, match="'missing'"):
        layer_views({}, ["missing"], BLOCKS)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), layout=st.sampled_from(sorted(COMPACT)), blocks_per_chunk=st.integers(1, 3))
def test_any_blocks_come_back_byte_for_byte_and_nothing_else_is_touched(
    data: st.DataObject, layout: str, blocks_per_chunk: int
) -> None:
    kv_caches = tensors(COMPACT[layout])
    for tensor in kv_caches.values():
        noise = torch.randint(-30000, 30000, tensor.shape, dtype=torch.int16)
        tensor.copy_(noise.view(torch.bfloat16))
    group = regions(kv_caches, blocks_per_chunk)
    pool = HostPool(6, group.chunk_bytes, prefault=False)
    pool.view[:] = 0xA5
    store = SingleDirectionOffloadingHandler(Direction.STORE, [group], pool, HeldDevice(Direction.STORE))
    load = SingleDirectionOffloadingHandler(Direction.LOAD, [group], pool, HeldDevice(Direction.LOAD))
    first = data.draw(st.integers(0, 4))
    count = data.draw(st.integers(1, 6))
    sources = tuple(data.draw(st.permutations(range(BLOCKS)))[:count])
    targets = tuple(data.draw(st.permutations(range(BLOCKS)))[:count])
    chunks = (first % blocks_per_chunk + count - 1) // blocks_per_chunk + 1
    slots = tuple(data.draw(st.permutations(range(6)))[:chunks])
    host = CPULoadStoreSpec(slots, (chunks,))
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    run(store, Hop(GPULoadStoreSpec(sources, (count,), (first,)), host))
    run(load, Hop(host, GPULoadStoreSpec(targets, (count,), (first,))))
    for name, tensor in kv_caches.items():
        expected = before[name].clone()
        for source, target in zip(sources, targets, strict=True):
            expected[target] = before[name][source]
        assert torch.equal(bits(expected), bits(tensor))
    untouched = [slot for slot in range(6) if slot not in slots]
    rows = pool.view.reshape(6, -1)
    assert (rows[untouched] == 0xA5).all()
    assert int((rows == 0xA5).sum()) >= (6 * blocks_per_chunk - count) * group.chunk_bytes // blocks_per_chunk


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def run(handler: SingleDirectionOffloadingHandler, hop: Hop) -> None:
    handler.transfer_async(JobId(0), hop, 10.0)
    assert handler.wait({JobId(0)}, 10.0)
    (outcome,) = handler.get_finished()
    assert outcome.success


def test_blocks_and_slots_that_do_not_fit_are_refused() -> None:
    group = regions(tensors(COMPACT["LBHNC"]), 2)
    pool = HostPool(2, group.chunk_bytes, prefault=False)
    held = HeldDevice(Direction.STORE)
    handler = SingleDirectionOffloadingHandler(Direction.STORE, [group], pool, held)
    with pytest.raises(ValueError, match="5 blocks from 1 on do not fit 2 slots"):
        handler.transfer_async(
            JobId(0),
            Hop(GPULoadStoreSpec((1, 2, 3, 4, 5), (5,), (1,)), CPULoadStoreSpec((0, 1), (2,))),
            1.0,
        )
    with pytest.raises(ValueError, match="0 blocks from 0 on do not fit 1 slots"):
        handler.transfer_async(
            JobId(0), Hop(GPULoadStoreSpec((), (0,), (0,)), CPULoadStoreSpec((0,), (1,))), 1.0
        )
    with pytest.raises(ValueError, match="store from"):
        handler.transfer_async(
            JobId(0), Hop(CPULoadStoreSpec((0,), (1,)), GPULoadStoreSpec((1, 2), (2,), (0,))), 1.0
        )
    assert held.held == []


def pieces_of(group: GroupRegions, blocks: tuple[int, ...], slots: tuple[int, ...]) -> list[tuple[int, ...]]:
    device = GPULoadStoreSpec(blocks, (len(blocks),), (0,))
    host = CPULoadStoreSpec(slots, (len(slots),))
    plan = plan_copy([group], 1000, group.chunk_bytes, device, host, Direction.STORE)
    return list(zip(plan.source.tolist(), plan.target.tolist(), plan.size.tolist(), strict=True))


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_pieces_that_follow_one_another_on_both_sides_become_one() -> None:
    # Two blocks a chunk, 10 bytes a block, in two regions; the second leaves a gap after each block.
    group = GroupRegions(numbers(0, 500), numbers(10, 12), numbers(10, 10), numbers(0, 20), 2)
    assert pieces_of(group, (3, 4, 5, 6, 8, 9), (0, 1, 7)) == [
        # Within a slot the blocks of a region lie side by side, but not those of one slot and the next.
        *((30, 1000, 20), (50, 1040, 20), (80, 1280, 20)),
        *((536, 1020, 10), (548, 1030, 10), (560, 1060, 10), (572, 1070, 10)),
        *((596, 1300, 10), (608, 1310, 10)),
    ]


def test_of_one_region_neighbouring_slots_join_too() -> None:
    group = GroupRegions(numbers(0), numbers(10), numbers(10), numbers(0), 2)
    assert pieces_of(group, (3, 4, 5, 6, 9, 8), (0, 1, 2)) == [(30, 1000, 40), (90, 1040, 10), (80, 1050, 10)]
    assert pieces_of(group, (), ()) == []


def test_a_rank_of_a_pipeline_may_have_none_of_the_layers_of_a_group() -> None:
    nothing = GroupRegions(*([numbers()] * 4), 1)
    assert pieces_of(nothing, (1, 2), (0, 1)) == []


def test_neighbouring_blocks_in_neighbouring_slots_are_one_copy_in_a_block_outermost_layout() -> None:
    group = regions(tensors(COMPACT["BLHNC"]), 1)
    pool = HostPool(8, group.chunk_bytes, prefault=False)
    held = HeldDevice(Direction.STORE)
    handler = SingleDirectionOffloadingHandler(Direction.STORE, [group], pool, held)
    device = GPULoadStoreSpec((3, 4, 5, 9), (4,), (0,))
    handler.transfer_async(JobId(0), Hop(device, CPULoadStoreSpec((2, 3, 4, 5), (4,))), 1.0)
    (copy,) = held._open.values()
    assert list(copy.plan.size) == [3 * group.chunk_bytes, group.chunk_bytes]


@pytest.mark.parametrize("layout", COMPACT)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 9])
def test_the_round_trip_at_start_passes_and_leaves_the_tensors_as_they_were(
    layout: str, blocks_per_chunk: int
) -> None:
    kv_caches = tensors(COMPACT[layout])
    for tensor in kv_caches.values():
        tensor.copy_(torch.randn(tensor.shape))
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    store, load = handlers(kv_caches, blocks_per_chunk)
    round_trip(kv_caches, [list(kv_caches)], BLOCKS, [blocks_per_chunk], store, load)
    assert all(torch.equal(before[name], tensor) for name, tensor in kv_caches.items())


def handlers(
    kv_caches: dict[str, torch.Tensor], blocks_per_chunk: int, stride_error: int = 0
) -> tuple[SingleDirectionOffloadingHandler, SingleDirectionOffloadingHandler]:
    group = regions(kv_caches, blocks_per_chunk)
    # Also the mistake keeps within the tensors: it swaps layers instead of leaving them.
    base = np.roll(group.base, stride_error)
    wrong = GroupRegions(base, group.stride, group.size, group.offset, blocks_per_chunk)
    pool = HostPool(2, group.chunk_bytes, prefault=False)
    pair = []
    for direction, regions_ in ((Direction.STORE, group), (Direction.LOAD, wrong)):
        handler = SingleDirectionOffloadingHandler(direction, [regions_], pool, HeldDevice(direction))
        pair.append(handler)
    return pair[0], pair[1]


def test_the_round_trip_at_start_notices_an_address_that_was_misread() -> None:
    kv_caches = tensors(COMPACT["LBHNC"])
    store, load = handlers(kv_caches, 1, stride_error=1)
    with pytest.raises(LayoutError, match="does not hold the bytes it should"):
        round_trip(kv_caches, [list(kv_caches)], BLOCKS, [1], store, load)


# -- the copier of the CPU backend ---------------------------------------------------------------------


def plan_between(source: np.ndarray, target: np.ndarray, pieces: int) -> CopyPlan:
    size = len(source) // pieces
    steps = np.arange(pieces, dtype=np.int64) * size
    return CopyPlan(source.ctypes.data + steps, target.ctypes.data + steps, np.full(pieces, size, np.int64))


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_every_byte_is_copied_whatever_the_pieces(copier: CPUCopier, pieces: int) -> None:
    source = np.random.default_rng(pieces).integers(0, 256, pieces * (9 << 20) // pieces, dtype=np.uint8)
    source = source[: len(source) // pieces * pieces]
    target = np.zeros_like(source)
    copier.submit(JobId(1), plan_between(source, target, pieces), 10.0)
    assert copier.wait({JobId(1)}, 10.0)
    (outcome,) = copier.poll()
    assert outcome.success
    assert outcome.byte_count == len(source)
    assert np.array_equal(source, target)


def test_a_copy_that_is_cancelled_ends_as_failed_and_writes_no_more(copier: CPUCopier) -> None:
    source = np.ones(256 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    copier.submit(JobId(1), plan_between(source, target, 1), 10.0)
    copier.cancel({JobId(1)})
    assert copier.wait({JobId(1)}, 10.0)
    (outcome,) = copier.poll()
    assert not outcome.success
    written = int(target.sum())
    assert written == outcome.byte_count
    assert written % SEGMENT_BYTES == 0
    time.sleep(0.02)
    assert int(target.sum()) == written


def test_a_copy_that_could_not_begin_in_time_is_given_up(copier: CPUCopier) -> None:
    source, target = np.ones(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    copier.submit(JobId(1), plan_between(source, target, 1), -1.0)
    assert copier.wait({JobId(1)}, 10.0)
    assert not copier.poll()[0].success
    assert not target.any()


def test_a_short_copy_does_not_queue_behind_a_long_one(copier: CPUCopier) -> None:
    source = np.ones(1 << 29, dtype=np.uint8)
    target = np.zeros_like(source)
    copier.submit(JobId(1), plan_between(source, target, 1), 60.0)
    short = np.zeros(1000, dtype=np.uint8)
    copier.submit(JobId(2), plan_between(source[:1000], short, 1), 60.0)
    assert copier.wait({JobId(2)}, 60.0)
    assert [outcome.job_id for outcome in copier.poll()] == [JobId(2)]
    assert copier.wait({JobId(1)}, 60.0)


def test_waiting_is_bounded_and_strangers_count_as_ended(copier: CPUCopier) -> None:
    assert copier.wait({JobId(9)}, 0.0)
    source = np.ones(1 << 28, dtype=np.uint8)
    target = np.zeros_like(source)
    copier.submit(JobId(1), plan_between(source, target, 1), 60.0)
    assert not copier.wait({JobId(1)}, 0.0)
    copier.close()  # before the arrays go


def test_closing_ends_open_copies() -> None:
    copier = CPUCopier("closing")
    source = np.ones(1 << 28, dtype=np.uint8)
    target = np.zeros_like(source)
    copier.submit(JobId(1), plan_between(source, target, 1), 60.0)
    copier.close()
    assert not any(thread.is_alive() for thread in copier._threads)


# -- the pool ------------------------------------------------------------------------------------------


def test_a_pool_becomes_ready_in_the_background_and_is_resident_then() -> None:
    pool = HostPool(200, 1 << 20)
    deadline_s = time.monotonic() + 60
    while pool.ready_slots < 200 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert pool.ready_slots == 200
    assert resident_bytes(pool) == pool.byte_count
    pool.close()


def test_without_prefault_all_is_ready_and_nothing_resident() -> None:
    pool = HostPool(64, 1 << 20, prefault=False)
    assert pool.ready_slots == 64
    assert resident_bytes(pool) == 0


def resident_bytes(pool: HostPool) -> int:
    with open("/proc/self/smaps") as smaps:
        inside = False
        total = 0
        for line in smaps:
            words = line.split()
            if "-" in words[0] and len(words) >= 5 and ":" not in words[0]:
                begin, end = (int(part, 16) for part in words[0].split("-"))
                inside = begin < pool.address + pool.byte_count and end > pool.address
            elif inside and words[0] == "Rss:":
                total += int(words[1]) << 10
    return total
