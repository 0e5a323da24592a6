"""How long a connector's hooks take.

Wraps every hook of the scheduler role that vLLM calls, keeps the wall time of each call and the longest
processor time. Does not know what is being measured: whoever measures says when a count begins.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    "has_pending_block_frees",
    "get_kv_connector_stats",
)


@dataclass(slots=True)
class Longest:
    """The slowest call of one hook.

    Attributes:
        calls: How many there were.
        cpu_us: Processor time of the slowest call, this thread.
        wall_us: Wall time of that same call.
    """

    calls: int = 0
    cpu_us: float = 0.0
    wall_us: float = 0.0

    def note(self, cpu_us: float, wall_us: float) -> None:
        """Take in a call."""
        self.calls += 1
        if cpu_us > self.cpu_us:
            self.cpu_us, self.wall_us = cpu_us, wall_us


@dataclass(slots=True)
class HookClock:
    """Times the hooks of one connector.

    Attributes:
        calls_us: Wall time of every call since ``take``, by hook.
        answers: What ``get_num_new_matched_tokens`` has answered since ``take``.
        longest: By hook, since ``forget_longest``.
        counted: Sums of the counters and last values of the gauges in ``get_kv_connector_stats``.
    """

    calls_us: dict[str, list[float]] = field(default_factory=dict)
    answers: list[int | None] = field(default_factory=list)
    longest: dict[str, Longest] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    counts: bool = True

    def watch(self, connector: Any) -> None:
        """Replace the connector's hooks by timed ones."""
        for name in HOOKS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> tuple[dict[str, list[float]], list[int | None]]:
        """Hand out what was noted since the last time, and begin anew."""
        found = self.calls_us, self.answers
        self.calls_us, self.answers = {}, []
        return found

    def forget_longest(self) -> None:
        """Begin anew with the slowest calls: what came before was set-up."""
        for name in self.longest:
            self.longest[name] = Longest()

    def _count(self, stats: Any) -> None:
        for name, value in (stats.data if stats is not None else {}).items():
            if not isinstance(value, int | float):
                continue
            is_gauge = "bytes" in name
            self.counted[name] = value + (0 if is_gauge else self.counted.get(name, 0))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        self.longest[name] = Longest()
        wall_ns, cpu_ns = time.perf_counter_ns, time.thread_time_ns

        def call(*args: Any, **kwargs: Any) -> Any:
            began_cpu, began = cpu_ns(), wall_ns()
            result = hook(*args, **kwargs)
            if isinstance(result, Iterator):
                result = list(result)  # a generator does its work when it is read
            wall_us = (wall_ns() - began) / 1e3
            self.longest[name].note((cpu_ns() - began_cpu) / 1e3, wall_us)
            self.calls_us.setdefault(name, []).append(wall_us)
            if name == "get_num_new_matched_tokens":
                self.answers.append(result[0])
            elif name == "get_kv_connector_stats" and self.counts:
                self._count(result)
            return result

        return call
