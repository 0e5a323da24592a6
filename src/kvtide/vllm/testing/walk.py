"""A seeded walk over a model engine: whatever happens in whatever order, what was promised holds.

A walk is one engine's life, day after day. In a day, requests come and go while copies are late, fail or
never end; then the engine has to come to rest, with the right tokens, right bytes and balanced books, and
what was just asked has to be hit when it is asked again.
"""

import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvtide.jobs import Direction, JobId
from kvtide.testing.clock import VirtualClock
from kvtide.testing.faulty import EndlessWaitError
from kvtide.vllm.testing.asks import Ask, Asker
from kvtide.vllm.testing.below import lower_of, shared_of, store_of
from kvtide.vllm.testing.configuration import FLUSH_LIMIT_S, Configuration
from kvtide.vllm.testing.copies import Copies
from kvtide.vllm.testing.counting import count
from kvtide.vllm.testing.days import Day, draw_day
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.lanes import Lanes
from kvtide.vllm.testing.neighbours import Neighbours
from kvtide.vllm.testing.promises import HangError
from kvtide.vllm.testing.questions import Questions
from kvtide.vllm.testing.ranks import own_metadata, siblings_of
from kvtide.vllm.testing.report import Report
from kvtide.vllm.testing.resets import Resets
from kvtide.vllm.testing.rest import check_books, check_rest
from kvtide.vllm.testing.restarts import Restarts
from kvtide.vllm.testing.revisit import Revisit
from kvtide.vllm.testing.stored import check_stored
from kvtide.vllm.testing.told import Told
from kvtide.vllm.testing.walk_below import Below

QUARANTINE_S = 200.0
"""After so long an idle engine sleeps, whatever a wedged copy does."""

WAKING_TURNS = 8

STARVED_TURNS = 40
"""So many turns without a token, and with blocks held for a wedged copy: there is no room for anybody."""

SHARED_MEMORY = Path("/dev/shm")
"""Where folders are cheap, if there is one."""

OUTSIDE = {RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.RUNNING}
"""Of requests that await no load. Some may run again and again, only to be preempted for want of room."""


