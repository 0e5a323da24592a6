"""The CUDA copier over a runtime that executes late and in any order it was not forbidden."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cuda_world import World, plan_of

from kvtide.jobs import Direction, JobId
from kvtide.testing import ForbiddenAccessError
from kvtide.transfer import cuda, cuda_device, cuda_ways
from kvtide.transfer.cuda import CudaCopier
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.transfer.cuda_order import Touched
from kvtide.transfer.cuda_runtime import CudaError, Event, Stream

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything comes in several portions, and not all is submitted at once."""
    monkeypatch.setattr(cuda_ways, "PORTION_BYTES", 700)
    monkeypatch.setattr(cuda_ways, "FEW_PIECES", 2)
    monkeypatch.setattr(cuda, "AHEAD_BYTES", 1000)
    monkeypatch.setattr(cuda, "NAP_S", 0.0)
    monkeypatch.setattr(cuda_device, "TABLES", 3)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    yield world
    world.cuda.held.clear()
    world.close()


@pytest.mark.parametrize("seed", range(16))
def test_random_copies_end_as_if_done_one_after_the_other(seed: int) -> None:
    world = World(seed, from_bytes=(0, 100, 200, 1 << 20)[seed % 4])
    assert world.walk(60) == []
    world.close()
    assert world.cuda.registered.keys() == world.device._registered.keys()
    assert len(world.cuda.registered) == 3  # the pool's; the tables are given back


def noticed(seed: int) -> bool:
    try:
        return bool(World(seed).walk(60))
    except ForbiddenAccessError:  # a kernel has read somebody else's table
        return True


def unordered(self: CudaDevice, touched: Touched) -> list[cuda_device.OpenCopy]:
    return []


def unheard(self: CudaCopier) -> None:
    return None


def one_table(self: CudaDevice, index: int) -> None:
    self._free_tables.append(0)


def unwaited(self: object, stream: Stream, event: Event) -> None:
    return None


