"""The scheduler half: a state machine without I/O. Events of the engine in, jobs out, time is an argument.

Knows requests, blocks and jobs. Which chunk is where is the manager's business; bytes are the worker's.
The engine's hooks keep their names; ``kvtide.vllm.connector`` calls them with the engine's own objects.
"""

from collections import deque
from collections.abc import Collection, Sequence

from kvtide.advising import Adviser, GhostTier
from kvtide.events import OffloadingEvent
from kvtide.jobs import (
    Direction,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    PoolReport,
    ReqContext,
)
from kvtide.keys import ChunkRun
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.metrics import MetricsDelta
from kvtide.probing import Prober
from kvtide.scheduler.advice import Advice
from kvtide.scheduler.alarm import WriteOnlyAlarm
from kvtide.scheduler.due import DueRequests
from kvtide.scheduler.engine import BlockPool, BlockTable, EngineRequest, EngineStep
from kvtide.scheduler.gauges import Gauges
from kvtide.scheduler.holds import BlockHolds
from kvtide.scheduler.lazy import LazyStores
from kvtide.scheduler.limits import NO_LIMIT, UNLIMITED, limits_of
from kvtide.scheduler.loads import LoadPlanner
from kvtide.scheduler.lookup import look_up
from kvtide.scheduler.lower_tiers import LowerTiers
from kvtide.scheduler.open_jobs import OpenJobs, TransferJobStatus
from kvtide.scheduler.pace import RecomputePace
from kvtide.scheduler.parked import ParkedRequests
from kvtide.scheduler.quarantine import Quarantine
from kvtide.scheduler.state import GroupOffloadState, RequestOffloadState, SchedulerOffloadConfig, Wait
from kvtide.scheduler.stores import StorePlanner
from kvtide.scheduler.tables import BlockTables

STORES_PER_STEP = 96
"""Stores that one step plans, and that one step makes ready: some three milliseconds each. More wait."""

QUARANTINE_S = 60.0
"""A job unanswered this long past its deadline no longer keeps an idle engine awake. It stays fenced."""


