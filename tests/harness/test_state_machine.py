"""A state machine over the model engine: nothing breaks, and what is broken is shrunk to a short script."""

import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtide.vllm.testing.machine import EngineMachine

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import mutants

COMMON = settings(
    stateful_step_count=40, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("machine", COMMON, max_examples=300, derandomize=True)
settings.register_profile("machine-long", COMMON, max_examples=20_000, stateful_step_count=80)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "machine")
"""``machine-long`` goes elsewhere each time."""


class Counted(EngineMachine):
    """Remembers what happened in all lives."""

    happened: Counter[str] = Counter()

    def teardown(self) -> None:
        super().teardown()
        self.happened.update(self.life.happened)


def test_no_order_of_events_breaks_a_promise() -> None:
    Counted.happened.clear()
    run_state_machine_as_test(Counted, settings=settings.get_profile(PROFILE))
    print(dict(Counted.happened))


def code_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """All functions within."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from code_of(constant)


def sabotage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply one of ``scripts/mutants.py`` in this process: one function gets other code."""
    (mutant,) = (one for one in mutants.MUTANTS if one.name == name)
    before = (mutants.SOURCE / "kvtide" / mutant.file).read_text(encoding="utf-8")
    whole, broken = (compile(text, mutant.file, "exec") for text in (before, mutant.applied(before)))
    known = {one.co_qualname: one for one in code_of(whole)}
    changed = [one for one in code_of(broken) if one != known.get(one.co_qualname) and "<" not in one.co_qualname]
    code = max(changed, key=lambda one: one.co_qualname.count("."))  # a function, not the class it is in
    target: Any = import_module("kvtide." + mutant.file.removesuffix(".py").replace("/", "."))
    for part in code.co_qualname.split("."):
        target = getattr(target, part)
    monkeypatch.setattr(target, "__code__", code)


def script_of(error: BaseException) -> list[str]:
    """What Hypothesis prints: one line for each event."""
    return [line for note in getattr(error, "__notes__", ()) for line in note.splitlines() if "state" in line]


@pytest.mark.parametrize("name", ["fence-dropped-on-abort"])
def test_a_sabotage_is_found_and_shrunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(name, monkeypatch)
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(EngineMachine, settings=settings.get_profile("machine"))
    script = script_of(caught.value)
    print(*script, sep="\n")
    assert 3 < len(script) <= 12
