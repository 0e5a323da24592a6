"""How long a connector's hooks take.

Wraps every hook of the scheduler role that vLLM calls, keeps the wall time of each call and which were
slow. Does not know what is being measured: whoever measures says when a count begins.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scheduler.calls import Calls

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
class HookClock:
    """Times the hooks of one connector.

    Attributes:
        calls_us: Wall time of every call since ``take``, by hook.
        answers: What ``get_num_new_matched_tokens`` has answered since ``take``.
        calls: All of them, and which were slow.
        counted: Sums of the counters and last values of the gauges in ``get_kv_connector_stats``.
    """

    calls_us: dict[str, list[float]] = field(default_factory=dict)
    answers: list[int | None] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    counted: dict[str, float] = field(default_factory=dict)

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

    def _count(self, stats: Any) -> None:
        for name, value in (stats.data if stats is not None else {}).items():
            if not isinstance(value, int | float):
                continue
            is_gauge = "bytes" in name
            self.counted[name] = value + (0 if is_gauge else self.counted.get(name, 0))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            # A generator does its work when it is read.
            return list(result) if isinstance(result, Iterator) else result

        def call(*args: Any, **kwargs: Any) -> Any:
            result, took = self.calls.timed(name, run, *args, **kwargs)
            self.calls_us.setdefault(name, []).append(took.wall_us)
            if name == "get_num_new_matched_tokens":
                self.answers.append(result[0])
            elif name == "get_kv_connector_stats":
                self._count(result)
            return result

        return call
