"""A Hypothesis state machine over the model engine: failures are shrunk to a short script.

Knows which events there are and draws them; what they do is told in ``machine_life.py``, how everything has
to end in ``machine_rest.py``. A script that Hypothesis prints runs as it stands, without Hypothesis.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtide.vllm.testing.asks import ADAPTERS, Ask, Identity
from kvtide.vllm.testing.machine_life import Life, Sketch
from kvtide.vllm.testing.machine_rest import end_well
from kvtide.vllm.testing.sibling import HELD

CROWD = 6
"""Requests at a time."""

STEMS = "abc"

LONG = 200
"""Tokens of one request's own, beyond what the device holds; cut to that."""

SKETCHES = st.builds(
    Sketch,
    asynchronous=st.booleans(),
    runner=st.sampled_from(("v1", "v2", "v1-drafting")),
    ranks=st.sampled_from((1, 2)),
    blocks=st.sampled_from((30, 20, 12)),
    window=st.sampled_from((None, None, 5, 13)),
    blocks_per_chunk=st.sampled_from((1, 1, 2, 3)),
    policy=st.sampled_from(("lru", "arc")),
    host_pages=st.sampled_from((8, 1)),
    budget_tokens=st.sampled_from((256, 17)),
    store_threshold=st.sampled_from((1, 1, 1, 2)),
    defer_limit_s=st.sampled_from((0.05, 0.0)),
    priority=st.booleans(),
    sibling=st.sampled_from(("none", "none", "before", "after")),
    events=st.booleans(),
    held=st.sampled_from(("both", "store", "load")),
    lazy=st.booleans(),
    stubborn=st.booleans(),
)

TRAITS: dict[str, dict[str, Any]] = {
    "no_read": {"no_read": True},
    "no_write": {"no_write": True},
    "max_load_tokens": {"max_load_tokens": 9},
    "max_offload_tokens": {"max_offload_tokens": 9},
}
"""Limits in ``kv_transfer_params``, by what a script calls them."""


def _now(names: Callable[["EngineMachine"], Any]) -> st.SearchStrategy[Any]:
    """One of what there is by the time of drawing."""
    return st.runner().flatmap(lambda machine: st.sampled_from(names(machine)))


NAME = st.runner().map(lambda machine: machine.life.next_name)
COPY = _now(lambda machine: machine.life.copies())
UNBEGUN = _now(lambda machine: machine.life.copies(unbegun=True))
EARLIER = _now(lambda machine: list(machine.life.asked))
GENERATE = st.sampled_from((1, 2, 5, 9, 17))


