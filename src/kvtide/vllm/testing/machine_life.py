"""The life of one model engine, told event by event: who comes, which copy ends, what is reset.

Everything has a name (``r0``, ``load 3``), nothing is drawn, and after every event the promises are checked.
Does not know Hypothesis or who tells.
"""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvtide.jobs import Direction, JobId
from kvtide.testing.clock import VirtualClock
from kvtide.vllm.testing.asks import Ask
from kvtide.vllm.testing.configuration import FLUSH_LIMIT_S
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.machine_copies import LateRanks, SteeredDevice, SteeredSibling
from kvtide.vllm.testing.promises import HangError
from kvtide.vllm.testing.ranks import own_metadata, siblings_of
from kvtide.vllm.testing.rest import check_books
from kvtide.vllm.testing.shape import EngineShape, Runner, Siblings

TOKENS_PER_BLOCK = 4


@dataclass(frozen=True, slots=True, repr=False)
class Sketch:
    """What an engine looks like, in few words; what is as here goes without saying.

    Attributes:
        asynchronous: Plan a step before the results of the last one are in.
        runner: Of ``Runner``, by value.
        ranks: Ranks.
        blocks: Of the device, without the null block.
        window: Tokens that a second group sees; None for no such group.
        blocks_per_chunk: Of kvtide.
        policy: Who leaves the host pool.
        host_pages: Of host memory, on each rank.
        budget_tokens: Tokens a step may compute.
        store_threshold: How often something is asked before it is stored.
        defer_limit_s: How long a request waits for what another one loads.
        priority: Schedule by priority.
        sibling: Of ``Siblings``, by value.
        events: Somebody listens to KV events.
        held: Copies that wait to be told: ``both`` ways, only ``store`` or only ``load``.
        lazy: Store what the device is about to hand out.
        stubborn: A step that waits for a copy waits as long as it may; else the copy ends then.
    """

    asynchronous: bool = False
    runner: str = "v1"
    ranks: int = 1
    blocks: int = 30
    window: int | None = None
    blocks_per_chunk: int = 1
    policy: str = "lru"
    host_pages: int = 8
    budget_tokens: int = 256
    store_threshold: int = 1
    defer_limit_s: float = 0.05
    priority: bool = False
    sibling: str = "none"
    events: bool = False
    held: str = "both"
    lazy: bool = False
    stubborn: bool = False

    def __repr__(self) -> str:
        said = [
            f"{one.name}={value!r}"
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        ]
        return f"Sketch({', '.join(said)})"

    def shape(self) -> EngineShape:
        """Say it in full."""
        groups: tuple[GroupShape, ...] = (GroupShape(("full.0", "full.1"), TOKENS_PER_BLOCK),)
        if self.window is not None:
            groups += (GroupShape(("window.0",), TOKENS_PER_BLOCK, Kind.WINDOW, self.window),)
        return _KnownShape(
            self.blocks + 1,
            groups,
            self.asynchronous,
            Runner(self.runner),
            self.ranks,
            budget_tokens=self.budget_tokens,
            priority=self.priority,
            siblings=Siblings(self.sibling),
            with_events=self.events,
            host_pages=self.host_pages,
            settings={
                "eviction_policy": self.policy,
                "blocks_per_chunk": self.blocks_per_chunk,
                "store_threshold": self.store_threshold,
                "store_policy": "lazy" if self.lazy else "eager",
                "flush_limit_s": FLUSH_LIMIT_S,
                "defer_limit_s": self.defer_limit_s,
                "transfer_deadline_s": 2.0,
                "store_queue": 1 << 20,
                "offload_prompt_only": False,
                "self_test": False,
            },
        )


class _KnownShape(EngineShape):
    """Its configuration is worked out once a process: shrinking builds hundreds of engines of one shape."""

    KNOWN: ClassVar[dict[str, VllmConfig]] = {}

    def vllm_config(self, folder: Path) -> VllmConfig:
        name = repr(self)
        if name not in self.KNOWN:
            self.KNOWN[name] = super().vllm_config(folder)
        return self.KNOWN[name]


