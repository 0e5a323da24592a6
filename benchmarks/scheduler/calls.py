"""How long calls take, and which were slow.

Three times of each: wall time, processor time of the thread, and what the garbage collector took of it, which
is on and collects in whoever allocates. Every call has its place in the order of all calls, so that a second
pass over the same work can tell what is slow from what was disturbed.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scheduler.vocabulary import SLOW_US

MAX_SLOW = 500


@dataclass(frozen=True, slots=True)
class Took:
    """One call.

    Attributes:
        wall_us: Wall time.
        cpu_us: Processor time of this thread. On a virtual machine it may hold what the host took away.
        collector_us: Processor time of the garbage collector within it.
    """

    wall_us: float
    cpu_us: float
    collector_us: float

    @property
    def us(self) -> float:
        """Neither clock: on a shared machine each alone shows other people's work."""
        return min(self.wall_us, self.cpu_us)


@dataclass(slots=True)
class Calls:
    """Calls of many kinds, in order.

    Attributes:
        phase: What is going on, for the slow ones.
        count: Calls so far.
        slow: Place, name, phase, and the three times, of calls that took ``SLOW_US`` or more.
        kinds: By name: how many there were, how long all and the longest took.
    """

    phase: str = ""
    count: int = 0
    slow: list[tuple[int, str, str, float, float, float]] = field(default_factory=list)
    kinds: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Took]:
        """Call ``function`` and note how long it took."""
        collected_ns = _collector.total_ns
        began_cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
        result = function(*args, **kwargs)
        wall_ns = time.perf_counter_ns() - began_ns
        cpu_ns = time.thread_time_ns() - began_cpu_ns
        took = Took(wall_ns / 1e3, cpu_ns / 1e3, (_collector.total_ns - collected_ns) / 1e3)
        self._note(name, took)
        return result, took

    def forget(self) -> None:
        """Begin anew: what came before was set-up."""
        self.count, self.slow, self.kinds = 0, [], {}

    def record(self) -> dict[str, Any]:
        """Return what goes into a sample."""
        kinds = {
            name: {"calls": calls, "total_us": total_us, "longest_us": longest_us}
            for name, (calls, total_us, longest_us) in self.kinds.items()
        }
        return {"calls": self.count, "kinds": kinds, "slow": [list(one) for one in self.slow]}

    def _note(self, name: str, took: Took) -> None:
        self.count += 1
        kind = self.kinds.setdefault(name, [0, 0.0, 0.0])
        kind[0] += 1
        kind[1] += took.us
        kind[2] = max(kind[2], took.us)
        if took.us >= SLOW_US and len(self.slow) < MAX_SLOW:
            self.slow.append((self.count, name, self.phase, took.cpu_us, took.wall_us, took.collector_us))


class _Collector:
    """Adds up what the garbage collector takes in this process."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._began_ns = 0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_ns = time.thread_time_ns()
        else:
            self.total_ns += time.thread_time_ns() - self._began_ns


_collector = _Collector()
