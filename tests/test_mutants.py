"""The list of mutants fits the code: ``scripts/mutants.py`` can break each of its lines."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutants.py"
SPEC = importlib.util.spec_from_file_location("mutants", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
mutants = importlib.util.module_from_spec(SPEC)
sys.modules["mutants"] = mutants  # where dataclasses look for their module
SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_changes_one_line_of_a_file_that_still_compiles(mutant: mutants.Mutant) -> None:
    before = (mutants.SOURCE / "kvtide" / mutant.file).read_text(encoding="utf-8")
    after = mutant.applied(before)
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    assert sum(one != other for one, other in pairs) == 1
    compile(after, mutant.file, "exec")


def test_every_kind_of_failure_has_two_mutants_and_every_mutant_its_name() -> None:
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    kinds = Counter(mutant.kind for mutant in mutants.MUTANTS)
    assert set(kinds) == {f"F{number}" for number in range(1, 11)}
    assert min(kinds.values()) >= 2


def test_a_line_that_is_not_there_once_puts_the_list_out_of_date() -> None:
    mutant = mutants.Mutant("name", "F1", "file.py", "return 1", "return 2", "what breaks")
    assert mutant.applied("def one():\n    return 1\n") == "def one():\n    return 2\n"
    for text in ("def one():\n    return 3\n", "return 1\nreturn 1\n"):
        with pytest.raises(mutants.OutOfDateError):
            mutant.applied(text)
