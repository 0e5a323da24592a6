"""How many threads copy, and where: by what is bound, what is shared, and what the container grants."""

import math
import os
import threading
from pathlib import Path

import pytest

from kvtide.transfer.cores import MOST_THREADS, CopyCores, FoundCores, copy_cores, found_cores

HYPERTHREADS = {core: frozenset({core % 64, core % 64 + 64}) for core in range(128)}


def cores(*ranges: range) -> frozenset[int]:
    return frozenset(core for one in ranges for core in one)


def bound(model: frozenset[int], others: frozenset[int] = frozenset(), count: int = 64) -> FoundCores:
    return FoundCores(frozenset(range(count)), model, others)


def test_a_model_on_every_core_leaves_one_thread_that_floats_like_it() -> None:
    assert copy_cores(0, 64, 1, bound(frozenset())) == CopyCores(1, frozenset(range(64)))
    assert copy_cores(0, 2, 1, bound(frozenset(range(2)), count=2)) == CopyCores(1, frozenset({0, 1}))


@pytest.mark.parametrize(("left", "threads"), [(1, 1), (2, 1), (3, 2), (5, 4), (20, MOST_THREADS)])
def test_of_the_cores_a_bound_model_leaves_one_is_the_schedulers(left: int, threads: int) -> None:
    found = bound(cores(range(64 - left)))
    assert copy_cores(0, 64 - left, 1, found) == CopyCores(threads, cores(range(64 - left, 64)))


def test_a_hyperthread_beside_the_model_is_the_models() -> None:
    # As vLLM binds on 64 cores of two threads each: one thread a core, the last cores left over.
    found = FoundCores(frozenset(range(128)), cores(range(64, 124)), together=HYPERTHREADS)
    assert copy_cores(0, 60, 1, found) == CopyCores(3, cores(range(60, 64), range(124, 128)))


def test_cores_of_other_ranks_are_not_left_over_and_what_is_gets_shared() -> None:
    nodes = {core: core // 32 for core in range(64)}
    found = FoundCores(frozenset(range(64)), cores(range(26)), cores(range(32, 58)), nodes=nodes)
    assert copy_cores(0, 26, 2, found) == CopyCores(4, cores(range(26, 32)))
    crowded = FoundCores(frozenset(range(64)), cores(range(30)), cores(range(32, 62)), nodes=nodes)
    assert copy_cores(0, 30, 2, crowded) == CopyCores(1, cores(range(30, 32)))


def test_where_nothing_is_left_on_the_own_node_the_others_is_better_than_the_models() -> None:
    nodes = {core: core // 32 for core in range(64)}
    found = FoundCores(frozenset(range(64)), cores(range(32)), nodes=nodes)
    assert copy_cores(0, 32, 1, found) == CopyCores(4, cores(range(32, 64)))


@pytest.mark.parametrize(
    ("model_threads", "ranks", "threads"), [(16, 1, 4), (60, 1, 3), (28, 2, 3), (64, 1, 1)]
)
def test_threads_that_nobody_binds_are_counted(model_threads: int, ranks: int, threads: int) -> None:
    assert copy_cores(0, model_threads, ranks, bound(frozenset())).thread_count == threads


def test_a_container_grants_less_than_there_is() -> None:
    found = FoundCores(frozenset(range(64)), cores(range(8)), quota_cores=10.0)
    assert copy_cores(0, 8, 1, found).thread_count == 1
    assert copy_cores(0, 2, 1, FoundCores(frozenset(range(64)), quota_cores=5.5)).thread_count == 2


def test_a_number_that_was_given_is_taken_and_stays_off_the_models_cores() -> None:
    assert copy_cores(7, 60, 1, bound(cores(range(60)))) == CopyCores(7, cores(range(60, 64)))


def test_where_nobody_can_tell_it_is_one_thread_anywhere() -> None:
    assert copy_cores(0, 1, 1, FoundCores(frozenset())) == CopyCores(1, frozenset())


def test_what_is_here_is_found() -> None:
    found = found_cores()
    assert found.allowed == os.sched_getaffinity(0)
    assert found.quota_cores > 0


def test_a_thread_that_is_bound_is_seen_from_another() -> None:
    one = min(os.sched_getaffinity(0))
    ready, end = threading.Event(), threading.Event()

    def be_bound() -> None:
        os.sched_setaffinity(0, {one})
        ready.set()
        end.wait(10)

    thread = threading.Thread(target=be_bound)
    thread.start()
    assert ready.wait(10)
    found = found_cores()
    end.set()
    thread.join()
    alone = len(found.allowed) == 1  # then it is no narrower than the process
    assert found.bound == (frozenset() if alone else {one})


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2.5),
        ("0::/../elsewhere\n", {"cpu.max": "800000 100000"}, 8.0),
        ("0::/a\n", {}, math.inf),
        (
            "4:cpu,cpuacct:/job\n2:memory:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000"},
            1.5,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_the_tightest_quota_up_to_the_root_counts(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert found_cores(tmp_path).quota_cores == quota
