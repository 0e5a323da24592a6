"""A seeded walk over a model engine: whatever happens in whatever order, what was promised holds.

A walk is one engine's life, day after day. In a day, requests come and go while copies are late, fail or
never end; then the engine has to come to rest, with the right tokens, right bytes and balanced books, and
what was just asked has to be hit when it is asked again.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvtide.jobs import Direction
from kvtide.testing.clock import VirtualClock
from kvtide.testing.faulty import KINDS, FaultPlan, FaultyDevice
from kvtide.vllm.testing.asks import Ask, Asker
from kvtide.vllm.testing.configuration import FLUSH_LIMIT_S, Configuration
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import HangError, LeakError
from kvtide.vllm.testing.ranks import own_metadata
from kvtide.vllm.testing.rest import check_rest, revisit

QUARANTINE_S = 200.0
"""After so long an idle engine sleeps, whatever a wedged copy does."""

CALM = {"instant": 1.0}


@dataclass(slots=True)
class Report:
    """What a walk saw.

    Attributes:
        steps: Steps of the engine.
        token_steps: Those that scheduled tokens.
        requests: Asked.
        loads: That ended well, whatever the number of ranks.
        hit_tokens: That came from host memory.
        happened: Events and faults, by name.
    """

    steps: int = 0
    token_steps: int = 0
    requests: int = 0
    loads: int = 0
    hit_tokens: int = 0
    happened: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Report") -> None:
        """Add another walk's."""
        self.steps += other.steps
        self.token_steps += other.token_steps
        self.requests += other.requests
        self.loads += other.loads
        self.hit_tokens += other.hit_tokens
        self.happened.update(other.happened)

    @property
    def faults(self) -> int:
        """Copies that did not simply go well, and answers that were late."""
        harmless = {"copy: instant", "copy: quick"}
        return sum(
            count
            for name, count in self.happened.items()
            if (name.startswith("copy: ") and name not in harmless)
            or name in ("late answer", "sibling failed")
        )