class OffloadingConnectorScheduler:
    """Decides what to load, store, evict and fence.

    Args:
        config: Geometry and limits.
        manager: Which chunk is where.
        metrics: Where to count.
        ladder: Tiers below host memory; None without any.
        prober: Asks those of them that are shared; None without any.
        adviser: Keeps ghosts of tiers; None for no ghosts.
        ghost_tiers: Of these, host memory first.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        manager: CPUOffloadingManager,
        metrics: MetricsDelta,
        ladder: Ladder | None = None,
        prober: Prober | None = None,
        adviser: Adviser | None = None,
        ghost_tiers: Sequence[GhostTier] = (),
    ) -> None:
        self._config = config
        self._geometry = config.geometry
        self._manager = manager
        self._metrics = metrics
        self._requests: dict[str, RequestOffloadState] = {}
        self._jobs = OpenJobs(config.rank_count, config.transfer_deadline_s)
        self._holds = BlockHolds()
        self._pace = RecomputePace()
        self._lower = None
        if ladder is not None:
            self._lower = LowerTiers(config, ladder, self._jobs, self._holds, metrics, self._pace, prober)
        self._advice = None
        if adviser is not None:
            lower = () if ladder is None else ladder.tiers
            self._advice = Advice(config, adviser, ghost_tiers, lower, self._pace, metrics)
        self._stores = StorePlanner(config, manager, self._jobs, metrics, self._holds, self._lower)
        self._lazy = LazyStores(config, manager, self._stores) if config.lazy else None
        self._loads = LoadPlanner(config.geometry, manager, self._jobs, metrics)
        self._quarantine = Quarantine(
            config.transfer_deadline_s, manager, self._jobs, self._loads, self._holds
        )
        self._tables = BlockTables(config.geometry, self._jobs, self._lazy)
        self._copied: deque[TransferJobStatus] = deque()  # stores that have ended and are not ready yet
        self._pools: dict[int, PoolReport] = {}
        self._reached: dict[int, int] = {}
        self._told = (0, 0.0)  # the generation the ranks were told of last, and when
        self._gauges = Gauges()
        self._parked = ParkedRequests(config.geometry, self._holds)
        self._due = DueRequests()
        self._alarm = WriteOnlyAlarm(config.geometry, manager, metrics)
        self._visits = 0
        self._deferred_count = 0

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Keep the engine's pool at hand: blocks are held through it."""
        self._holds.pool = pool
        if self._lazy is not None:
            self._lazy.pool = pool

    # -- the life of a request ------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest, now_s: float | None = None) -> None:
        """Create the state beside a request that has arrived, and bring back what it will want.

        Args:
            request: That has been queued.
            now_s: Now; None for when it was last told.
        """
        state = self._state_of(request)
        # Before anything of it is brought up, which is no use of it by itself.
        self._manager.visited(self._prompt_of(state), state.context, 0.0 if now_s is None else now_s)
        if self._advice is not None:
            self._advice.arrived(state, 0.0 if now_s is None else now_s)
        if self._lower is not None:
            self._lower.arrived(state, now_s)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int, now_s: float
    ) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded beyond the engine's own hit.

        Returns:
            ``(n, True)`` for an asynchronous load, ``(None, False)`` for "ask again", ``(0, False)`` for a
            miss and for less than one chunk.
        """
        state = self._state_of(request)
        if state.load_job is not None:
            return None, False
        if (wait := state.wait) is not None:
            # Whatever else has changed: what it lacks is still being brought.
            if (
                wait.computed_tokens == num_computed_tokens
                and now_s < wait.until_s
                and self._jobs.get(wait.job_id) is not None
            ):
                self._deferred_count += 1
                return None, False
            state.wait = None
        state.begin_admission(num_computed_tokens)
        parked = self._parked
        if parked.unsettled:
            return (None, False) if parked.stands_back(request.request_id) else (0, False)
        if state.load_failed or request.skip_reading_prefix_cache or not state.limits.max_load_tokens:
            return 0, False
        below = self._lower is not None and self._lower.awaits(state, now_s)
        found = look_up(state, self._geometry, self._manager, num_computed_tokens)
        later = found.later or below
        hit_tokens = found.restored_tokens - num_computed_tokens
        brought_by = self._loads.brought_by(state, num_computed_tokens) if hit_tokens > 0 else None
        if later or brought_by is not None:
            until_s = self._patience_ends_s(state, num_computed_tokens, now_s)
            if now_s < until_s:
                self._deferred_count += 1
                if brought_by is not None:
                    state.wait = Wait(brought_by, num_computed_tokens, until_s)
                return None, False
        if brought_by is not None or hit_tokens < self._geometry.restore_interval:
            return 0, False
        if not (parked.vllm_counts_right or parked.leave_room_for(state, found.restored_tokens)):
            return 0, False
        if self._lazy is not None:
            self._lazy.make_way_for(hit_tokens, now_s)
        return hit_tokens, True

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockTable, num_external_tokens: int, now_s: float
    ) -> None:
        """Take note of an admission: ``block_ids`` is the request's complete table, all groups.

        Blocks that the request was given are checked against open copies, whoever loads into them. A
        copy in the way of a load is waited for by that load alone; in the way of a forward, by the step.
        """
        state = self._state_of(request)
        after = self._tables.admitted(state, block_ids, num_external_tokens)
        self._note_admission(state, num_external_tokens, now_s)
        self._due.soon.add(request.request_id)
        if not state.computed:
            self._parked.admitted(state)
        if num_external_tokens:
            restored_tokens = state.local_tokens + num_external_tokens
            self._loads.plan(state, restored_tokens, frozenset(after), now_s)
        if self._lower is not None:
            self._lower.admitted(state)

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: BlockTable, now_s: float
    ) -> None:
        """Plan the last stores of a request; its blocks may be freed at once, the fences stay.

        Comes exactly once, in any phase: also for requests that were never scheduled, are being loaded or
        wait after a preemption.
        """
        state = self._requests.pop(request.request_id, None)
        self._parked.settled(request.request_id)
        self._due.soon.discard(request.request_id)
        if self._lower is not None and state is not None:
            self._lower.finished(state)
        if self._advice is not None and state is not None:
            self._advice.finished(state, request)
        # The blocks of an open load, ours or another connector's, hold nothing yet.
        if state is None or state.load_job is not None or not state.computed or not any(block_ids):
            return
        state.request = request
        self._tables.take(state, block_ids)
        computed_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        self._stores.plan(state, computed_tokens, now_s, final=True)
        if self._lazy is not None:
            self._lazy.ended(state, computed_tokens, now_s)

    # -- a step ---------------------------------------------------------------------------------

    def build_connector_meta(self, step: EngineStep, now_s: float) -> OffloadingConnectorMetadata:
        """Hand over what was planned, after the chunks that this step completes became stores."""
        self._pace.step_began(step.total_num_scheduled_tokens, now_s)
        self._tables.begin_step(step, self._requests)
        self._plan_stores(step, now_s)
        self._store_states(step, now_s)
        if self._lazy is not None:
            self._lazy.end_step(step.total_num_scheduled_tokens, now_s)
        if self._lower is not None:
            self._lower.end_step(now_s)
        self._manager.keep_room()
        self._quarantine.note(now_s)
        if self._told[0] != self._manager.generation:
            self._told = self._manager.generation, now_s
        told = OffloadingConnectorMetadata(
            self._manager.generation,
            self._jobs.send(),
            self._tables.take_waits(),
            self._quarantine.take(),
        )
        return told if self._lower is None else self._lower.told(told)

    def _plan_stores(self, step: EngineStep, now_s: float) -> None:
        """Offer what this step completes, of the requests whose turn it is."""
        self._due.begin_step(self._requests)
        soon, room = self._due.soon, STORES_PER_STEP
        for request_id, token_count in step.num_scheduled_tokens.items():
            if token_count == 1 and request_id not in soon:
                continue
            if (state := self._requests.get(request_id)) is None:
                continue
            if not state.computed:
                state.computed = True
                self._parked.settled(request_id)
            computed_tokens = state.request.num_computed_tokens + token_count
            if self._lazy is not None:
                self._lazy.planned(state, computed_tokens)
            if computed_tokens >= state.offer_at and room:
                # Who finds no room is asked again in the next step, or when it ends.
                self._tables.follow_windows(step, state)
                self._stores.plan(state, computed_tokens, now_s)
                room -= 1
            self._due.look_after(request_id, state.offer_at - computed_tokens, NO_LIMIT // 2)

    def update_connector_output(
        self,
        answers: OffloadingWorkerMetadata | None,
        now_s: float,
        failed_request_ids: Collection[str] = (),
    ) -> None:
        """Take in what the ranks answered; answers for jobs that are closed change nothing.

        Args:
            answers: Of our own workers, None without any.
            now_s: Now.
            failed_request_ids: Requests whose load has failed, whoever loaded.
        """
        self._pace.step_ended(now_s)
        for request_id in failed_request_ids:
            if (state := self._requests.get(request_id)) is not None:
                state.load_failed = True
                self._parked.load_failed(request_id)
        if answers is None:
            self._make_ready()
            return
        self._reached.update(answers.generations)
        if answers.pools:
            self._note_pools(answers.pools)
        for (job_id, hop_index), results in answers.results.items():
            status = self._jobs.get(job_id)
            if status is not None and status.answer(hop_index, results):
                self._end_job(status, now_s)
        if self._lower is not None:
            self._lower.note(answers)
        self._make_ready()

    # -- the rest of the engine's hooks ---------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        """Hand out what became ready or left since the last call."""
        events = self._manager.take_events()
        return events if self._lower is None else events + self._lower.take_events()

    def reset_cache(self) -> bool:
        """Forget everything and begin a new generation, never freeing under a copy.

        Requests that own blocks keep computing with them, but what they hold is of before the reset and
        is not stored.
        """
        if self._lower is not None:
            self._lower.before_reset()
        self._manager.reset()
        if self._advice is not None:
            self._advice.forget()
        if self._lazy is not None:
            self._lazy.forget()
        for state in self._requests.values():
            state.memo = state.wait = None
            state.stale = any(group.block_ids for group in state.groups)
        if self._lower is not None:
            self._lower.reset(self._requests.values())
        return True

    def has_pending_push_work(self, now_s: float) -> bool:
        """Say whether an idle engine must go on stepping: a copy is open or a reset unacknowledged.

        A job that is long overdue is left out, or a wedged copy would spin a core for ever.
        """
        if self._lower is not None and self._lower.is_warming(now_s):
            return True
        overdue_s = self._config.transfer_deadline_s + QUARANTINE_S
        if self._copied or any(now_s - status.planned_at_s < overdue_s for status in self._jobs):
            return True
        generation, told_at_s = self._told
        if generation == self._manager.generation and now_s - told_at_s >= overdue_s:
            return False  # a tier that does not come back makes no reset durable
        return any(reached < self._manager.generation for reached in self._reached.values())

    def metrics(self) -> MetricsDelta:
        """Add the gauges that have changed to what was counted."""
        if self._deferred_count:
            self._metrics.add("deferred_lookups", self._deferred_count)
            self._deferred_count = 0
        self._gauges.set(
            self._metrics, self._manager, self._jobs, self._pools.values(), self._stores.slot_bytes
        )
        if self._lower is not None:
            self._lower.set_gauges()
        if self._advice is not None:
            self._advice.take()
        return self._metrics

    def close(self) -> None:
        """End: nothing is asked any more."""
        if self._lower is not None:
            self._lower.close()
        if self._advice is not None:
            self._advice.close()

    def check_invariants(self) -> None:
        """Check the books; see ``OffloadingManager.check_invariants``."""
        self._jobs.check_invariants()
        held = self._holds.job_ids()
        assert all(self._jobs.get(job_id) is not None for job_id in held), f"jobs {held} hold blocks"
        self._loads.check_invariants()
        if self._lazy is not None:
            self._lazy.check_invariants()
        idle = not len(self._jobs) and not self._copied
        if self._lower is not None:
            self._lower.check_invariants(self._requests.values())
            idle = idle and self._lower.is_idle
        self._manager.check_invariants(idle)

    # -- inside ---------------------------------------------------------------------------------

    def _state_of(self, request: EngineRequest) -> RequestOffloadState:
        state = self._requests.get(request.request_id)
        if state is None:
            self._visits += 1
            params = request.kv_transfer_params
            limits = limits_of(request.request_id, params) if params else UNLIMITED
            context = ReqContext(request.request_id, params, self._visits, limits.policy)
            groups = [GroupOffloadState() for _ in self._geometry.groups]
            state = RequestOffloadState(request, groups, context, limits)
            self._requests[request.request_id] = state
        return state

    def _patience_ends_s(self, state: RequestOffloadState, computed_tokens: int, now_s: float) -> float:
        """Say until when a request waits for others; no longer than computing would take."""
        if state.deferred_since_s is None:
            state.deferred_since_s = now_s
        limit_s = self._config.defer_limit_s
        recompute_s = self._pace.seconds_for(state.request.num_tokens - computed_tokens)
        if recompute_s is not None:
            limit_s = min(limit_s, recompute_s)
        return state.deferred_since_s + limit_s

    def _note_admission(self, state: RequestOffloadState, loaded_tokens: int, now_s: float) -> None:
        """Refresh the whole prefix, once an admission: a second call brings blocks after a load."""
        if not state.being_admitted:
            return
        state.being_admitted = False
        state.deferred_since_s = None
        self._metrics.add("queried_tokens", state.request.num_tokens - state.local_tokens)
        self._alarm.note_admission(state, loaded_tokens)
        prompt = self._prompt_of(state)
        self._manager.visited(prompt, state.context, now_s)
        self._manager.touch(prompt, state.context)

    def _prompt_of(self, state: RequestOffloadState) -> ChunkRun:
        """All of a request that has hashes, in chunks of the finest group."""
        finest, hashes = self._geometry.finest, state.request.block_hashes
        return finest.run(hashes, 0, finest.hashed_chunks(len(hashes)))

    def _store_states(self, step: EngineStep, now_s: float) -> None:
        """Store the states of recurrent layers that the engine hands over with this step."""
        blocks = step.kv_connector_block_state
        if self._geometry.is_one_prefix or blocks is None:
            return
        for request_id, states in blocks.boundary_state_offloads.items():
            if (state := self._requests.get(request_id)) is not None:
                for engine_index, block_id, token_count in states:
                    self._stores.plan_state(state, engine_index, block_id, token_count, now_s)

    def _note_pools(self, pools: dict[int, PoolReport]) -> None:
        self._pools.update(pools)
        if len(self._pools) == self._config.rank_count:
            slot_count = min(pool.slot_count for pool in self._pools.values())
            if self._advice is not None:
                self._advice.note_slots(slot_count)
            self._stores.slot_bytes = sum(pool.slot_bytes for pool in self._pools.values())
            if self._lower is not None:
                self._lower.note_slot_bytes(self._stores.slot_bytes)
            self._manager.grow(min(pool.ready_slots for pool in self._pools.values()), slot_count)

    def _end_job(self, status: TransferJobStatus, now_s: float) -> None:
        self._jobs.close(status)
        self._holds.give_back(status.job.job_id)
        if status.job.direction is Direction.LOAD:
            self._loads.ended(status)
            if self._advice is not None and not status.failed:
                self._advice.loaded(status.token_count, now_s - status.planned_at_s)
        else:
            self._copied.append(status)

    def _make_ready(self) -> None:
        """Complete stores whose copies have ended, in that order, a bounded number at a time."""
        for _ in range(min(len(self._copied), STORES_PER_STEP)):
            status = self._copied.popleft()
            for chunks in status.held:
                self._manager.complete_store(
                    chunks.run, chunks.spec, status.owner.context, success=not status.failed
                )
