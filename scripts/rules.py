#!/usr/bin/env python3
"""Take each rule away, one at a time, and see whether its test fails.

``scripts/rules.py`` or ``make mutants``. The table is ``tests/harness/failure_rules.py``: a sample of the
field, its test and the line of the connector that the test stands on. Each line is broken in a copy of
``src`` and that one test runs against the copy. First all tests run against an unchanged copy, and must pass.

Ends with 0 when every test failed without its rule, 1 when not, 2 when the table does not fit the code any
more, the unchanged code does not pass, or a test cannot even be run.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "harness"
sys.path[:0] = [str(ROOT / "scripts"), str(TESTS)]

from failure_rules import RULES, Rule  # noqa: E402
from mutants import SOURCE, OutOfDateError, check_applies, mutate  # noqa: E402

LIMIT_S = 120.0
"""A test that has not ended by then is ended, and has failed."""

PASSED, FAILED, LATE = 0, 1, -1

HEAVY = (
    "pytest",
    "hypothesis",
    "torch",
    "transformers",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)
"""Imported once: what a child inherits, it need not import. Nothing of kvtide is among it."""


@dataclass(slots=True)
class Child:
    """A process that runs tests against a copy of the code.

    Attributes:
        rule: Broken there; None for all tests against unchanged code.
        folder: With the copy, and what pytest said.
        began_s: On the monotonic clock.
    """

    rule: Rule | None
    folder: Path
    began_s: float

    @property
    def is_late(self) -> bool:
        """Whether it has had its time; the unchanged code gets longer: it has to pass."""
        return time.monotonic() - self.began_s > (LIMIT_S if self.rule is not None else 10 * LIMIT_S)

    def said(self) -> str:
        """The first error that pytest names."""
        lines = (self.folder / "said").read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
        return errors[0] if errors else (lines[-1] if lines else "nothing")


def begin(rule: Rule | None, tests: Sequence[str]) -> tuple[int, Child]:
    """Fork a child that runs these tests with this rule broken."""
    folder = Path(tempfile.mkdtemp(prefix="kvtide-rule-"))
    source = folder / "src"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    if rule is not None:
        mutate(rule.mutant, source)
    child = Child(rule, folder, time.monotonic())
    sys.stdout.flush()
    if process_id := os.fork():
        return process_id, child
    status = 3  # as pytest's own internal errors
    try:
        status = _run(source, folder / "said", tests)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(source: Path, said: Path, tests: Sequence[str]) -> int:
    """Run tests in this process, which is a child, against the code at ``source``."""
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, str(source))
    kvtide = importlib.import_module("kvtide")
    assert str(kvtide.__file__).startswith(str(source)), "another copy of the code was imported"
    pytest = importlib.import_module("pytest")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    # What the children inherit, pytest's own plugins among it, is imported already.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os.chdir(ROOT)
    return int(pytest.main([*options, *(str(TESTS / test) for test in tests)]))


def run_all(jobs: list[tuple[Rule | None, list[str]]], at_once: int) -> list[tuple[Child, int]]:
    """Run children, some at a time, and tell how each ended."""
    waiting, running, ended = list(jobs), dict[int, Child](), []
    while waiting or running:
        while waiting and len(running) < at_once:
            process_id, child = begin(*waiting.pop(0))
            running[process_id] = child
        process_id, status = os.waitpid(-1, os.WNOHANG)
        if process_id:
            child = running.pop(process_id)
            code = os.waitstatus_to_exitcode(status)
            ended.append((child, LATE if code < 0 and child.is_late else code))
            _tell(*ended[-1])
            continue
        for process_id, child in running.items():
            if child.is_late:
                os.kill(process_id, 9)
        time.sleep(0.05)
    return ended


def _tell(child: Child, code: int) -> None:
    seconds = time.monotonic() - child.began_s
    if child.rule is None:
        print(f"unchanged: {child.said()}, {seconds:.0f} s", flush=True)
        return
    outcome = {PASSED: "DOES NOT FAIL", FAILED: "fails", LATE: "does not end"}.get(
        code, f"CANNOT RUN ({code})"
    )
    said = f": {child.said()[:100]}" if code != PASSED else ""
    print(f"{child.rule.sample}: {child.rule.test}\n    {outcome}{said} ({seconds:.1f} s)", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="TEXT", help="rules whose test or sample has this")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (2)")
    asked = parser.parse_args(arguments)
    chosen = [
        rule
        for rule in RULES
        if not asked.only or any(text in f"{rule.sample} {rule.test}" for text in asked.only)
    ]
    if not chosen:
        parser.error(f"no rule has {', '.join(asked.only)} in its sample or test")
    try:
        check_applies([rule.mutant for rule in RULES])
    except OutOfDateError as error:
        print(f"the table of rules is out of date: {error}", file=sys.stderr)
        return 2
    for module in HEAVY:
        importlib.import_module(module)
    assert "kvtide" not in sys.modules, "the children would inherit the code that is to be broken"
    tests = list(dict.fromkeys(rule.test for rule in chosen))
    ((unchanged, code),) = run_all([(None, tests)], 1)
    sys.stdout.write((unchanged.folder / "said").read_text())
    shutil.rmtree(unchanged.folder)
    if code != PASSED:
        print("the unchanged code does not pass", file=sys.stderr)
        return 2
    ended = run_all([(rule, [rule.test]) for rule in chosen], asked.jobs)
    for child, _ in ended:
        shutil.rmtree(child.folder)
    without = sum(code in (FAILED, LATE) for _, code in ended)
    print(f"{without} of {len(chosen)} tests fail without their rule")
    if any(code not in (PASSED, FAILED, LATE) for _, code in ended):
        return 2
    return 0 if without == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
