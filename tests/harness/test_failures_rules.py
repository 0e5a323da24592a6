"""The table of failures is complete: tests, rules and ``docs/failures.md`` name the same."""

import re
from pathlib import Path

import pytest
from failure_rules import RULES, Rule
from mutants import SOURCE

HERE = Path(__file__).parent
TESTS = HERE.parent
PAGE = HERE.parents[1] / "docs" / "failures.md"


def find_tests(pattern: str) -> dict[str, str]:
    """Test by name, and the file it is in."""
    return {
        name: file.name
        for file in sorted(HERE.glob(pattern))
        if file.name != Path(__file__).name
        for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }


def named_in_page() -> tuple[list[str], list[str]]:
    """Tests that stand on a line of the connector, and those of shared stores."""
    connector, stores = PAGE.read_text().split("\n## Stores that many servers share\n")
    return re.findall(r"`(test_\w+)`", connector), re.findall(r"`(test_\w+)`", stores)


def test_every_test_of_a_failure_has_a_rule_and_every_rule_a_test() -> None:
    assert {f"{file}::{name}" for name, file in find_tests("test_failures_*.py").items()} <= {
        rule.test for rule in RULES
    }
    everywhere = find_tests("test_*.py")
    for rule in RULES:
        file, _, name = rule.test.partition("::")
        assert everywhere[name] == file


def test_the_page_names_each_test_that_has_a_rule_and_no_other() -> None:
    named, _ = named_in_page()
    assert set(named) == {rule.test.partition("::")[2] for rule in RULES}


def test_the_page_names_tests_of_shared_stores_that_there_are_each_once() -> None:
    _, named = named_in_page()
    there = {
        name
        for folder in ("tiers", "servers", "harness", "cli")
        for file in (TESTS / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }
    assert sorted(named) == sorted(set(named) & there)
    assert len(named) > 40


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.test.partition("::test_")[2])
def test_a_rule_breaks_one_line_and_what_is_left_compiles(rule: Rule) -> None:
    before = (SOURCE / "kvtide" / rule.mutant.file).read_text(encoding="utf-8")
    after = rule.mutant.applied(before)
    assert sum(one != other for one, other in zip(before.splitlines(), after.splitlines(), strict=True)) == 1
    compile(after, rule.mutant.file, "exec")


def test_the_public_thread_of_a_sample_stands_in_its_row_and_beside_its_test() -> None:
    rows = PAGE.read_text().splitlines()
    for rule in RULES:
        threads = re.findall(r"#\d+", rule.sample)
        file, _, name = rule.test.partition("::")
        text = (HERE / file).read_text()
        body = text[text.index(f"def {name}(") :].partition("\ndef ")[0]
        for thread in threads:
            assert any(thread in row and name in row for row in rows), f"{rule.sample}: {name}"
            assert thread in body, f"{thread} is not named in {name}"
