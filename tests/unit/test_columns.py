"""Columns of values per run: every run has its place, and no two columns are copied for the same run."""

import random

import pytest

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.policies import ARCPolicy, LRUPolicy
from kvtide.policies.columns import AHEAD, PIECE, Columns
from kvtide.testing.workloads import chained_hashes


def lengths_of(columns: Columns) -> list[int]:
    return [len(column) for column in columns._columns]


def store_one(manager: CPUOffloadingManager, prompt: int) -> None:
    run, context = ChunkRun(chained_hashes((prompt,)), 0, 1, 0, 1), ReqContext("one", visit=prompt)
    output = manager.prepare_store(run, context)
    assert len(output.keys_to_store) == 1
    manager.complete_store(output.keys_to_store, output.store_spec, context, success=True)


def eight() -> Columns:
    columns = Columns()
    for typecode in ("i", "i", "q", "B", "H", "i", "q"):
        columns.ints(typecode)
    columns.floats()
    return columns


def test_at_most_one_column_grows_for_a_run_and_each_has_a_place_for_it() -> None:
    columns = eight()
    columns.cover(0)
    grown = 0
    for run in range(1, 4 * PIECE):
        before = lengths_of(columns)
        columns.cover(run)
        after = lengths_of(columns)
        assert min(after) > run
        changed = sum(a != b for a, b in zip(before, after, strict=True))
        assert changed <= 1, f"run {run}: {changed} columns have grown"
        grown += changed
    assert grown >= 3 * len(after), "all of them have grown, again and again"


def test_more_columns_than_there_is_time_for_have_their_places_all_the_same() -> None:
    columns = Columns()
    many = [columns.ints() for _ in range(3 * AHEAD)]
    for run in range(3 * PIECE):
        columns.cover(run)
        assert all(len(column) > run for column in many)


@pytest.mark.parametrize("seed", range(5))
def test_what_was_written_stays_whatever_is_covered_after_it_and_the_rest_is_nothing(seed: int) -> None:
    chance, columns = random.Random(seed), Columns()
    numbers, times = columns.ints("q"), columns.floats()
    wrote: dict[int, int] = {}
    for _ in range(300):
        run = chance.choice((chance.randrange(50), chance.randrange(20_000)))
        columns.cover(run)
        numbers[run] = times[run] = wrote[run] = chance.getrandbits(40)
    assert {run: value for run, value in enumerate(numbers) if value} == wrote
    assert {run: value for run, value in enumerate(times) if value} == wrote


def test_a_column_that_comes_late_has_the_places_of_the_others() -> None:
    columns = Columns()
    columns.ints()
    columns.cover(2 * PIECE)
    assert columns.ints("B")[2 * PIECE] == 0


@pytest.mark.parametrize("policy", [LRUPolicy, ARCPolicy])
def test_books_that_fill_up_let_one_column_of_theirs_and_one_of_the_policys_grow_at_a_time(policy) -> None:
    manager = CPUOffloadingManager(policy())
    manager.grow(4 * PIECE)
    tree, listed = manager.catalog.tree.columns, manager._policy._columns
    store_one(manager, 0)
    for prompt in range(1, 3 * PIECE):
        before = lengths_of(tree), lengths_of(listed)
        store_one(manager, prompt)
        after = lengths_of(tree), lengths_of(listed)
        for old, new in zip(before, after, strict=True):
            assert sum(a != b for a, b in zip(old, new, strict=True)) <= 1, f"prompt {prompt}"
    assert manager.used_count == 3 * PIECE
    manager.check_invariants(idle=True)
