"""A state machine over the model engine: nothing breaks, and what is broken is shrunk to a short script."""

import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtide.vllm.testing import WrongBytesError
from kvtide.vllm.testing.machine import EngineMachine
from kvtide.vllm.testing.machine_life import Sketch

COMMON = settings(
    stateful_step_count=40,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),  # explaining costs as many runs as all the rest
)
settings.register_profile("machine", COMMON, max_examples=300, derandomize=True)
settings.register_profile("machine-long", COMMON, max_examples=20_000, stateful_step_count=80)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "machine")
"""``machine`` is the same each time, ``machine-long`` goes elsewhere."""

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


def test_a_failed_store_that_is_believed_is_found_and_shrunk_to_a_script_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as broken:
        sabotage("failed-store-visible", broken)
        with pytest.raises(WrongBytesError) as caught:
            run_state_machine_as_test(EngineMachine, settings=settings.get_profile("machine"))
        script = script_of(caught.value)
        print(*script, sep="\n")
        assert len(script) <= 12
        assert any("fail(" in line for line in script)
        with pytest.raises(WrongBytesError):
            run_script(script)
    run_script(script)  # what is not broken passes it
