"""vLLM's own ``Scheduler`` or ``AsyncScheduler`` driving the production connector, both roles, over N ranks.

Real classes, real cache manager, real block pool, real hashes; the forward is a pattern that the oracle
writes and judges, and whoever builds the engine decides who copies. What the CPU backend cannot show
(asynchronous scheduling, the newer runner's order of calls, ranks) is shown here.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtide.metrics import MetricsDelta
from kvtide.spec_tiers import prober_of
from kvtide.testing.clock import VirtualClock
from kvtide.transfer.tier_lane import TierLane
from kvtide.vllm.plugin import CONNECTOR_NAME
from kvtide.vllm.testing.ledger import EventLedger
from kvtide.vllm.testing.memory import DeviceMemory
from kvtide.vllm.testing.oracle import Oracle
from kvtide.vllm.testing.ranks import (
    Copiers,
    LaneOf,
    ProberOf,
    RankAnswers,
    asking,
    build_ranks,
    own_connector,
    siblings_of,
    use_clock,
)
from kvtide.vllm.testing.runner import ModelRunner
from kvtide.vllm.testing.shape import EngineShape, write_weights
from kvtide.vllm.testing.sibling import SiblingLoad
from kvtide.vllm.testing.tables import WorkerTables
from kvtide.vllm.testing.upstream import copy_only_what_is_computed, forget_what_was_not_computed

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    "reset_cache",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)


class ModelEngine:
    """An engine that is stepped by hand.

    Args:
        folder: An empty folder, for a model configuration.
        shape: What it looks like.
        copiers: Who copies.
        clock: Virtual time for the connector; None for the real one, and CPU time for hooks.
        chance: Decides what nobody else does: answers that are late, a sibling's loads.
        lane_of: Who makes the lanes before tiers.
        prober: Who makes what asks shared ones.

    Attributes:
        scheduler: vLLM's.
        connector: Ours, in the scheduler's role.
        memory: The device, all ranks.
        oracle: Judges bytes.
        ledger: Listens to KV events; None without any.
        answers: Joins what the ranks say.
        runner: The workers.
        hash_tokens: Tokens of a block hash.
        longest_hook_s: Seconds of the slowest call of any connector hook, and its name.
        outputs: Tokens generated so far, per request.
        errors: Requests that ended with an error.
        counted: What the connector counted, both roles.
        checked_loads: Loads whose bytes were looked at, over all ranks.
    """

    def __init__(
        self,
        folder: Path,
        shape: EngineShape,
        copiers: Copiers,
        clock: VirtualClock | None = None,
        chance: random.Random | None = None,
        lane_of: LaneOf = TierLane,
        prober: ProberOf = prober_of,
    ) -> None:
        self.shape = shape
        self._folder = folder
        self._copiers = copiers
        self._lane_of = lane_of
        self._prober = prober
        self._clock = clock
        self._chance = chance or random.Random(0)
        self._config = shape.vllm_config(folder)
        self._kv_cache_configs = shape.kv_cache_configs(self._config)
        self.memory = DeviceMemory(shape.groups, self._kv_cache_configs)
        self.oracle = Oracle(self.memory, shape.spare_tokens)
        sizes = resolve_kv_cache_block_sizes(self._kv_cache_configs[0], self._config)
        self._scheduler_block_tokens, self.hash_tokens = sizes
        self.longest_hook_s: tuple[float, str] = (0.0, "")
        self._meter = time.thread_time if clock is None else clock.monotonic
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(self.hash_tokens, hash_function)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self.outputs: dict[str, list[int]] = {}
        self.errors: list[str] = []
        self.counted = MetricsDelta()
        self.checked_loads = 0
        self._start()

    def _start(self) -> None:
        """Begin a process: ranks, vLLM's scheduler and the connector in both roles."""
        config, shape = self._config, self.shape
        self.answers = RankAnswers(shape.rank_count, self._chance)
        use_clock(self._clock or time)
        self.ranks = build_ranks(
            config, self._kv_cache_configs, self.memory, self._copiers, self._lane_of, shape.names_limit
        )
        for rank, one in enumerate(siblings_of(self.ranks)):
            one.bring, one.chance = self._bringing(rank), self._chance
        use_clock(self._clock or time)
        kind = AsyncScheduler if shape.asynchronous else Scheduler
        with asking(self._prober):
            self.scheduler = kind(
                config,
                generate_scheduler_kv_cache_config(self._kv_cache_configs),
                StructuredOutputManager(config),
                self._scheduler_block_tokens,
                hash_block_size=self.hash_tokens,
                log_stats=True,
            )
        forget_what_was_not_computed(self.scheduler)
        copy_only_what_is_computed(self.scheduler)
        self.connector = own = own_connector(self.scheduler.connector)
        self.ledger: EventLedger | None = None
        # With a drafter kvtide announces nothing.
        if shape.with_events and not shape.has_drafter:
            self.scheduler.kv_event_publisher = self.ledger = EventLedger(len(own._settings.tier_names))
        for hooks in (self.connector, *map(own_connector, self.ranks)):
            self._watch(hooks)
        checkpoint = partial(shape.checkpoint, self._kv_cache_configs[0])
        tables = WorkerTables(shape.groups, shape.asynchronous, shape.guesses, self._chance, checkpoint)
        self.runner = ModelRunner(
            shape.runner, self.ranks, self.memory, self.oracle, tables, self.answers, self._check_loads
        )
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        while self.connector._deciding._manager.capacity == 0:
            self.step()  # the pool is known from the first answers on

    def restart(self, weights: int, life: str = "") -> None:
        """End the process and begin another one; every request is gone, and so is what the device held.

        Whoever copies has been told before.

        Args:
            weights: Version of those in the model's folder from now on.
            life: Names the new process among all that use a store; empty for the name of the last one.
        """
        self.note_hashes()
        self._config.instance_id = life or self._config.instance_id
        for rank in self.ranks:
            rank.shutdown()
        self.scheduler.shutdown()
        self._requests.clear()
        self.outputs.clear()
        self.oracle.forget()
        write_weights(self._folder, weights)
        self.oracle.load_weights(weights)
        self.memory.clear(range(self.shape.num_blocks))
        between = self.runner.between
        self._start()
        self.runner.between = between

    # -- the engine's front ---------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        lora_request: Any = None,
        cache_salt: str | None = None,
        priority: int = 0,
        **arguments: Any,
    ) -> Request:
        """Queue a request; other arguments are of ``SamplingParams``."""
        adapter = lora_request.lora_name if lora_request is not None else ""
        identity = f"{adapter}/{cache_salt}" if adapter or cache_salt else ""
        self.oracle.expect(request_id, prompt, max_tokens, identity)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **arguments
            ),
            pooling_params=None,
            arrival_time=float(self._arrivals),
            lora_request=lora_request,
            cache_salt=cache_salt,
            priority=priority,
            block_hasher=self._hasher,
        )
        self._arrivals += 1
        self._requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request in whatever phase it is."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Plan and compute one step; take in results as late as the kind of scheduling allows."""
        step = self.scheduler.schedule()
        self._queue.append((step, self.runner.execute(step, self.scheduler.requests)))
        while len(self._queue) >= self.shape.queue_depth:
            self.update()
        return step

    def update(self) -> bool:
        """Take in the results of the oldest step; False when there is none."""
        if not self._queue:
            return False
        step, output = self._queue.popleft()
        outcome = self.scheduler.update_from_output(step, output)
        if self.shape.guesses and not self.shape.asynchronous:
            self.scheduler.update_draft_token_ids(self.runner.guesses(output))
        for outputs in outcome.values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self._count(stats.kv_connector_stats)
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None and "error" in str(one.finish_reason).lower():
                    self.errors.append(one.request_id)
        return True

    def run_until_idle(self, limit: int) -> None:
        """Step, and take in results, until there is nothing to do.

        Raises:
            AssertionError: There is after ``limit`` turns.
        """
        for _ in range(limit):
            if not self.busy:
                break
            if self.scheduler.has_requests():
                self.step()
            else:
                self.update()
        assert not self.busy, f"not idle after {limit} steps"

    @property
    def busy(self) -> bool:
        """Whether the engine would step, or has results to take in."""
        return bool(self._queue) or self.scheduler.has_requests()

    def check(self) -> None:
        """Check the connector's books."""
        self.connector._deciding.check_invariants()

    def describe(self) -> dict[str, int]:
        """What the connector has open, by its own account."""
        deciding = self.connector._deciding
        return {
            "open jobs": len(deciding._jobs),
            "fences": len(deciding._jobs.fences.job_ids()),
            "pinned slots": deciding._manager.pinned_count,
            "pinned prefixes": deciding._manager.catalog.pin_count,
            "request states": len(deciding._requests),
            **self._describe_below(),
        }

    def _describe_below(self) -> dict[str, int]:
        lower = self.connector._deciding._lower
        if lower is None:
            return {}
        return {
            "open hops": len(lower._below),
            "requests that wait for promotions": len(lower._promotions._waiting),
            "chunks kept for requests": lower._promotions._kept_count,
            "open questions": 0 if lower._probes is None else lower._probes.open_count,
        }

    def check_cached(self) -> int:
        """Check the bytes of every block that the engine offers to whoever asks for its hash."""
        self.note_hashes()
        cached: list[list[tuple[bytes, int]]] = [[] for _ in self.shape.groups]
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            for name in pool.cached_block_hashes_by_block.get(block.block_id, (block.block_hash,)):
                if name is not None:
                    cached[get_group_id(name)].append((get_block_hash(name), block.block_id))
        return sum(self.oracle.check_cached(index, blocks) for index, blocks in enumerate(cached))

    def note_hashes(self) -> None:
        """Tell the oracle what the block hashes of all requests stand for."""
        for request_id, request in self._requests.items():
            self.oracle.note_hashes(request_id, request.block_hashes, self.hash_tokens)

    def forget(self) -> None:
        """Forget requests that have ended; the engine is idle."""
        self.note_hashes()
        self.outputs.clear()
        self._requests.clear()
        self.oracle.forget()

    def close(self) -> None:
        """End; the process has its own clock again."""
        for rank in self.ranks:
            rank.shutdown()
        use_clock(time)

    # -- loads ------------------------------------------------------------------------------------------

    def _check_loads(self, rank: int, request_ids: set[str]) -> None:
        for request_id in sorted(request_ids):
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                blocks = self.scheduler.kv_cache_manager.get_blocks(request_id)
                # What is being loaded has no hash yet.
                local = [
                    sum(block.block_hash is not None for block in of_group) * group.block_tokens
                    for of_group, group in zip(blocks.blocks, self.shape.groups, strict=True)
                ]
                tables = self._tables_of(blocks.get_block_ids())
                self.oracle.check_loaded(rank, request_id, tables, request.num_computed_tokens, local)
                self.checked_loads += 1

    def _tables_of(self, block_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int64) for ids in block_ids]

    def _bringing(self, rank: int) -> Callable[[SiblingLoad, bool], None]:
        def bring(load: SiblingLoad, right: bool) -> None:
            # What fails has brought something, but not all of it.
            end = load.end if right else (load.begin + load.end) // 2
            tables = self._tables_of(load.block_ids)
            self.oracle.write_loaded(rank, load.request_id, tables, range(load.begin, end))

        return bring

    # -- watching ---------------------------------------------------------------------------------------

    def _count(self, stats: Any) -> None:
        own = stats.get(CONNECTOR_NAME, stats)
        data = getattr(own, "data", own)
        self.counted.merge(data.get("data", data) if isinstance(data, dict) else data)

    def _watch(self, connector: Any) -> None:
        """Take the time of every hook: CPU time, since what it waits for is the copier's; or virtual time."""

        def watched(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                began_s = self._meter()
                result = hook(*args, **kwargs)
                took_s = self._meter() - began_s
                if took_s > self.longest_hook_s[0]:
                    self.longest_hook_s = took_s, name
                return result

            return call

        for name in HOOKS:
            setattr(connector, name, watched(name, getattr(connector, name)))
