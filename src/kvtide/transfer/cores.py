"""How many threads copy, and on which cores, so that the model keeps its own.

Knows which cores there are (``/sys``), which of them threads of this and of its sister processes are bound to
(``/proc``), and how many the container grants. Starts no thread and binds none. Linux.
"""

import contextlib
import math
import multiprocessing
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_THREADS = 4
"""One thread copies 10 to 20 GB/s. On cores that are free more of them still take from the model what a CPU
has least of when it decodes: memory bandwidth."""

SCHEDULER_CORES = 1
"""Of the cores that are left over, so many are the scheduler's process's."""


@dataclass(frozen=True, slots=True)
class CopyCores:
    """Who copies one way.

    Attributes:
        thread_count: At least 1.
        cores: Logical cores on which the threads may run; empty where nobody could tell.
    """

    thread_count: int
    cores: frozenset[int]


@dataclass(frozen=True, slots=True)
class FoundCores:
    """What there is.

    Attributes:
        allowed: Logical cores that this process was given.
        bound: Those that some thread of this process is bound to: the model's, if its threads are.
        others: Those that threads of its sister processes are bound to: other ranks.
        together: The logical cores that are one physical core, for each that is not alone.
        nodes: NUMA node of each, where there are several.
        quota_cores: Processor time over time that the container grants.
    """

    allowed: frozenset[int]
    bound: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    together: Mapping[int, frozenset[int]] = field(default_factory=dict)
    nodes: Mapping[int, int] = field(default_factory=dict)
    quota_cores: float = math.inf


def copy_cores(asked: int, model_threads: int, rank_count: int, found: FoundCores | None = None) -> CopyCores:
    """Choose.

    A core next to whose hyperthread the model computes is the model's. Where its threads are bound, copies
    keep to the cores that are left over, those of its own NUMA node if there are any; where they are not,
    copies float like them, and are as many as cores are left over by number.

    Args:
        asked: ``copy_threads``; 0 leaves the number to us.
        model_threads: Of one rank.
        rank_count: Ranks that share the machine, at most.
        found: What there is; None to look.
    """
    found = found_cores() if found is None else found
    left = found.allowed - _whole(found.bound | found.others, found.together)
    if found.bound and left:
        free = _physical(left, found.together) / rank_count - SCHEDULER_CORES
        near = {found.nodes.get(core) for core in found.bound}
        cores = frozenset(core for core in left if found.nodes.get(core) in near) or left
    else:
        free = 0 if found.bound else math.inf
        cores = found.allowed
    granted = min(_physical(found.allowed, found.together), found.quota_cores)
    free = min(free, granted / rank_count - model_threads - SCHEDULER_CORES)
    return CopyCores(asked or max(1, min(MOST_THREADS, math.floor(free))), cores)


def _whole(cores: Collection[int], together: Mapping[int, frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*(together.get(core, {core}) for core in cores))


def _physical(cores: Collection[int], together: Mapping[int, frozenset[int]]) -> int:
    return len({min(together.get(core, {core})) for core in cores})


def found_cores(root: Path = Path("/")) -> FoundCores:
    """Look at this machine. What cannot be read is left out.

    Args:
        root: Where ``proc`` and ``sys`` are found.
    """
    mine = list(_masks(os.getpid(), root))
    parent = multiprocessing.parent_process()
    whole = frozenset().union(*mine)
    others: list[frozenset[int]] = []
    if parent is not None and parent.pid is not None:
        # A worker's threads are bound while it starts, all of them at times; who started it was not.
        with contextlib.suppress(OSError):
            whole |= os.sched_getaffinity(parent.pid)
        for pid in _children(parent.pid, root):
            if pid != os.getpid():
                others += _masks(pid, root)
    cpus = root / "sys/devices/system/cpu"
    together = {core: _listed(cpus / f"cpu{core}/topology/thread_siblings_list") for core in whole}
    return FoundCores(
        whole,
        frozenset().union(*(mask for mask in mine if mask < whole)),
        frozenset().union(*(mask for mask in others if mask < whole)),
        {core: alike for core, alike in together.items() if len(alike) > 1},
        {
            core: int(node.name.removeprefix("node"))
            for node in (root / "sys/devices/system/node").glob("node[0-9]*")
            for core in _listed(node / "cpulist")
        },
        _quota_cores(root),
    )


def _masks(pid: int, root: Path) -> Iterator[frozenset[int]]:
    """Find on which cores each thread of a process may run."""
    with contextlib.suppress(OSError):
        for task in sorted((root / f"proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # it has ended
                yield frozenset(os.sched_getaffinity(int(task.name)))


def _children(pid: int, root: Path) -> Iterator[int]:
    for entry in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            # The name in brackets may hold spaces and brackets; what follows the last one does not.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                yield int(entry.name)


def _listed(file: Path) -> frozenset[int]:
    """Read a list of the kernel's: ``0-3,8``; nothing where there is no such file."""
    try:
        ranges = [part.split("-") for part in file.read_text().strip().split(",") if part]
    except OSError:
        return frozenset()
    return frozenset(core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1))


def _quota_cores(root: Path) -> float:
    """Find the tightest limit on processor time, in both versions of cgroups, from this process's up."""
    tightest = math.inf
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            below = mount / path.strip("/")
            for folder in (mount, below, *below.parents):
                if folder.is_relative_to(mount):
                    tightest = min(tightest, _quota_of(folder, bool(controllers)))
    return tightest


def _quota_of(folder: Path, first_version: bool) -> float:
    try:
        if first_version:
            words = [(folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        else:
            words = (folder / "cpu.max").read_text().split()
    except OSError:
        return math.inf
    quota, period = words
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
