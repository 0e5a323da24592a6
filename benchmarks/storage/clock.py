"""What a sample says of the time in which it was taken: wall time, processor time, and what others did."""

import resource
import time
from collections.abc import Callable
from typing import Any

from benchmarks.frame.machine import Bystanders


def timed(arm: Callable[[], object], byte_count: int) -> dict[str, Any]:
    """Call ``arm``, which moves so many bytes; ``all_cpu_s`` is ``cpu_s`` and that of what it started."""
    began_cpu_s = _cpu_s()
    with Bystanders() as bystanders:
        began_s = time.perf_counter()
        arm()
        wall_s = time.perf_counter() - began_s
    return {
        "wall_s": wall_s,
        "cpu_s": _cpu_s() - began_cpu_s,
        "all_cpu_s": bystanders.own_s,
        "byte_count": byte_count,
        "others_cores": bystanders.others_cores,
        "stolen_cores": bystanders.stolen_cores,
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
