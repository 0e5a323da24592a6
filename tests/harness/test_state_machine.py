"""A state machine over the model engine: nothing breaks, and what is broken is shrunk to a short script."""

import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtide.jobs import JobId
from kvtide.testing import VirtualClock
from kvtide.transfer.plans import CopyPlan
from kvtide.vllm.testing.machine import EngineMachine
from kvtide.vllm.testing.machine_copies import WAITS, LateRanks, SteeredDevice
from kvtide.vllm.testing.machine_life import Sketch
from kvtide.vllm.testing.promises import HangError, LeakError

COMMON = settings(
    stateful_step_count=40,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),  # explaining costs as many runs as all the rest
)
settings.register_profile("machine", COMMON, max_examples=150, derandomize=True)
settings.register_profile("machine-long", COMMON, max_examples=20_000, stateful_step_count=80)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "machine")
"""``machine`` is the same each time, ``machine-long`` goes elsewhere."""

SHORT = settings(settings.get_profile("machine"), stateful_step_count=20)
"""For what is easily found: half as long, and shrunk in half the time."""

MUST_HAPPEN = (
    *(f"ask: {kind}" for kind in ("stem", "long", "repeat", "session", "one token")),
    *(f"abort: {phase}" for phase in ("waiting", "running", "preempted", "waiting_for_remote_kvs")),
    *(f"copy {ending}" for ending in ("finished", "failed", "half way", "wedged")),
    *(f"reset: {what} {how}" for what in ("device", "connector", "running") for how in ("done", "refused")),
    "preemption",
    "flush",
    "job: store",
    "job: load",
    "load behind a store",
    "load checked",
    "late answer",
    "sibling done",
    "sibling failed",
    "results early",
    "pause",
    "time passes",
    "rested beside a wedged copy",
    "hit again",
)
"""Lives in which one of these did not happen prove less than they say."""


class Counted(EngineMachine):
    """Remembers what happened in all lives."""

    happened: ClassVar[Counter[str]] = Counter()

    def teardown(self) -> None:
        super().teardown()
        self.happened.update(self.life.happened)


def test_no_order_of_events_breaks_a_promise() -> None:
    Counted.happened.clear()
    run_state_machine_as_test(Counted, settings=settings.get_profile(PROFILE))
    assert [name for name in MUST_HAPPEN if not Counted.happened[name]] == []


# -- whether it can fail ------------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutants.py"


def functions_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """All functions and classes within, but for those that have no name to reach them by."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and "<" not in constant.co_qualname:
            yield constant
            yield from functions_of(constant)


def sabotage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply one of ``scripts/mutants.py`` in this process: one function gets other code."""
    spec = util.spec_from_file_location("mutants_in_process", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    mutants = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants_in_process", mutants)  # where dataclasses look for their module
    spec.loader.exec_module(mutants)
    (mutant,) = (one for one in mutants.MUTANTS if one.name == name)
    before = (mutants.SOURCE / "kvtide" / mutant.file).read_text(encoding="utf-8")
    whole, broken = (compile(text, mutant.file, "exec") for text in (before, mutant.applied(before)))
    known = {one.co_qualname: one for one in functions_of(whole)}
    changed = [one for one in functions_of(broken) if one != known[one.co_qualname]]
    code = max(changed, key=lambda one: one.co_qualname.count("."))  # the function, not the class it is in
    target: Any = import_module("kvtide." + mutant.file.removesuffix(".py").replace("/", "."))
    for part in code.co_qualname.split("."):
        target = getattr(target, part)
    monkeypatch.setattr(target, "__code__", code)


def script_of(error: BaseException) -> list[str]:
    """What Hypothesis prints: one line for each event."""
    lines = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    return [line for line in lines if line.startswith("state")]


def run_script(script: list[str]) -> None:
    """Run what was printed, without Hypothesis."""
    names: dict[str, Any] = {"EngineMachine": EngineMachine, "Sketch": Sketch}
    try:
        exec("\n".join(script[:-1]), names)
    finally:
        names["state"].teardown()


def test_a_fence_that_goes_with_its_request_is_found_and_shrunk_to_a_script_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as broken:
        sabotage("fence-dropped-on-abort", broken)
        with pytest.raises(LeakError) as caught:
            run_state_machine_as_test(EngineMachine, settings=SHORT)
        script = script_of(caught.value)
        print(*script, sep="\n")
        assert len(script) <= 2 + 6  # how it begins and ends, and events
        with pytest.raises(LeakError):
            run_script(script)
    run_script(script)  # what is not broken passes it


# -- who is told ----------------------------------------------------------------------------------------

JOB = JobId(1)


class Bench:
    """One copy of 128 bytes that waits to be told."""

    def __init__(self, obliging: bool = False) -> None:
        self.clock = VirtualClock()
        self.device = SteeredDevice(self.clock, held=True, obliging=obliging)
        self.source, self.target = np.arange(1, 129, dtype=np.uint8), np.zeros(128, dtype=np.uint8)
        address, size = np.array([self.source.ctypes.data]), np.array([128])
        self.device.submit(JOB, CopyPlan(address, np.array([self.target.ctypes.data]), size), 10.0)

    def after(self, seconds: float) -> tuple[int, list[bool]]:
        """Bytes that have arrived, and how copies have ended since the last look."""
        self.clock.advance(seconds)
        ended = [outcome.success for outcome in self.device.poll()]
        return int(np.count_nonzero(self.target)), ended


def test_a_copy_moves_when_it_is_told_to() -> None:
    bench = Bench()
    assert bench.after(9.0) == (0, [])
    bench.device.half(JOB)
    assert bench.after(9.0) == (64, [])
    bench.device.finish(JOB)
    assert bench.after(0.0) == (128, [True])


def test_a_copy_that_is_not_told_anything_ends_by_its_deadline() -> None:
    assert Bench().after(11.0) == (0, [False])


def test_a_copy_half_way_listens_and_a_wedged_one_does_not() -> None:
    for stop, ended in ((SteeredDevice.half, [False]), (SteeredDevice.wedge, [])):
        bench = Bench()
        stop(bench.device, JOB)
        bench.device.cancel({JOB})
        assert bench.after(0.0) == (64, ended)


def test_a_copy_that_is_told_to_fail_moves_nothing_more() -> None:
    bench = Bench()
    bench.device.half(JOB)
    bench.device.fail(JOB)
    assert bench.after(0.0) == (64, [False])


def test_a_wait_ends_an_obliging_copy_and_takes_its_time_with_another() -> None:
    obliging, other = Bench(obliging=True), Bench()
    assert obliging.device.wait({JOB}, 0.5)
    assert obliging.after(0.0) == (128, [True])
    before_s = other.clock.monotonic()
    assert not other.device.wait({JOB}, 0.5)
    assert other.clock.monotonic() == before_s + 0.5


def test_waiting_again_and_again_is_a_hang() -> None:
    bench = Bench()
    bench.device.wedge(JOB)
    for _ in range(WAITS):
        assert not bench.device.wait({JOB}, 0.1)
    with pytest.raises(HangError):
        bench.device.wait({JOB}, 0.1)


def test_a_rank_that_is_late_is_late_once() -> None:
    ranks = LateRanks(2)
    ranks.late.add(1)
    assert [ranks.random() < LateRanks.SHARE for _ in range(6)] == [False, True, False, False, False, False]
