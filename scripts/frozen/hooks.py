"""How long each hook of the connector takes, in both of its halves.

A hook that waits for a disk or a lock is slow by its wall time; one whose thread was ready and had no core
is slow by a neighbour. The kernel counts the second (``schedstat``), so both are noted.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    "get_kv_connector_stats",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "clear_connector_metadata",
)


@dataclass(frozen=True, slots=True)
class SlowCall:
    """The slowest call of one hook.

    Attributes:
        hook: Its name and its half.
        wall_ms: As a clock on the wall saw it.
        own_ms: Without the time its thread was ready and had no core.
        cpu_ms: What it computed itself; the rest of ``own_ms`` it waited, be it for the interpreter's lock.
    """

    hook: str
    wall_ms: float
    own_ms: float
    cpu_ms: float = 0.0


class HookClock:
    """Keeps the slowest call of each hook, by ``own_ms``; made by the thread that calls them."""

    def __init__(self) -> None:
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self.slowest: dict[str, SlowCall] = {}
        self.call_count = 0

    def watch(self, connector: Any, half: str, names: tuple[str, ...]) -> None:
        """Replace a connector's hooks by timed ones."""
        for name in names:
            setattr(connector, name, self._timed(f"{half}.{name}", getattr(connector, name)))

    def take(self) -> tuple[list[SlowCall], int]:
        """Hand out what was noted since the last time, with the number of calls, and begin anew."""
        found = list(self.slowest.values()), self.call_count
        self.slowest, self.call_count = {}, 0
        return found

    def _waited_ms(self) -> float:
        """Time for which the thread was ready and had no core, since it began."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e6

    def _timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            waited_ms, cpu_s, began_s = self._waited_ms(), time.thread_time(), time.perf_counter()
            result = call(*args, **kwargs)
            if isinstance(result, Iterator):  # does its work when it is read
                result = list(result)
            wall_ms, cpu_ms = (time.perf_counter() - began_s) * 1e3, (time.thread_time() - cpu_s) * 1e3
            own_ms = wall_ms - (self._waited_ms() - waited_ms)
            self.call_count += 1
            if hook not in self.slowest or own_ms > self.slowest[hook].own_ms:
                self.slowest[hook] = SlowCall(hook, wall_ms, own_ms, cpu_ms)
            return result

        return timed