class Walk:
    """One walk.

    Args:
        configuration: What kind of engine.
        seed: The only source of choice.
    """

    def __init__(self, configuration: Configuration, seed: int) -> None:
        self._chance = random.Random(f"{configuration.name} {seed}")
        self.shape = configuration.shape(self._chance)
        self.clock = VirtualClock()
        self.plan = FaultPlan(random.Random(self._chance.random()), CALM)
        self.copiers: dict[tuple[int, Direction], FaultyDevice] = {}
        with tempfile.TemporaryDirectory() as folder:
            self.engine = ModelEngine(
                Path(folder), self.shape, self._copier, self.clock, random.Random(self._chance.random())
            )
        self.engine.runner.between = self._between
        self.report = Report()
        self._asker = Asker(random.Random(self._chance.random()), self.shape)
        self._asked: dict[str, Ask] = {}
        self._aborted: set[str] = set()
        self._rates: dict[Callable[[], None], float] = {}
        self._reset_at = 0

    def run(self, steps: int) -> Report:
        """Walk for about so many steps.

        Raises:
            WrongBytesError: A byte was wrong.
            HangError: Something did not end, or a hook waited.
            LeakError: Something was left over.
        """
        try:
            while self.report.steps < steps:
                self._day(min(self._chance.randrange(60, 400), steps - self.report.steps))
        finally:
            self._count()
            self.engine.close()
        return self.report

    # -- a day ------------------------------------------------------------------------------------------

    def _day(self, steps: int) -> None:
        chance = self._chance
        self._asker.new_day()
        self.plan.weights = _weights(chance)
        self.engine.answers.late_share = chance.choice((0.0, 0.05, 0.3))
        crowd = chance.choice((3, 6, 10))
        # Not every day has everything: what is rare beside much else is frequent beside little.
        self._rates = {
            self._abort: chance.choice((0.0, 0.02, 0.1)),
            self._forget_device: chance.choice((0.0, 0.01, 0.05)),
            self._reset: chance.choice((0.0, 0.0, 0.003, 0.02)),
            self._reset_running: chance.choice((0.0, 0.0, 0.003, 0.02)),
            self._forget_running: chance.choice((0.0, 0.01, 0.05)),
            self._pause: chance.choice((0.0, 0.0, 0.0, 0.02)),
            self._jump: chance.choice((0.0, 0.01, 0.05)),
            self._check_bytes: 0.03,
            self._check_books: 0.06,
            self._update_early: chance.choice((0.0, 0.3)) if self.shape.asynchronous else 0.0,
        }
        end = self.report.steps + steps
        while self.report.steps < end:
            live = len(self.engine.scheduler.requests)
            if live < crowd and chance.random() < 0.7 / (1 + live / 3):
                self._ask()
            for action, rate in self._rates.items():
                if rate and chance.random() < rate:
                    action()
            self._turn(chance.expovariate(1000.0))
        self._rest()

    def _turn(self, pause_s: float) -> None:
        """Let some time pass, and the engine take a step if it would."""
        self.clock.advance(pause_s)
        engine = self.engine
        if engine.scheduler.has_requests():
            step = engine.step()
            self.report.steps += 1
            self.report.token_steps += step.total_num_scheduled_tokens > 0
            happened = self.report.happened
            happened["preemption"] += len(step.preempted_req_ids or ())
            metadata = own_metadata(step.kv_connector_metadata)
            happened["flush"] += len(metadata.jobs_to_flush)
            for job in metadata.jobs:
                happened[f"job: {job.direction.value}"] += 1
                happened["load behind a store"] += bool(job.after)
        elif not engine.update():
            self.report.steps += 1  # asleep: nothing moves but copies
            self.report.happened["asleep"] += 1
            self._between()
        took_s, hook = engine.longest_hook_s
        if took_s > FLUSH_LIMIT_S + 1e-6:
            raise HangError(f"{hook} waited {took_s:.3f} s, where {FLUSH_LIMIT_S} s are allowed")

    def _rest(self) -> None:
        """Let everything end, in stages, and look at what is left."""
        engine = self.engine
        self._come_to_rest(stuck=True)
        if self._only_stuck_copies() and self._stuck():
            self.clock.advance(QUARANTINE_S)
            if engine.scheduler.has_requests():
                raise HangError("an idle engine is kept awake by a copy that never ends")
            self.report.happened["slept beside a wedged copy"] += 1
        for copier in self.copiers.values():
            copier.release()
        self.plan.weights = CALM
        engine.answers.late_share = 0.0
        self._ask()  # wakes an engine that sleeps, so that late answers are heard
        self._come_to_rest(stuck=False)
        self._check_answers()
        self._check_bytes()
        check_rest(engine)
        self._revisit()
        self._asked.clear()
        self._aborted.clear()
        engine.forget()

    def _come_to_rest(self, stuck: bool) -> None:
        """Step until the engine sleeps; with ``stuck``, until nothing but copies that never end is left."""
        engine = self.engine
        left = sum(self._asked[name].max_tokens + 60 for name in engine.scheduler.requests)
        quiet = 0
        for turn in range(2 * left + 400):
            if not engine.busy:
                return
            quiet = quiet + 1 if stuck and self._only_stuck_copies() else 0
            if quiet > 5:
                return
            # Ever longer pauses: nothing waits for ever but what is stuck.
            self._turn(self._chance.expovariate(200.0) * (1 + turn / 50))
        waiting = {
            name: RequestStatus(request.status).name for name, request in engine.scheduler.requests.items()
        }
        if stuck and self._starved(set(waiting.values())):
            self.report.happened["starved by a wedged load"] += 1
            return
        copies = {f"{rank} {way.value}": one.open_ids for (rank, way), one in self.copiers.items()}
        raise HangError(f"not at rest: requests {waiting}, copies {copies}, books {engine.describe()}")

    def _starved(self, statuses: set[str]) -> bool:
        """Whether they may wait: blocks are held for a load that never ends, and nobody awaits a load."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        held = pool.get_num_free_blocks() < self.shape.num_blocks - 1
        return self._stuck(Direction.LOAD) and held and statuses <= {"WAITING", "PREEMPTED"}

    def _only_stuck_copies(self) -> bool:
        if self.engine.scheduler.requests:
            return False
        return all(one.open_ids == one.stuck_ids for one in self.copiers.values())

    def _stuck(self, direction: Direction | None = None) -> bool:
        return any(one.stuck_ids for (_, way), one in self.copiers.items() if direction in (None, way))

    def _check_answers(self) -> None:
        if self.engine.errors:
            raise HangError(f"requests ended with an error: {self.engine.errors}")
        for name, ask in self._asked.items():
            answer, given = ask.answer(), self.engine.outputs[name]
            if given != (answer[: len(given)] if name in self._aborted else answer):
                raise HangError(f"{name}: {given} where {answer} was due")

    def _revisit(self) -> None:
        candidates = [name for name in self._asked if name not in self._aborted]
        ask = self._asked[self._chance.choice(candidates)] if candidates else self._asker.draw()
        before = self.report.requests
        hits = revisit(self.engine, ask, self._settle, before)
        self.report.requests += hits.asked
        self.report.happened["hit again"] += hits.hit_tokens > 0
        self.report.happened["revisit"] += 1

    def _settle(self) -> None:
        for _ in range(2000):
            if not self.engine.busy:
                return
            self._turn(0.001)
        raise HangError(f"not at rest after one request, books {self.engine.describe()}")

    # -- what happens -----------------------------------------------------------------------------------

    def _ask(self) -> None:
        ask = self._asker.draw()
        name = f"r{self.report.requests}"
        self.report.requests += 1
        self._asked[name] = ask
        self.report.happened[f"ask: {ask.kind}"] += 1
        for trait in ask.traits():
            self.report.happened[f"ask: {trait}"] += 1
        self.engine.add(name, ask.prompt, ask.max_tokens, **ask.all_arguments())

    def _abort(self) -> None:
        live = self.engine.scheduler.requests
        names = [name for name, request in live.items() if not request.is_finished()]
        if names:
            name = self._chance.choice(names)
            self.report.happened[f"abort: {RequestStatus(live[name].status).name.lower()}"] += 1
            self._aborted.add(name)
            self.engine.abort(name)

    def _forget_device(self) -> None:
        done = self.engine.scheduler.reset_prefix_cache()
        self.report.happened[f"reset: device {'done' if done else 'refused'}"] += 1

    def _reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache(reset_connector=True)
        self.report.happened["reset: connector"] += 1

    def _reset_running(self, reset_connector: bool = True) -> None:
        try:
            self.engine.scheduler.reset_prefix_cache(True, reset_connector)
        except RuntimeError as error:
            # vLLM's own refusal, while a load or a step under way holds blocks.
            if "Failed to reset KV cache" not in str(error):
                raise
            self.report.happened["reset: running refused"] += 1
        else:
            self.report.happened["reset: running" if reset_connector else "reset: running, device alone"] += 1

    def _forget_running(self) -> None:
        self._reset_running(reset_connector=False)

    def _pause(self) -> None:
        state = self._chance.choice((PauseState.PAUSED_ALL, PauseState.PAUSED_NEW))
        self.engine.scheduler.set_pause_state(state)
        self.report.happened[f"pause: {state.name.lower()}"] += 1
        for _ in range(self._chance.randrange(1, 12)):
            self._turn(self._chance.expovariate(300.0))
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _jump(self) -> None:
        self.clock.advance(self._chance.choice((0.03, 0.3, 3.0)))
        self.report.happened["time jumps"] += 1

    def _check_bytes(self) -> None:
        self.report.happened["cached blocks checked"] += self.engine.check_cached()

    def _check_books(self) -> None:
        self.report.happened["books checked"] += 1
        try:
            self.engine.check()
        except AssertionError as error:
            raise LeakError(f"books: {error}") from error

    def _update_early(self) -> None:
        self.report.happened["results early"] += self.engine.update()

    # -- copies -----------------------------------------------------------------------------------------

    def _copier(self, rank: int, direction: Direction) -> FaultyDevice:
        return self.copiers.setdefault((rank, direction), FaultyDevice(self.plan, self.clock))

    def _between(self) -> None:
        self.clock.advance(0.0001)
        for copier in self.copiers.values():
            copier.progress()

    def _count(self) -> None:
        report, engine = self.report, self.engine
        report.happened.update(self.plan.happened)
        report.happened["late answer"] += engine.answers.late_count
        if engine.ledger is not None:
            report.happened["events about host memory"] += engine.ledger.event_count
        report.happened["engine: window"] += len(self.shape.groups) > 1
        report.happened[f"engine: sibling {self.shape.siblings.value}"] += 1
        report.happened["load checked"] += engine.checked_loads
        for name, value in engine.counted.data.items():
            if isinstance(value, int | float):
                report.happened[f"counted: {name.rstrip('|')}"] += int(value)
        report.loads = int(engine.counted.data.get("transfers|load", 0)) // self.shape.rank_count
        report.hit_tokens = int(engine.counted.data.get("hit_tokens|host", 0))


def _weights(chance: random.Random) -> dict[str, float]:
    """Draw what today's copies are like: mostly well, or mostly one kind of trouble."""
    rare = {"never begins": 0.02, "never ends": 0.004}
    weights = {kind: chance.choice((0.0, 0.3, 1.0)) * rare.get(kind, 0.15) for kind in KINDS}
    weights["instant"] = chance.choice((0.1, 1.0))
    weights["quick"] = chance.choice((0.3, 1.0))
    if chance.random() < 0.2:
        weights[chance.choice(KINDS[:-2])] = 3.0
    return weights