class Life:
    """One engine and what was asked of it.

    Args:
        sketch: What it looks like.

    Attributes:
        engine: The engine.
        clock: Its time.
        asked: Requests, by name, in order.
        aborted: Names of those that were.
        copiers: By rank and direction.
        siblings: Of each rank; none without another connector.
        moved: There was a step since the last reset.
        happened: How often what was told had which effect.
    """

    def __init__(self, sketch: Sketch) -> None:
        self.shape = sketch.shape()
        self.clock = VirtualClock()
        self.copiers = {
            (rank, way): SteeredDevice(self.clock, sketch.held in ("both", way.value), not sketch.stubborn)
            for rank in range(sketch.ranks)
            for way in Direction
        }
        self._late = LateRanks(sketch.ranks)
        with tempfile.TemporaryDirectory() as folder:
            self.engine = ModelEngine(
                Path(folder), self.shape, lambda rank, way: self.copiers[rank, way], self.clock, self._late
            )
        self.engine.answers.late_share = LateRanks.SHARE
        self.engine.runner.between = self._between
        self.siblings = [SteeredSibling(one) for one in siblings_of(self.engine.ranks)]
        for steered in self.siblings:
            steered.sibling.chance = steered  # type: ignore[assignment]
        self.asked: dict[str, Ask] = {}
        self.aborted: set[str] = set()
        self.moved = False
        self.happened: Counter[str] = Counter()
        self._points = 0
        self._at_point: dict[int, Callable[[], None]] = {}

    # -- names ------------------------------------------------------------------------------------------

    @property
    def next_name(self) -> str:
        """Of the request that is asked next."""
        return f"r{len(self.asked)}"

    @property
    def live(self) -> list[str]:
        """Requests that can be aborted."""
        return [name for name, one in self.engine.scheduler.requests.items() if not one.is_finished()]

    def copies(self, unbegun: bool = False) -> list[str]:
        """Names of copies under way: ``load 3``, and ``load 3 of rank 1`` where there are several ranks."""
        return [
            self._name_of(rank, way, job_id)
            for (rank, way), copier in self.copiers.items()
            for job_id in (copier.unbegun_ids if unbegun else copier.open_ids)
        ]

    def sibling_loads(self) -> list[str]:
        """Names of the sibling's loads under way: ``r0``, or ``r0 of rank 1``."""
        many = len(self.siblings) > 1
        return [
            f"{name} of rank {rank}" if many else name
            for rank, one in enumerate(self.siblings)
            for name in one.open_ids
        ]

    @property
    def longest_tokens(self) -> int:
        """Tokens of a prompt and its answer that fit the device; each group needs blocks of its own."""
        return (self.shape.num_blocks - 3) // len(self.shape.groups) * self.shape.tokens_per_block

    @property
    def wedged(self) -> bool:
        """Whether a copy never ends."""
        return any(one.stuck_ids for one in self.copiers.values())

    # -- what can be told -------------------------------------------------------------------------------

    def ask(self, name: str, ask: Ask) -> None:
        """Add a request."""
        self.asked[name] = ask
        self.happened[f"ask: {ask.kind}"] += 1
        self.engine.add(name, ask.prompt, ask.max_tokens, **ask.all_arguments())

    def abort(self, name: str) -> None:
        """Abort a request in whatever phase it is."""
        status = RequestStatus(self.engine.scheduler.requests[name].status)
        self.happened[f"abort: {status.name.lower()}"] += 1
        self.aborted.add(name)
        self.engine.abort(name)

    def step(self, point: int = 0, then: Callable[[], None] | None = None) -> None:
        """Let a millisecond pass, and the engine take a step if it would.

        Args:
            point: Of the step, one of those at which ``ModelEngine`` lets copies go on.
            then: What happens there.
        """
        self.clock.advance(0.001)
        self.moved = True
        self._points, self._at_point = 0, {} if then is None else {point: then}
        if self.engine.scheduler.has_requests():
            step = self.engine.step()
            self.happened["step"] += 1
            self.happened["preemption"] += len(step.preempted_req_ids or ())
            metadata = own_metadata(step.kv_connector_metadata)
            self.happened["flush"] += len(metadata.jobs_to_flush)
            for job in metadata.jobs:
                self.happened[f"job: {job.direction.value}"] += 1
                self.happened["load behind a store"] += bool(job.after)
        elif not self.engine.update():
            self._between()  # asleep
        for late in self._at_point.values():
            late()  # a step that computes nothing has fewer points
        self._at_point = {}

    def take_results(self) -> None:
        """Take in the results of the oldest step before the next one is planned."""
        self.happened["results early"] += self.engine.update()

    def finish(self, copy: str) -> None:
        """Let a copy end well, or as it has to: cancelled, or past its deadline."""
        copier, job_id = self._copy(copy)
        self.happened["copy finished"] += 1
        copier.finish(job_id)

    def fail(self, copy: str) -> None:
        """Let a copy fail where it is."""
        copier, job_id = self._copy(copy)
        self.happened["copy failed"] += 1
        copier.fail(job_id)

    def half(self, copy: str) -> None:
        """Let a copy begin and stop half way, until it is told more."""
        copier, job_id = self._copy(copy)
        self.happened["copy half way"] += 1
        copier.half(job_id)

    def wedge(self, copy: str) -> None:
        """Let a copy stop half way and be deaf."""
        copier, job_id = self._copy(copy)
        self.happened["copy wedged"] += 1
        copier.wedge(job_id)

    def end_sibling_load(self, load: str, fails: bool) -> None:
        """Let what another connector brings arrive in the next step."""
        name, _, rank = load.partition(" of rank ")
        self.happened[f"sibling {'failed' if fails else 'done'}"] += 1
        self.siblings[int(rank or 0)].end([name], fails)

    def delay_answer(self, rank: int) -> None:
        """Let what a rank says at the end of the next step come a step late."""
        self.happened["late answer"] += 1
        self._late.late.add(rank)

    def reset(self, connector_too: bool, running: bool) -> None:
        """Forget what the engine caches, or what the connector does too; maybe preempt all that runs."""
        self.moved = False
        what = "running" if running else "connector" if connector_too else "device"
        try:
            done = self.engine.scheduler.reset_prefix_cache(running, connector_too)
        except RuntimeError as error:
            # vLLM's own refusal, while a load or a step under way holds blocks.
            if "Failed to reset KV cache" not in str(error):
                raise
            done = False
        self.happened[f"reset: {what} {'done' if done else 'refused'}"] += 1

    def pause(self, everybody: bool) -> None:
        """Admit nobody any more, or run nobody at all."""
        self.happened["pause"] += 1
        self.engine.scheduler.set_pause_state(PauseState.PAUSED_ALL if everybody else PauseState.PAUSED_NEW)

    def unpause(self) -> None:
        """Go on."""
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    @property
    def paused(self) -> bool:
        """Whether the engine is paused."""
        return bool(self.engine.scheduler.pause_state is not PauseState.UNPAUSED)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.happened["time passes"] += 1
        self.clock.advance(seconds)

    # -- what has to be true ----------------------------------------------------------------------------

    def check(self) -> None:
        """Check what holds at any time; what a forward reads and a load brings is checked as it happens.

        Raises:
            WrongBytesError: The engine's cache names a block that is not what its hash stands for.
            LeakError: The books do not balance, or a budget is exceeded.
            HangError: A hook has waited too long, or a request has ended with an error.
        """
        self.engine.check_cached()
        check_books(self.engine)
        took_s, hook = self.engine.longest_hook_s
        if took_s > FLUSH_LIMIT_S + 1e-6:
            raise HangError(f"{hook} waited {took_s:.3f} s, where {FLUSH_LIMIT_S} s are allowed")
        if self.engine.errors:
            raise HangError(f"requests ended with an error: {self.engine.errors}")

    def check_answers(self) -> None:
        """Check the tokens of all requests, which have ended.

        Raises:
            HangError: One got others than a run without any cache gives.
        """
        for name, ask in self.asked.items():
            answer, given = ask.answer(), self.engine.outputs[name]
            if given != (answer[: len(given)] if name in self.aborted else answer):
                raise HangError(f"{name}: {given} where {answer} was due")

    # -- inside -----------------------------------------------------------------------------------------

    def _between(self) -> None:
        self.clock.advance(0.0001)
        if (then := self._at_point.pop(self._points, None)) is not None:
            then()
        self._points += 1
        for copier in self.copiers.values():
            copier.progress()

    def _name_of(self, rank: int, way: Direction, job_id: JobId) -> str:
        return f"{way.value} {job_id}" + (f" of rank {rank}" if self.shape.rank_count > 1 else "")

    def _copy(self, name: str) -> tuple[SteeredDevice, JobId]:
        what, _, rank = name.partition(" of rank ")
        way, _, job_id = what.partition(" ")
        return self.copiers[int(rank or 0), Direction(way)], JobId(int(job_id))
