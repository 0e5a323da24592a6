"""Threads that share copies on the CPU backend: every byte once, the order, and ends that are ends."""

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.jobs import JobId
from kvtide.transfer.devices import CopyOutcome, CPUCopier
from kvtide.transfer.kernels import SEGMENT_BYTES, copy_share
from kvtide.transfer.plans import CopyPlan

MIB = 1 << 20


@pytest.fixture(params=[1, 3])
def copier(request: pytest.FixtureRequest) -> Iterator[CPUCopier]:
    copier = CPUCopier("test", request.param)
    yield copier
    copier.close()


def plan_of(source: np.ndarray, target: np.ndarray, cuts: list[int]) -> CopyPlan:
    """Pieces between cuts, in any order."""
    begins = np.array([0, *cuts], dtype=np.int64)
    sizes = np.diff(np.array([0, *cuts, len(source)], dtype=np.int64))
    return CopyPlan(source.ctypes.data + begins, target.ctypes.data + begins, sizes)


def noise(byte_count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, byte_count, dtype=np.uint8)


# -- the loop --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 70), st.integers(0, 70)), min_size=0, max_size=12
    ),
    huge=st.sampled_from([0, 0, SEGMENT_BYTES - 7, SEGMENT_BYTES, 2 * SEGMENT_BYTES + 4099]),
)
def test_any_sizes_and_places_are_copied_and_nothing_beside_them(
    pieces: list[tuple[int, int, int]], huge: int
) -> None:
    pieces = [*pieces, (huge, 3, 5)] if huge else pieces
    room = sum(size + skip + gap for size, skip, gap in pieces) + 64
    source, target = noise(room), np.zeros(room, dtype=np.uint8)
    expected = target.copy()
    from_at, to_at, sizes = [], [], []
    read = write = 0
    for size, skip, gap in pieces:
        read, write = read + skip, write + gap
        from_at.append(read)
        to_at.append(write)
        sizes.append(size)
        expected[write : write + size] = source[read : read + size]
        read, write = read + size, write + size
    end = np.cumsum(np.array(sizes, dtype=np.int64))
    claimed = np.zeros(1, dtype=np.int64)
    done = copy_share(
        source.ctypes.data + np.array(from_at, dtype=np.int64),
        target.ctypes.data + np.array(to_at, dtype=np.int64),
        end.astype(np.int64),
        claimed,
        np.zeros(1, dtype=np.uint8),
    )
    assert done == sum(sizes)
    assert np.array_equal(target, expected)


def test_a_share_that_was_taken_by_somebody_else_is_left_to_them() -> None:
    source = noise(3 * SEGMENT_BYTES)
    target = np.zeros_like(source)
    plan = plan_of(source, target, [100, SEGMENT_BYTES + 1])
    claimed = np.array([SEGMENT_BYTES], dtype=np.int64)
    end, stop = np.cumsum(plan.size), np.zeros(1, dtype=np.uint8)
    assert copy_share(plan.source, plan.target, end, claimed, stop) == 2 * SEGMENT_BYTES
    assert not target[:SEGMENT_BYTES].any()
    assert np.array_equal(target[SEGMENT_BYTES:], source[SEGMENT_BYTES:])
    assert copy_share(plan.source, plan.target, end, claimed, stop) == 0


def test_nothing_is_taken_once_it_is_to_stop() -> None:
    source, target = noise(1000), np.zeros(1000, dtype=np.uint8)
    plan, claimed = plan_of(source, target, []), np.zeros(1, dtype=np.int64)
    stop = np.ones(1, dtype=np.uint8)
    assert copy_share(plan.source, plan.target, np.cumsum(plan.size), claimed, stop) == 0
    assert not target.any()
    assert claimed[0] == 0


# -- threads ---------------------------------------------------------------------------------------------


def ended(copier: CPUCopier, *job_ids: int) -> dict[int, CopyOutcome]:
    assert copier.wait({JobId(job_id) for job_id in job_ids}, 30.0)
    outcomes = {int(outcome.job_id): outcome for outcome in copier.poll()}
    assert set(job_ids) <= set(outcomes)
    return outcomes


def test_many_copies_at_once_are_each_whole(copier: CPUCopier) -> None:
    chance = np.random.default_rng(5)
    pairs = []
    for job_id in range(40):
        source = noise(int(chance.choice([1, 700, 40_000, 3 * MIB, 5 * MIB])), job_id)
        cuts = sorted(set(chance.integers(1, len(source) + 1, 20).tolist()) - {len(source)})
        pairs.append((source, np.zeros_like(source), cuts))
    for job_id, (source, target, cuts) in enumerate(pairs):
        copier.submit(JobId(job_id), plan_of(source, target, cuts), 30.0)
    outcomes = ended(copier, *range(40))
    for job_id, (source, target, _) in enumerate(pairs):
        assert outcomes[job_id].success
        assert outcomes[job_id].byte_count == len(source)
        assert np.array_equal(source, target)
    assert not copier._under_way


