"""Sweeps: the same figures from one process and from several, and nobody left behind."""

import multiprocessing
import os
import random
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest
from traced import traced

from kvtide.errors import KVTideError
from kvtide.sim.accesses import Accesses
from kvtide.sim.fractions import OPTIMUM, capacity_of, known, sweep
from kvtide.sim.manager_only import manager_of, replay
from kvtide.sim.optimum import NextUses, optimum, unbounded

FRACTIONS = ("0.02", "0.1", "0.50", "1")


@pytest.fixture(scope="module")
def chats() -> Accesses:
    """Sessions that begin alike, grow and come back, 150 requests of up to 24 blocks."""
    chance = random.Random(8)
    sessions = [[chance.randrange(3), *chance.choices(range(1000), k=3)] for _ in range(40)]
    asked = []
    for _ in range(150):
        session = sessions[int(chance.random() ** 2 * len(sessions))]
        session += chance.choices(range(1000), k=2)
        del session[24:]
        asked.append(tuple(session))
    return traced(asked)


@pytest.mark.parametrize(
    ("fraction", "unique", "blocks"),
    [("0.005", 170_899, 854), ("0.4", 170_899, 68_359), ("0.29", 100, 29), ("1e-2", 799, 7), ("1", 7, 7)],
)
def test_a_fraction_is_so_many_blocks_and_no_float_loses_one(fraction: str, unique: int, blocks: int) -> None:
    assert capacity_of(fraction, unique) == blocks
    assert blocks <= Decimal(fraction) * unique < blocks + 1


def test_a_sweep_says_of_each_pair_what_its_replay_says(chats: Accesses) -> None:
    passed: list[int] = []
    found = sweep(chats, known(), FRACTIONS, 1, passed.append)
    assert list(found.outcomes) == list(known())
    assert found.capacities == {one: int(Decimal(one) * chats.unique_count) for one in FRACTIONS}
    assert found.unbounded == unbounded(chats)
    uses = NextUses(chats)
    for policy, outcomes in found.outcomes.items():
        assert list(outcomes) == list(FRACTIONS)
        for fraction, outcome in outcomes.items():
            size = found.capacities[fraction]
            same = optimum(uses, size) if policy == OPTIMUM else replay(chats, manager_of(policy, size))
            assert outcome == same
    assert sum(passed) == len(known()) * len(FRACTIONS) * chats.request_count
    assert found.outcomes[OPTIMUM]["1"].hit_ratio == found.unbounded.hit_ratio > 0.5


def test_two_processes_say_the_same(chats: Accesses) -> None:
    passed: list[int] = []
    others = multiprocessing.active_children()
    found = sweep(chats, ("lru", "arc"), FRACTIONS, 2, passed.append)
    assert found == sweep(chats, ("lru", "arc"), FRACTIONS, 1)
    assert sum(passed) == 2 * len(FRACTIONS) * chats.request_count
    assert multiprocessing.active_children() == others


def test_a_process_that_dies_is_said_and_leaves_nobody_behind(chats: Accesses) -> None:
    others = multiprocessing.active_children()

    def die(_: int) -> None:
        for one in multiprocessing.active_children():
            if one not in others:
                one.kill()

    with pytest.raises(KVTideError, match="has ended before its time"):
        sweep(chats, ("lru", "arc"), FRACTIONS, 2, die)
    assert multiprocessing.active_children() == others


@pytest.mark.parametrize("when", ["while nothing has ended", "when one has"])
def test_who_stops_a_sweep_waits_for_nobody(chats: Accesses, when: str) -> None:
    others = multiprocessing.active_children()

    def interrupt(count: int) -> None:
        if bool(count) is (when == "when one has"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(chats, ("lru", "arc"), FRACTIONS, 2, interrupt)
    assert multiprocessing.active_children() == others


SWEEP_AND_WAIT = """
import multiprocessing, time
from traced import traced
from kvtide.sim.fractions import sweep

def wait(_):
    print(*(one.pid for one in multiprocessing.active_children()), flush=True)
    time.sleep(3600)

sweep(traced([(1, 2), (1, 3)]), ("lru", "arc"), ("1",), 2, wait)
"""


def test_processes_end_with_the_one_that_began_them_however_that_ends() -> None:
    path = os.pathsep.join((*sys.path, str(Path(__file__).parent)))
    program = [sys.executable, "-c", SWEEP_AND_WAIT]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as begun:
        assert begun.stdout is not None
        pids = [int(pid) for pid in begun.stdout.readline().split()]
        begun.kill()
    assert len(pids) == 2
    while any(map(is_running, pids)):
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
