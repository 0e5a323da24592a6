"""Resets of every kind, sleep among them, and what must never be seen again after one.

What was computed before the device and the connector were reset together is wrong from then on: the model
gets other weights. Who owns blocks while the connector alone is reset goes on, and stores nothing of it.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvtide.jobs import COPIES, Direction, OffloadingConnectorMetadata
from kvtide.vllm.testing.below import hops_under_way
from kvtide.vllm.testing.copies import Copies
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import WrongBytesError

DRAINED_AFTER_TURNS = 30
"""Of a pause before sleep. Later than that is as with vLLM's in-process engine, which does not wait."""

OWNING = {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS}


class Resets:
    """Resets an engine.

    Args:
        engine: To be reset.
        copies: Whether something is under way.
        happened: Where to count.
        chance: The only source of choice.
        turn: Lets some time pass, and the engine take a step if it would.
    """

    def __init__(
        self,
        engine: ModelEngine,
        copies: Copies,
        happened: Counter[str],
        chance: random.Random,
        turn: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._copies = copies
        self._happened = happened
        self._chance = chance
        self._turn = turn
        self._carried: set[str] = set()  # requests that hold KV of before the connector's last reset

    def device(self) -> None:
        """Forget what the engine's own cache holds, if nothing runs."""
        done = self._engine.scheduler.reset_prefix_cache()
        self._happened[f"reset: device {'done' if done else 'refused'}"] += 1

    def connector(self) -> None:
        """Forget what host memory holds, and what the device holds if nothing runs."""
        self._note_connector()
        requests = self._engine.scheduler.requests
        self._carried |= {name for name, request in requests.items() if request.status in OWNING}
        if self._engine.scheduler.reset_prefix_cache(reset_connector=True):
            self._carry_nothing()

    def running(self) -> None:
        """Forget everything, and have what runs computed anew."""
        self._reset_running(reset_connector=True)

    def running_device_alone(self) -> None:
        """Forget what the engine's own cache holds, and have what runs begin anew."""
        self._reset_running(reset_connector=False)

    def sleep(self, aborted: set[str]) -> None:
        """Pause, reset everything, lose the device's memory, go on.

        Args:
            aborted: Takes the names of requests that are aborted for it.
        """
        scheduler, chance = self._engine.scheduler, self._chance
        keep = chance.random() < 0.5
        self._happened["sleep: with a load in flight"] += self._copies.open(Direction.LOAD)
        if not keep:
            aborted |= {name for name, one in scheduler.requests.items() if not one.is_finished()}
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        scheduler.set_pause_state(PauseState.PAUSED_ALL if keep else PauseState.PAUSED_NEW)
        for _ in range(chance.choice((0, DRAINED_AFTER_TURNS))):
            if not self._engine.busy:
                break
            self._turn(chance.expovariate(300.0))
        if self._reset_running(reset_connector=True):
            self._happened[f"sleep: requests {'kept' if keep else 'aborted'}"] += 1
            self._engine.memory.clear(range(self._engine.shape.num_blocks))
            for _ in range(chance.randrange(8)):
                self._turn(chance.expovariate(100.0))
        else:
            self._happened["sleep: refused"] += 1
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def look_at(self, step: Any, metadata: OffloadingConnectorMetadata) -> None:
        """Look at what a step stores.

        Args:
            step: vLLM's ``SchedulerOutput``.
            metadata: What it tells our workers.

        Raises:
            WrongBytesError: It stores what was computed before the connector's last reset.
        """
        if not self._carried:
            return
        self._carried.difference_update(new.req_id for new in step.scheduled_new_reqs)
        self._carried -= set(step.scheduled_cached_reqs.resumed_req_ids)
        # Who was preempted holds nothing any more; what is loaded for it may be stored before it runs again.
        self._carried -= set(step.preempted_req_ids or ())
        for job in metadata.jobs:
            if (
                job.direction is Direction.STORE
                and job.generation == metadata.generation
                and job.request_id in self._carried
            ):
                raise WrongBytesError(f"{job.request_id}: stores what it holds since before the last reset")

    def _reset_running(self, reset_connector: bool) -> bool:
        try:
            self._engine.scheduler.reset_prefix_cache(True, reset_connector)
        except RuntimeError as error:
            # vLLM's own refusal, while a load or a step under way holds blocks.
            if "Failed to reset KV cache" not in str(error):
                raise
            self._happened["reset: running refused"] += 1
            return False
        self._happened["reset: running" if reset_connector else "reset: running, device alone"] += 1
        if reset_connector:
            self._note_connector()
            self._carry_nothing()
        return True

    def _note_connector(self) -> None:
        self._happened["reset: connector"] += 1
        for direction in COPIES:
            name = f"reset: connector, {direction.value} under way"
            self._happened[name] += self._copies.open(direction)
        for kind, count in hops_under_way(self._engine).items():
            self._happened[f"reset: connector, {kind} under way"] += count > 0

    def _carry_nothing(self) -> None:
        """No block is in use, and no cache holds anything but tiers that were told to keep it."""
        self._carried.clear()
        if self._engine.shape.settings.get("reset_keeps_tiers"):
            self._happened["reset: tiers keep what they hold"] += 1
            return
        self._engine.oracle.new_weights()
        self._happened["new weights"] += 1

    def begin_anew(self) -> None:
        """Note that the engine was started anew."""
        self._carried.clear()