class EngineMachine(RuleBasedStateMachine):
    """One engine, and everything that can happen to it.

    Attributes:
        life: What has happened so far.
    """

    life: Life

    def __init__(self) -> None:
        super().__init__()
        self._broken = False

    def _tell(self, event: Callable[..., None], *arguments: Any) -> None:
        try:
            event(*arguments)
            self.life.check()
        except Exception:
            self._broken = True  # what is left over does not matter any more
            raise

    def teardown(self) -> None:
        """End: everything has to come to rest and is found in order, unless a promise was broken before."""
        if not hasattr(self, "life"):
            return
        try:
            if not self._broken:
                end_well(self.life)
        finally:
            self.life.engine.close()

    @initialize(sketch=SKETCHES)
    def build(self, sketch: Sketch) -> None:
        """Begin."""
        self.life = Life(sketch)

    # -- requests ---------------------------------------------------------------------------------------

    def _may_ask(self) -> bool:
        return len(self.life.engine.scheduler.requests) < CROWD

    def _ask(self, kind: str, name: str, prompt: list[int], generate: int, trait: str, of: Identity) -> None:
        self._tell(self.life.ask, name, self._asked(kind, prompt, generate, trait, of))

    @precondition(_may_ask)
    @rule(
        name=NAME,
        stem=st.sampled_from(STEMS),
        shared=st.sampled_from((0, 8, 24, 48, 13, 3)),
        own=st.sampled_from((9, 5, 1, 2, 14, LONG, LONG)),
        generate=GENERATE,
        trait=_now(lambda machine: machine.traits),
    )
    def ask(self, name: str, stem: str, shared: int, own: int, generate: int, trait: str) -> None:
        """Ask for something: so many tokens of a stem that others share, and some of its own."""
        prompt = _stem(STEMS.index(stem), shared) + _own(name, own)
        self._ask("long" if own == LONG else "stem", name, prompt, generate, trait, _identity(trait))

    @precondition(lambda self: self._may_ask() and self.life.asked)
    @rule(
        name=NAME,
        earlier=EARLIER,
        emptied=st.booleans(),
        generate=GENERATE,
        trait=_now(lambda machine: machine.traits),
    )
    def ask_again(self, name: str, earlier: str, emptied: bool, generate: int, trait: str) -> None:
        """Ask what was asked before; maybe of a device whose cache has been emptied, as far as it lets."""
        before = self.life.asked[earlier]
        if emptied:
            self._tell(self.life.reset, False, False)
        self._ask("repeat", name, before.prompt, generate, trait, before.identity)

    @precondition(lambda self: self._may_ask() and self.life.asked)
    @rule(name=NAME, earlier=EARLIER, own=st.sampled_from((5, 1, 2, 9)), generate=GENERATE)
    def ask_on(self, name: str, earlier: str, own: int, generate: int) -> None:
        """Continue a session: what was asked, its answer, and some more."""
        before = self.life.asked[earlier]
        prompt = before.prompt + before.answer() + _own(name, own)
        self._ask("session", name, prompt, generate, "", before.identity)

    @precondition(lambda self: self.life.live and self.life.moved)
    @rule(name=_now(lambda machine: machine.life.live))
    def abort(self, name: str) -> None:
        """Abort a request in whatever phase it is."""
        self._tell(self.life.abort, name)

    # -- steps ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.life.engine.busy)
    @rule()
    def step(self) -> None:
        """Take a step; its results come as late as the kind of scheduling allows."""
        self._tell(self.life.step)

    @precondition(lambda self: self.life.engine.busy)
    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        """Take several."""
        for _ in range(count):
            self._tell(self.life.step)

    @precondition(lambda self: self.life.engine.busy and self.life.copies())
    @rule(copy=COPY, point=st.integers(0, 4))
    def step_while_finishing(self, copy: str, point: int) -> None:
        """Take a step, and in the middle of it let a copy end."""

        def finish() -> None:
            if copy in self.life.copies():  # the step may have waited for it
                self.life.finish(copy)

        self._tell(self.life.step, point, finish)

    @precondition(lambda self: self.life.shape.asynchronous and self.life.engine.busy)
    @rule()
    def take_results(self) -> None:
        """Take in results before the next step is planned."""
        self._tell(self.life.take_results)

    # -- copies -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.life.copies())
    @rule(copy=COPY)
    def finish(self, copy: str) -> None:
        """Let a copy end well."""
        self._tell(self.life.finish, copy)

    @precondition(lambda self: self.life.copies())
    @rule()
    def finish_all(self) -> None:
        """Let all copies end, first begun first."""
        for copy in self.life.copies():
            self._tell(self.life.finish, copy)

    @precondition(lambda self: self.life.copies())
    @rule(copy=COPY)
    def fail(self, copy: str) -> None:
        """Let a copy fail where it is."""
        self._tell(self.life.fail, copy)

    @precondition(lambda self: self.life.copies(unbegun=True))
    @rule(copy=UNBEGUN)
    def half(self, copy: str) -> None:
        """Let a copy begin and stop half way, until it is told more."""
        self._tell(self.life.half, copy)

    @precondition(lambda self: self.life.copies(unbegun=True) and not self.life.wedged)
    @rule(copy=UNBEGUN)
    def wedge(self, copy: str) -> None:
        """Let a copy stop half way, neither ending nor listening."""
        self._tell(self.life.wedge, copy)

    @precondition(lambda self: self.life.shape.rank_count > 1 and self.life.copies())
    @rule(rank=st.integers(0, 1))
    def delay_answer(self, rank: int) -> None:
        """Let what a rank says at the end of the next step come a step late."""
        self._tell(self.life.delay_answer, rank)

    @precondition(lambda self: self.life.sibling_loads())
    @rule(load=_now(lambda machine: machine.life.sibling_loads()), fails=st.booleans())
    def end_sibling_load(self, load: str, fails: bool) -> None:
        """Let what another connector brings arrive, or not."""
        self._tell(self.life.end_sibling_load, load, fails)

    # -- the rest ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.life.moved)
    @rule(what=st.sampled_from(("device", "connector too")), running=st.booleans())
    def reset(self, what: str, running: bool) -> None:
        """Forget what is cached; with ``running``, preempt all that runs, so that nothing is in use."""
        self._tell(self.life.reset, what == "connector too", running)

    @precondition(lambda self: self.life.copies() and not self.life.paused)
    @rule(everybody=st.booleans())
    def pause(self, everybody: bool) -> None:
        """Admit nobody any more, or run nobody at all."""
        self._tell(self.life.pause, everybody)

    @precondition(lambda self: self.life.paused)
    @rule()
    def unpause(self) -> None:
        """Go on."""
        self._tell(self.life.unpause)

    @precondition(lambda self: self.life.copies())
    @rule(seconds=st.sampled_from((0.03, 0.3, 3.0)))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._tell(self.life.wait, seconds)

    # -- inside -----------------------------------------------------------------------------------------

    @property
    def traits(self) -> tuple[str, ...]:
        """What can be special about a request."""
        plain = ("", "", "", "salt", "adapter", *TRAITS, "prompt_logprobs", "skip_reading_prefix_cache")
        urgent = ("urgent", "urgent") if self.life.shape.priority else ()
        held = ("of the sibling",) * 9 if self.life.siblings else ()
        return plain + urgent + held

    def _asked(self, kind: str, prompt: list[int], generate: int, trait: str, identity: Identity) -> Ask:
        shape = self.life.shape
        longest = self.life.longest_tokens
        generate = min(generate, longest // 4)
        prompt = prompt[: longest - generate]
        arguments: dict[str, Any] = {}
        if shape.priority:
            arguments["priority"] = 0 if trait == "urgent" else 1
        if trait in ("prompt_logprobs", "skip_reading_prefix_cache"):
            arguments[trait] = 1
        params = dict(TRAITS.get(trait, {}))
        held = (len(prompt) - 1) // shape.tokens_per_block
        if trait == "of the sibling" and held:
            params[HELD] = held * shape.tokens_per_block
        if params:
            arguments["extra_args"] = {"kv_transfer_params": params}
        return Ask(kind, prompt, generate, identity, arguments)


def _identity(trait: str) -> Identity:
    return Identity(ADAPTERS[0] if trait == "adapter" else None, "salt" if trait == "salt" else None)


def _stem(index: int, count: int) -> list[int]:
    return [(11 * index + 7 * at) % 90 for at in range(count)]


def _own(name: str, count: int) -> list[int]:
    """Tokens that no other request has at this place."""
    return [(13 * int(name[1:]) + 5 * at + 1) % 90 for at in range(count)]