def too_early(self: object, event: Event) -> bool:
    return True


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        ("kvtide.transfer.cuda_device.CudaDevice", "before", unordered),
        ("kvtide.transfer.cuda.CudaCopier", "forward_ended", unheard),
        ("kvtide.transfer.cuda_device.CudaDevice", "free_table", one_table),
        ("kvtide.testing.lazy_cuda.LazyCuda", "let_wait", unwaited),
        ("kvtide.testing.lazy_cuda.LazyCuda", "has_ended", too_early),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_without_one_of_the_rules_bytes_are_wrong(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(f"{owner}.{name}", broken)
    assert any(noticed(seed) for seed in range(12))


def test_a_store_waits_for_the_forward_that_wrote_its_blocks(world: World) -> None:
    world.cuda.submit(lambda: world.device_side.memory[:64].fill(7))
    world.copiers[STORE].forward_ended()
    job_id = world.copy(STORE, [(0, 0, 64)])
    world.cuda.held.add(world.cuda.engine_stream())
    assert not world.copiers[STORE].wait([JobId(job_id)], 0.02)
    assert world.copiers[STORE].poll() == []
    world.cuda.held.clear()
    assert world.copiers[STORE].wait([JobId(job_id)], 20.0)
    assert (world.host_side.memory[:64] == 7).all()


def test_a_load_does_not_wait_for_a_store_of_other_blocks(world: World) -> None:
    world.cuda.held.add(world.copiers[STORE]._stream)
    store = world.copy(STORE, [(0, 0, 64)])
    load = world.copy(LOAD, [(1024, 512, 64)])
    assert world.copiers[LOAD].wait([JobId(load)], 20.0)
    same = world.copy(LOAD, [(2048, 32, 64)])
    assert not world.copiers[LOAD].wait([JobId(same)], 0.02)
    world.cuda.held.clear()
    assert world.copiers[LOAD].wait([JobId(same)], 20.0)
    assert [outcome.job_id for outcome in world.copiers[STORE].poll()] == [store]


def test_loads_go_on_the_urgent_stream(world: World) -> None:
    assert world.cuda.urgent[world.copiers[LOAD]._stream]
    assert not world.cuda.urgent[world.copiers[STORE]._stream]


def test_a_short_load_is_not_behind_a_long_one_that_was_not_submitted_yet(world: World) -> None:
    world.cuda.held.add(world.copiers[LOAD]._stream)
    long = world.copy(LOAD, [(at, at, 100) for at in range(0, 3800, 128)])
    short = world.copy(LOAD, [(4040, 4040, 16)])
    world.cuda.held.clear()
    assert world.copiers[LOAD].wait([JobId(short)], 20.0)
    assert [outcome.job_id for outcome in world.copiers[LOAD].poll()] == [short]
    assert world.copiers[LOAD].wait([JobId(long)], 20.0)


def test_a_copy_that_has_not_begun_is_cancelled_at_once_and_one_on_the_stream_ends_when_it_does(
    world: World,
) -> None:
    load = world.copiers[LOAD]
    world.cuda.held.add(load._stream)
    begun = world.copy(LOAD, [(at, at, 100) for at in range(0, 2000, 128)])
    waiting = world.copy(LOAD, [(at, at, 100) for at in range(0, 2000, 128)])
    load.cancel([JobId(begun), JobId(waiting)])
    assert [(outcome.job_id, outcome.success, outcome.byte_count) for outcome in load.poll()] == [
        (waiting, False, 0)
    ]
    assert not load.wait([JobId(begun)], 0.02)
    world.cuda.held.clear()
    assert load.wait([JobId(begun)], 20.0)
    (outcome,) = load.poll()
    assert not outcome.success
    assert 0 < outcome.byte_count < 1600
    after = world.device_side.memory.copy()
    world.cuda.run()
    assert (world.device_side.memory == after).all()


def test_a_copy_past_its_deadline_fails_unless_it_has_begun(world: World) -> None:
    load = world.copiers[LOAD]
    world.cuda.held.add(load._stream)
    begun = world.copy(LOAD, [(at, at, 100) for at in range(0, 4000, 128)])
    waiting = world.copy(LOAD, [(0, 0, 1600)])
    for copy in load._open.values():
        copy.begin_by_s = -1.0
    assert [(outcome.job_id, outcome.success) for outcome in load.poll()] == [(waiting, False)]
    world.cuda.held.clear()
    assert load.wait([JobId(begun)], 20.0)
    assert [(outcome.job_id, outcome.success) for outcome in load.poll()] == [(begun, True)]


def test_a_copy_of_nothing_is_done(world: World) -> None:
    job_id = world.copy(STORE, [])
    assert [(outcome.job_id, outcome.success) for outcome in world.copiers[STORE].poll()] == [(job_id, True)]


def test_memory_that_is_not_registered_is_refused_before_the_device_sees_it(world: World) -> None:
    outside = np.zeros(64, dtype=np.uint8)
    plan = plan_of([(world.device_side.address, int(outside.ctypes.data), 64)])
    with pytest.raises(ValueError, match="not registered"):
        world.copiers[STORE].submit(JobId(9), plan, 1.0)
    beyond = plan_of([(world.device_side.address, world.host_side.address + 4090, 16)])
    with pytest.raises(ValueError, match="not registered"):
        world.copiers[STORE].submit(JobId(9), beyond, 1.0)
    assert world.cuda.calls["copy_pieces"] == world.cuda.calls["move_pieces"] == 0


def test_the_double_refuses_a_piece_in_two_registrations(world: World) -> None:
    plan = plan_of([(world.device_side.address, world.host_side.address + 1300, 200)])
    world.cuda.copy_pieces(plan, world.cuda.engine_stream())
    with pytest.raises(ForbiddenAccessError):
        world.cuda.run()


@pytest.mark.parametrize("name", ["copy_pieces", "move_pieces", "let_wait"])
def test_a_refused_call_fails_that_copy_and_no_other(world: World, name: str) -> None:
    world.cuda.fails[name] = {1}
    pieces = [(at, at, 100) for at in range(0, 600, 128)] + [(1024, 1024, 300)]
    bad = world.copy(STORE, pieces)
    good = world.copy(STORE, pieces)
    assert world.copiers[STORE].wait([JobId(bad), JobId(good)], 20.0)
    ended = {outcome.job_id: outcome.success for outcome in world.copiers[STORE].poll()}
    assert ended == {bad: False, good: True}


def test_what_is_under_way_when_the_device_is_lost_is_never_reported(world: World) -> None:
    load, store = world.copiers[LOAD], world.copiers[STORE]
    world.cuda.held |= {load._stream, store._stream}
    on_its_way = world.copy(LOAD, [(0, 0, 64)])
    stored = world.copy(STORE, [(1024, 1024, 64)])
    world.cuda.fails["has_ended"] = set(range(world.cuda.calls["has_ended"] + 1, 10_000))
    assert load.poll() == []
    later = world.copy(LOAD, [(512, 512, 64)])
    assert [(outcome.job_id, outcome.success) for outcome in load.poll()] == [(later, False)]
    with pytest.raises(CudaError, match="has_ended"):
        load.wait([JobId(on_its_way)], 20.0)
    assert not store.wait([JobId(stored)], 0.01)  # it only reads: the step need not end for it
    load.cancel([JobId(on_its_way)])
    assert load.poll() == []


def test_an_end_that_cannot_be_noted_is_not_reported(world: World) -> None:
    # Recorded before: the forward of the load, its begin. The third would have been its end.
    world.cuda.fails["record"] = {3}
    job_id = world.copy(LOAD, [(0, 0, 64)])
    assert world.copiers[LOAD].poll() == []
    world.copiers[LOAD].cancel([JobId(job_id)])
    assert world.copiers[LOAD].poll() == []


REGION_BYTES, REGIONS = 256, 16


@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_a_copy_is_reported_once_and_writes_nothing_after_that(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    world = World(seed, from_bytes=(0, 30, 1 << 20)[seed % 3])
    chance, move = world.chance, world.cuda._move
    holders: dict[tuple[Direction, int], int] = {}
    reported: dict[int, bool] = {}
    strays = []

    def watched(piece: tuple[int, int, int], cost_s: Callable[[int], float]) -> None:
        for direction, side in ((STORE, world.host_side), (LOAD, world.device_side)):
            if 0 <= piece[0] - side.address < len(side.memory):
                region = (piece[0] - side.address) // REGION_BYTES
                if holders.get((direction, region), -1) in (*reported, -1):
                    strays.append(piece)
        move(piece, cost_s)

    def poll() -> None:
        for copier in world.copiers.values():
            for outcome in copier.poll():
                assert outcome.job_id not in reported
                reported[outcome.job_id] = outcome.success

    monkeypatch.setattr(world.cuda, "_move", watched)
    for name in ("copy_pieces", "move_pieces", "let_wait"):
        world.cuda.fails[name] = {call for call in range(200) if chance.random() < 0.1}
    for job_id in range(60):
        direction, region = chance.choice((STORE, LOAD)), chance.randrange(REGIONS)
        if holders.get((direction, region), job_id) not in {job_id, *reported}:
            continue
        holders[direction, region] = job_id
        begin, size = region * REGION_BYTES, REGION_BYTES // 8
        pieces = [(begin + at, begin + at, size) for at in range(0, REGION_BYTES, size)]
        source, target = world.ends(direction)
        plan = plan_of([(source.address + a, target.address + b, size) for a, b, size in pieces])
        world.copiers[direction].submit(JobId(job_id), plan, chance.choice((60.0, -1.0)))
        stream = world.copiers[direction]._stream
        world.cuda.held ^= {stream} if chance.random() < 0.3 else set()
        if chance.random() < 0.3:
            world.copiers[direction].cancel([JobId(job_id)])
        if chance.random() < 0.5:
            poll()
    world.cuda.held.clear()
    for copier in world.copiers.values():
        assert copier.wait(list(map(JobId, range(60))), 20.0)
    poll()
    assert reported.keys() >= set(holders.values())
    world.cuda.run()
    assert strays == []
    assert set(reported.values()) == {True, False}
    world.close()


def test_an_end_that_the_runtime_refuses_is_no_error(world: World) -> None:
    world.cuda.fails["drop"] = {1}
    world.close()
    assert len(world.cuda.registered) == 3
    world.copiers = {}


def test_nothing_is_written_after_the_end(world: World) -> None:
    for at in range(0, 3000, 500):
        world.copy(LOAD, [(at, at, 400)])
    world.close()
    after = world.device_side.memory.copy()
    world.cuda.run()
    assert (world.device_side.memory == after).all()
    world.copiers = {direction: CudaCopier(direction, world.device) for direction in (STORE, LOAD)}
    job_id = world.copy(LOAD, [(0, 0, 64)])  # another engine in this process
    assert world.copiers[LOAD].wait([JobId(job_id)], 20.0)