class Walk:
    """One walk.

    Args:
        configuration: What kind of engine.
        seed: The only source of choice.
        tiers: With such ones below host memory for certain, see ``Configuration.shape``.
    """

    def __init__(self, configuration: Configuration, seed: int, tiers: str = "") -> None:
        self._chance = random.Random(f"{configuration.name} {seed}")
        self._folder = tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        folder = Path(self._folder.name)
        self.shape = configuration.shape(self._chance, folder / "disk", tiers)
        self.clock = VirtualClock()
        self._store = store_of(self.shape.settings)
        self.copies = Copies(random.Random(self._chance.random()), self.clock, FLUSH_LIMIT_S)
        self.lanes = Lanes(random.Random(self._chance.random()), self.clock)
        self.lanes.questions.told = self._store.gone  # what is told is a hint: the books may be wrong
        self.engine = ModelEngine(
            folder / "model",
            self.shape,
            self.copies.copier,
            self.clock,
            random.Random(self._chance.random()),
            self.lanes.lane,
            self.lanes.prober,
        )
        self.engine.runner.between = self._between
        self.report = Report()
        self._asker = Asker(random.Random(self._chance.random()), self.shape)
        self._asked: dict[str, Ask] = {}
        self._aborted: set[str] = set()
        self._given_up: set[JobId] = set()
        self._told = Told()
        self._idle_turns = 0  # in a row that have computed nothing for the first time
        self._furthest: dict[str, int] = {}
        happened = self.report.happened
        self.resets = Resets(self.engine, self.copies, happened, self._chance, self._turn)
        self.restarts = Restarts(self.engine, self.copies, self.lanes, self.clock, happened, self._chance)
        self.questions = Questions(self.engine, self.clock, happened)
        self.neighbours = Neighbours(self._store, happened, self._chance)
        self._watch()
        self._below: Below | None = None
        if lower_of(self.engine) is not None:
            chance = self._chance
            self._below = Below(
                self.engine, self.lanes, happened, chance, self._settle, self._restart_at_rest
            )
        self._tight = configuration.small and len(self.shape.groups) > 1
        self._day = draw_day(self._chance, self._tight, self.shape.rank_count)
        self._actions: dict[str, Callable[[], None]] = {
            "abort": self._abort,
            "all again": self._ask_all_again,
            "load together": self._load_together,
            "abort what loads again": self._abort_what_loads_again,
            "forget device": self.resets.device,
            "reset": lambda: self._reset(self.resets.connector),
            "reset running": lambda: self._reset(self.resets.running),
            "forget running": self.resets.running_device_alone,
            "restart": self._restart_by_chance,
            "pause": self._pause,
            "sleep": lambda: self.resets.sleep(self._aborted),
            "jump": self._jump,
            "update early": self._update_early,
            "neighbours": self._neighbours,
            "earlier again": self._ask_earlier_again,
            "check device": self._check_device,
            "check books": self._check_books,
            "check host": self._check_host,
        }

    def run(self, steps: int) -> Report:
        """Walk for about so many steps.

        Raises:
            WrongBytesError: A byte was wrong.
            HangError: Something did not end, or a hook waited.
            LeakError: Something was left over.
        """
        try:
            while self.report.steps < steps:
                self._live(min(self._chance.randrange(60, 400), steps - self.report.steps))
        except EndlessWaitError as error:
            raise HangError(str(error)) from error
        finally:
            count(self.report, self.engine, self.copies, self.lanes)
            self.report.happened.update(self._store.happened)
            self.lanes.kill()
            self.engine.close()
            self._folder.cleanup()
        return self.report

    # -- a day ------------------------------------------------------------------------------------------

    def _live(self, steps: int) -> None:
        chance = self._chance
        self._begin(draw_day(chance, self._tight, self.shape.rank_count))
        end = self.report.steps + steps
        while self.report.steps < end and not self._starved:
            live = len(self.engine.scheduler.requests)
            if live < self._day.crowd and chance.random() < 0.7 / (1 + live / 3):
                self._ask(self._asker.draw())
            for name, rate in self._day.rates.items():
                if rate and chance.random() < rate:
                    self._actions[name]()
            self._turn(chance.expovariate(1000.0))
        self._rest()

    def _begin(self, day: Day) -> None:
        self._day = day
        many = self._below is not None and not day.crowded and self._chance.random() < 0.6
        self._asker.new_day(day.crowded, many)
        self.report.happened[f"day: {day.sort}"] += 1
        self.copies.go_like(day.copies)
        self.lanes.go_like(day.calls, day.questions)
        if self._below is not None:
            self.report.happened[f"tiers: {day.weather}"] += 1
        self._let_ranks_be_as_today()

    def _let_ranks_be_as_today(self) -> None:
        self.engine.answers.late_share = self._day.late_share
        for sibling in siblings_of(self.engine.ranks):
            sibling.fail_share = self._day.fail_share

    def _turn(self, pause_s: float) -> None:
        """Let some time pass, and the engine take a step if it would."""
        self.clock.advance(pause_s)
        if self.engine.scheduler.has_requests():
            self._step()
        elif not self.engine.update():
            self.report.steps += 1  # asleep: nothing moves but copies
            self.report.happened["asleep"] += 1
            self._between()
        took_s, hook = self.engine.longest_hook_s
        if took_s > FLUSH_LIMIT_S + 1e-6:
            raise HangError(f"{hook} waited {took_s:.3f} s, where {FLUSH_LIMIT_S} s are allowed")

    def _step(self) -> None:
        report, happened = self.report, self.report.happened
        happened["idle engine drains"] += not self.engine.scheduler.requests
        step = self.engine.step()
        scheduled = step.total_num_scheduled_tokens > 0
        report.steps += 1
        report.token_steps += scheduled
        self._idle_turns = 0 if self._gets_further(step.num_scheduled_tokens) else self._idle_turns + 1
        happened["preemption"] += len(step.preempted_req_ids or ())
        metadata = own_metadata(step.kv_connector_metadata)
        happened["flush"] += len(metadata.jobs_to_flush)
        for job in metadata.jobs:
            happened[f"job: {job.direction.value}"] += 1
            happened["load behind a store"] += bool(job.after)
        self.resets.look_at(step, metadata)
        happened["load given up"] += len(metadata.jobs_to_give_up)
        self._given_up |= metadata.jobs_to_give_up
        if self._given_up:
            self._given_up &= self.copies.stuck(Direction.LOAD)
            happened["blocks held behind a wedged load, others ran"] += bool(self._given_up) and scheduled

    # -- rest -------------------------------------------------------------------------------------------

    def _gets_further(self, scheduled: Iterable[str]) -> bool:
        """Whether a step computes of some request what has never been computed of it."""
        further = False
        for name in scheduled:
            request = self.engine.scheduler.requests.get(name)
            if request is None:  # it has ended
                further = True
            elif request.num_computed_tokens > self._furthest.get(name, 0):
                self._furthest[name], further = request.num_computed_tokens, True
        return further

    def _rest(self) -> None:
        """Let everything end, in stages, and look at what is left."""
        self._come_to_rest(stuck=True)
        if self.copies.stuck(Direction.LOAD):
            self._fill_behind_wedged_loads()
        if not self.engine.scheduler.requests and self.copies.only_stuck and self.copies.any_stuck:
            self.clock.advance(QUARANTINE_S)
            for _ in range(WAKING_TURNS):
                self._turn(0.1)  # answers that have come meanwhile are heard
            if self.engine.scheduler.has_requests():
                raise HangError("an idle engine is kept awake by a copy that never ends")
            self.report.happened["slept beside a wedged copy"] += 1
        self.copies.release()
        self.copies.go_like({})
        self.lanes.release()
        self.lanes.go_like({})
        self.engine.answers.late_share = 0.0
        self._ask(self._asker.draw())  # wakes an engine that sleeps, so that late answers are heard
        self._come_to_rest(stuck=False)
        self._check_answers()
        self._check_device()
        if self._below is not None:
            self._below.settle()
        check_rest(self.engine)
        self._check_host()
        self._revisit()
        self._check_host()
        if self._below is not None:
            self._below.check()
            self.report.requests += self._below.revisit(self._again(), self._asker.longest_tokens)
            check_rest(self.engine)
            self._check_host()
        self.report.happened["announcements checked"] += self._told.check(self.engine)
        self._asked.clear()
        self._aborted.clear()
        self.engine.forget()

    def _fill_behind_wedged_loads(self) -> None:
        """Have every block used that is not held; what the copies write late must land in none of them."""
        self.copies.go_like({})
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        for _ in range(3):
            free = pool.get_num_free_blocks()
            self.report.happened["device filled behind a wedged load"] += 1
            for ask in self._asker.fillers(free):
                self._ask(ask)
            if self._chance.random() < 0.3:
                return  # the copies end while these run
            self._come_to_rest(stuck=True)

    def _come_to_rest(self, stuck: bool) -> None:
        """Step until the engine sleeps; with ``stuck``, until nothing but copies that never end is left."""
        engine = self.engine
        left = sum(self._asked[name].max_tokens + 60 for name in engine.scheduler.requests)
        quiet, pause_s = 0, 0.005
        for _ in range(2 * left + 400):
            if not engine.busy:
                return
            if stuck and self._starved:
                self.report.happened["starved by a wedged copy"] += 1
                return
            nothing_else = stuck and not engine.scheduler.requests and self.copies.only_stuck
            quiet = quiet + 1 if nothing_else else 0
            if quiet > 5:
                return
            self._turn(pause_s)
            # Ever longer pauses: nothing waits for ever but what is stuck.
            pause_s = min(2.0, 1.5 * pause_s + 0.001) if self._idle_turns else self._chance.expovariate(200.0)
        waiting = {
            name: RequestStatus(request.status).name for name, request in engine.scheduler.requests.items()
        }
        books = engine.describe()
        raise HangError(f"not at rest: requests {waiting}, copies {self.copies.describe()}, books {books}")

    @property
    def _starved(self) -> bool:
        """Whether all may wait: blocks are held for copies that do not end, and nobody awaits a load."""
        if self._idle_turns < STARVED_TURNS or not (self._given_up or self.copies.stuck(Direction.STORE)):
            return False
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        held = pool.get_num_free_blocks() < self.shape.num_blocks - 1
        return held and {one.status for one in self.engine.scheduler.requests.values()} <= OUTSIDE

    def _check_answers(self) -> None:
        if self.engine.errors:
            raise HangError(f"requests ended with an error: {self.engine.errors}")
        for name, ask in self._asked.items():
            answer, given = ask.answer(), self.engine.outputs[name]
            if given != (answer[: len(given)] if name in self._aborted else answer):
                raise HangError(f"{name}: {given} where {answer} was due")

    def _again(self) -> Ask:
        """Choose what to ask again."""
        candidates = [name for name in self._asked if name not in self._aborted]
        return self._asked[self._chance.choice(candidates)] if candidates else self._asker.draw()

    def _revisit(self) -> None:
        hits = Revisit(self.engine, self._again(), self._settle, self.report.requests).run(
            self._asker.longest_tokens
        )
        self.report.requests += hits.asked
        happened = self.report.happened
        happened["revisit"] += 1
        happened["hit again"] += hits.hit_tokens > 0
        happened["answer hit by the next turn"] += hits.turn_hit_tokens > 0

    def _settle(self) -> None:
        for _ in range(2000):
            if not self.engine.busy:
                return
            self._turn(0.001)
        raise HangError(f"not at rest after one request, books {self.engine.describe()}")

    # -- what happens -----------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        name = f"r{self.report.requests}"
        self.report.requests += 1
        self._asked[name] = ask
        happened = self.report.happened
        happened[f"ask: {ask.kind}"] += 1
        for trait in ask.traits():
            happened[f"ask: {trait}"] += 1
        tokens_per_slot = self.shape.tokens_per_block * int(self.shape.settings["blocks_per_chunk"])
        slots = self.engine.connector._deciding._manager.capacity
        happened["ask: longer than the host pool"] += len(ask.prompt) > slots * tokens_per_slot
        self.engine.add(name, ask.prompt, ask.max_tokens, **ask.all_arguments())

    def _ask_all_again(self) -> None:
        """Have several prompts loaded at the same time."""
        self.resets.running_device_alone()
        for ask in self._asker.again(3):
            self._ask(ask)

    def _ask_earlier_again(self) -> None:
        """Ask what the device has forgotten, and host memory perhaps: it may have to come from below."""
        self.resets.device()
        for ask in self._asker.again(self._chance.randrange(1, 6)):
            self._ask(ask)

    def _reset(self, reset: Callable[[], None]) -> None:
        """Reset, and ask what a shared tier may have kept over it, or what others have of other weights."""
        reset()
        if shared_of(self.engine):
            self.neighbours.keep_their_own()
            for ask in self._asker.again(self._chance.randrange(1, 6)):
                self._ask(ask)

    def _load_together(self) -> None:
        """Have prompts that fill the device loaded at the same time, and nothing that runs beside them."""
        self.copies.go_like({})
        self._come_to_rest(stuck=False)
        for ask in self._asker.stems(whole=False):
            self._ask(ask)
            self._come_to_rest(stuck=False)
        self.resets.device()
        self.copies.go_like(self._day.copies)
        for ask in self._asker.stems(whole=self._chance.random() < 0.5):
            self._ask(ask)
        self._come_to_rest(stuck=True)
        self.report.happened["prompts loaded together"] += 1

    def _abort_what_loads_again(self) -> None:
        """Abort who has run, lost everything, and is being brought what another connector holds."""
        self.resets.running()
        self._turn(0.0005)
        for name, request in list(self.engine.scheduler.requests.items()):
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request.num_preemptions:
                self.report.happened["abort: ran, and loads again"] += 1
                self._aborted.add(name)
                self.engine.abort(name)

    def _abort(self) -> None:
        live = self.engine.scheduler.requests
        names = [name for name, request in live.items() if not request.is_finished()]
        loading = [name for name in names if live[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        if names:
            # A load takes a few steps: by chance it would seldom be met.
            name = self._chance.choice(loading if loading and self._chance.random() < 0.5 else names)
            self.report.happened[f"abort: {RequestStatus(live[name].status).name.lower()}"] += 1
            self._aborted.add(name)
            self.engine.abort(name)

    def _restart_by_chance(self) -> None:
        if self._below is not None:
            self._begin_anew(self.restarts.by_chance)
            for ask in self._asker.again(self._chance.randrange(5)):
                self._ask(ask)

    def _restart_at_rest(self, killed: bool) -> None:
        self._begin_anew(lambda: self.restarts.restart(killed))

    def _begin_anew(self, restart: Callable[[], None]) -> None:
        """See what there is to be seen for the last time, have the process begin anew, and forget it."""
        self._aborted |= set(self._asked)
        self._check_answers()
        self.report.happened["announcements checked"] += self._told.check(self.engine)
        restart()
        for forgotten in (self._asked, self._aborted, self._given_up, self._furthest):
            forgotten.clear()
        self._idle_turns = 0
        self._watch()
        self.resets.begin_anew()
        self._let_ranks_be_as_today()

    def _watch(self) -> None:
        """Have a process that has begun be watched, and have neighbours."""
        self.questions.watch()
        self.neighbours.move_in(shared_of(self.engine))

    def _neighbours(self) -> None:
        if shared_of(self.engine):
            self.neighbours.act()

    def _pause(self) -> None:
        state = self._chance.choice((PauseState.PAUSED_ALL, PauseState.PAUSED_NEW))
        self.engine.scheduler.set_pause_state(state)
        self.report.happened[f"pause: {state.name.lower()}"] += 1
        for _ in range(self._chance.randrange(1, 12)):
            self._turn(self._chance.expovariate(300.0))
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _jump(self) -> None:
        # What a shared tier has told is taken to be so for half a minute.
        longer_s = (40.0,) if shared_of(self.engine) else ()
        self.clock.advance(self._chance.choice((*self._day.jumps_s, *longer_s)))
        self.report.happened["time jumps"] += 1

    def _update_early(self) -> None:
        if self.shape.asynchronous:
            self.report.happened["results early"] += self.engine.update()

    def _check_device(self) -> None:
        self.report.happened["cached blocks checked"] += self.engine.check_cached()

    def _check_host(self) -> None:
        self.report.happened["stored chunks checked"] += check_stored(self.engine)

    def _check_books(self) -> None:
        self.report.happened["books checked"] += 1
        check_books(self.engine)
        self.questions.check()

    def _between(self) -> None:
        self.clock.advance(0.0001)
        self.copies.progress()
        self.lanes.progress()
