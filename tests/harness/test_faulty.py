"""The copier that goes wrong: its bytes move when their time has come, and not before or after."""

import random

import numpy as np
import pytest

from kvtide.jobs import JobId
from kvtide.testing import Ending, Fate, FaultPlan, FaultyDevice, VirtualClock
from kvtide.testing.faulty import ENDLESS_WAIT_S, EndlessWaitError
from kvtide.transfer.plans import CopyPlan

JOB = JobId(1)


class Bench:
    """One copy of four pieces, of a fate that the test chooses."""

    def __init__(self, fate: Fate, deadline_s: float = 1.0) -> None:
        self.clock = VirtualClock()
        plan = FaultPlan(random.Random(0), {"instant": 1.0})
        plan.draw = lambda: fate  # type: ignore[method-assign]
        self.source, self.target = np.arange(1, 129, dtype=np.uint8), np.zeros(128, dtype=np.uint8)
        address, size = np.array([self.source.ctypes.data]), np.array([128])
        self.device = FaultyDevice(plan, self.clock)
        self.device.submit(JOB, CopyPlan(address, np.array([self.target.ctypes.data]), size), deadline_s)

    def after(self, seconds: float) -> tuple[int, list[bool]]:
        """Bytes that have arrived, and how copies have ended since the last look."""
        self.clock.advance(seconds)
        ended = [outcome.success for outcome in self.device.poll()]
        return int(np.count_nonzero(self.target)), ended


def test_an_instant_copy_is_there_at_once() -> None:
    assert Bench(Fate("instant")).after(0) == (128, [True])


def test_a_slow_copy_arrives_piece_by_piece() -> None:
    bench = Bench(Fate("slow", begin_after_s=0.5, piece_s=1.0))
    assert bench.after(0.4) == (0, [])
    assert bench.after(0.2) == (32, [])
    assert bench.after(2.0) == (96, [])
    assert bench.after(1.0) == (128, [True])


def test_a_late_copy_writes_what_is_there_by_then() -> None:
    bench = Bench(Fate("late", begin_after_s=0.5))
    bench.source[:] = 7
    bench.after(1.0)
    assert set(bench.target.tolist()) == {7}


def test_before_its_first_byte_it_can_be_cancelled() -> None:
    bench = Bench(Fate("slow", begin_after_s=0.5, piece_s=1.0))
    bench.device.cancel([JOB])
    assert bench.after(9.0) == (0, [False])


def test_cancelled_half_way_it_stops_unless_it_is_deaf() -> None:
    for deaf, bytes_, success in ((False, 64, False), (True, 128, True)):
        bench = Bench(Fate("slow", piece_s=1.0, deaf=deaf))
        bench.after(1.0)
        bench.device.cancel([JOB])
        assert bench.after(9.0) == (bytes_, [success])


def test_past_its_deadline_it_does_not_begin() -> None:
    bench = Bench(Fate("late", begin_after_s=5.0))
    assert bench.after(0.9) == (0, [])
    assert bench.after(0.2) == (0, [False])


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_one_that_fails_has_copied_a_share(share: float) -> None:
    assert Bench(Fate("fails", ending=Ending.FAILED, share=share)).after(0) == (int(128 * share), [False])


def test_one_that_never_ends_can_be_waited_for_in_vain_and_ends_when_it_is_released() -> None:
    bench = Bench(Fate("never ends", ending=Ending.NEVER, share=0.5, deaf=True))
    began_s = bench.clock.monotonic()
    assert not bench.device.wait([JOB], 0.25)
    assert bench.clock.monotonic() == began_s + 0.25
    assert bench.device.stuck_ids == [JOB]
    bench.device.release()
    assert bench.after(0) == (128, [True])


def test_a_wait_takes_as_long_as_the_copy() -> None:
    bench = Bench(Fate("slow", begin_after_s=0.5, piece_s=0.1))
    began_s = bench.clock.monotonic()
    assert bench.device.wait([JOB], 5.0)
    assert bench.clock.monotonic() == pytest.approx(began_s + 0.8)


def test_one_that_outlasts_a_flush_ends_well_long_after_it_was_cancelled() -> None:
    plan = FaultPlan(random.Random(0), {"outlasts": 1.0}, flush_limit_s=0.5)
    for _ in range(20):
        fate = plan.draw()
        bench = Bench(fate)
        bench.clock.advance(fate.begin_after_s)
        assert not bench.device.wait([JOB], 0.25)
        bench.device.cancel([JOB])
        assert not bench.device.wait([JOB], 0.25)
        assert bench.after(10 * 0.5) == (128, [True])


def test_who_waits_and_waits_for_one_that_never_ends_is_told() -> None:
    bench = Bench(Fate("never ends", ending=Ending.NEVER, share=0.5, deaf=True))
    waits = int(ENDLESS_WAIT_S)
    assert not any(bench.device.wait([JOB], 1.0) for _ in range(waits))
    with pytest.raises(EndlessWaitError):
        bench.device.wait([JOB], 1.0)


def test_who_does_something_between_waits_may_wait_again() -> None:
    bench = Bench(Fate("never ends", ending=Ending.NEVER, share=0.5, deaf=True))
    for _ in range(2 * int(ENDLESS_WAIT_S)):
        assert not bench.device.wait([JOB], 1.0)
        bench.device.progress()