def test_a_copy_of_nothing_succeeds(copier: CPUCopier) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    copier.submit(JobId(1), CopyPlan(nothing, nothing, nothing), 30.0)
    assert ended(copier, 1)[1].success


def test_a_shorter_copy_takes_over_and_the_long_one_goes_on_where_it_was(copier: CPUCopier) -> None:
    source = noise(40 * MIB)
    target = np.zeros_like(source)
    copier.submit(JobId(1), plan_of(source, target, [5, 20 * MIB]), 30.0)
    small = np.zeros(5000, dtype=np.uint8)
    for job_id in range(2, 12):
        small[:] = 0
        copier.submit(JobId(job_id), plan_of(source[:5000], small, []), 30.0)
        assert copier.wait({JobId(job_id)}, 30.0)
        assert np.array_equal(small, source[:5000])
    outcomes = ended(copier, *range(1, 12))
    assert all(outcome.success for outcome in outcomes.values())
    assert outcomes[1].byte_count == len(source)
    assert np.array_equal(source, target)


def test_who_has_waited_long_enough_goes_first(copier: CPUCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUCopier, "PATIENCE_S", -1.0)
    source = noise(32 * MIB)
    target, small = np.zeros_like(source), np.zeros(5000, dtype=np.uint8)
    copier.submit(JobId(1), plan_of(source, target, []), 30.0)
    copier.submit(JobId(2), plan_of(source[:5000], small, []), 30.0)
    outcomes = ended(copier, 1, 2)
    assert outcomes[1].success
    assert outcomes[2].success
    if len(copier._threads) == 1:
        assert list(outcomes) == [1, 2]


def test_what_has_not_begun_ends_at_once_when_it_is_cancelled() -> None:
    copier = CPUCopier("busy")
    source = noise(32 * MIB)
    target, never = np.zeros_like(source), np.zeros_like(source)
    copier.submit(JobId(1), plan_of(source, target, []), 30.0)
    copier.submit(JobId(2), plan_of(source, never, []), 30.0)
    copier.cancel({JobId(2), JobId(99)})
    assert copier.wait({JobId(2)}, 0.0) or copier.wait({JobId(2)}, 5.0)
    outcomes = ended(copier, 1, 2)
    assert outcomes[1].success
    assert not outcomes[2].success
    assert int((never != 0).sum()) == outcomes[2].byte_count
    copier.close()


def test_no_byte_follows_an_end(copier: CPUCopier) -> None:
    source = noise(24 * MIB)
    for attempt in range(6):
        target = np.zeros_like(source)
        copier.submit(JobId(attempt), plan_of(source, target, [MIB + 3]), 30.0)
        time.sleep(0.001 * attempt)
        copier.cancel({JobId(attempt)})
        outcome = ended(copier, attempt)[attempt]
        written = int(np.count_nonzero(target))
        assert written == outcome.byte_count
        assert outcome.success == (written == len(source))
        time.sleep(0.005)
        assert int(np.count_nonzero(target)) == written


def test_nothing_begins_after_it_was_closed(copier: CPUCopier) -> None:
    source, target = noise(1000), np.zeros(1000, dtype=np.uint8)
    copier.close()
    copier.submit(JobId(1), plan_of(source, target, []), 30.0)
    assert not ended(copier, 1)[1].success
    assert not target.any()


def test_threads_run_where_they_were_told_to_whoever_starts_them() -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        copier = CPUCopier("apart", 2, mine)
    finally:
        os.sched_setaffinity(0, mine)
    source, target = noise(8 * MIB), np.zeros(8 * MIB, dtype=np.uint8)
    copier.submit(JobId(1), plan_of(source, target, []), 30.0)
    ended(copier, 1)
    ids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("kvtide-apart")]
    assert len(ids) == 2
    assert all(os.sched_getaffinity(native_id or 0) == mine for native_id in ids)
    copier.close()


def test_cores_that_are_gone_hold_nobody_up() -> None:
    copier = CPUCopier("nowhere", 1, {4095})
    source, target = noise(1000), np.zeros(1000, dtype=np.uint8)
    copier.submit(JobId(1), plan_of(source, target, []), 30.0)
    assert ended(copier, 1)[1].success
    copier.close()
