"""Whether what was asked is hit when it is asked again, or a cache is only ever written.

Asks an engine at rest, empties its device and asks again; counts what came from host memory against what has
to. What is stored lazily is pushed out by others in between. Knows how many tokens a prompt, an answer and a
chunk have; does not know where chunks are.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.vllm.testing.asks import Ask
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.promises import HangError, LeakError
from kvtide.vllm.testing.reach import Reach
from kvtide.vllm.testing.rest import pools_of

MORE_TIMES = 2
"""In a full pool what is stored may push out a part of itself until the policy is used to it."""


@dataclass(frozen=True, slots=True)
class Revisited:
    """How it went.

    Attributes:
        asked: Requests that were asked.
        hit_tokens: Tokens of the prompt that came back from host memory.
        turn_hit_tokens: Tokens beyond the prompt that the next turn of the session got back.
    """

    asked: int
    hit_tokens: int
    turn_hit_tokens: int


class Revisit:
    """Asks one thing again and again.

    Args:
        engine: At rest, its copies going well.
        ask: What is asked.
        settle: Runs the engine to rest.
        number: Of the first request, for its name.
    """

    def __init__(self, engine: ModelEngine, ask: Ask, settle: Callable[[], None], number: int) -> None:
        self._engine = engine
        self._ask = ask
        self._settle = settle
        self._number = number
        self._asked = 0
        self._longest_tokens = 0
        settings = engine.shape.settings
        self._times = int(settings["store_threshold"])
        self._reach = Reach(engine.shape, engine.hash_tokens)
        # A pool keeps a part of itself free ahead of time, and a prompt may be longer than the pool.
        self._fits = engine.connector._deciding._manager.capacity * 39 // 40 - 1
        # What found the queue of stores full is offered again, but a short request may be gone by then.
        self._queue = int(settings["store_queue"]) // sum(pool.slot_bytes for pool in pools_of(engine))
        self._bypassed = _bypassed(engine)

    def run(self, longest_tokens: int) -> Revisited:
        """Ask the prompt until it is stored and again; then with an answer, and for what follows that.

        Args:
            longest_tokens: Of a prompt and its answer that fit the device.

        Raises:
            LeakError: What was stored was not hit.
            HangError: A token was wrong.
        """
        prompt, self._longest_tokens = self._ask.prompt, longest_tokens
        for _ in range(self._times):
            self._hits(prompt, 1)
        due, hit_tokens = self._due_of_prompt(len(prompt)), self._hits(prompt, 1)
        for _ in range(MORE_TIMES):
            if hit_tokens < due:
                hit_tokens = self._hits(prompt, 1)
        self._demand("prompt", hit_tokens, due)
        count = min(2 * self._reach.interval_tokens + 3, longest_tokens - len(prompt) - 2)
        if count < 2:
            return Revisited(self._asked, hit_tokens, 0)
        for _ in range(self._times):
            self._hits(prompt, count)
        turn = prompt + PatternModel.answer(prompt, count, self._ask.identity.name) + [1]
        # Asked as a prompt and kept, what was generated would be hit the next time, whoever lost it.
        due, turn_hit_tokens = self._due_of_turn(len(prompt), count), self._hits(turn, 1, is_kept=False)
        for _ in range(MORE_TIMES):
            if turn_hit_tokens < due:
                self._hits(prompt, count)
                turn_hit_tokens = self._hits(turn, 1, is_kept=False)
        self._demand("next turn", turn_hit_tokens, due)
        return Revisited(self._asked, hit_tokens, max(0, turn_hit_tokens - len(prompt)))

    def _hits(self, prompt: list[int], count: int, is_kept: bool = True) -> int:
        """Ask with an empty device; count the tokens that came from host memory."""
        engine, name = self._engine, f"again{self._number + self._asked}"
        if self._asked and engine.shape.settings["store_policy"] == "lazy":
            self._push_out(name)
        self._asked += 1
        engine.scheduler.reset_prefix_cache()
        before = _hit_tokens(engine)
        arguments = {
            name: value
            for name, value in self._ask.all_arguments().items()
            if name in ("lora_request", "cache_salt", "priority")
        }
        if not is_kept:
            arguments["extra_args"] = {"kv_transfer_params": {"no_write": True}}
        engine.add(name, prompt, count, **arguments)
        self._settle()
        due = PatternModel.answer(prompt, count, self._ask.identity.name)
        if engine.outputs[name] != due:
            raise HangError(f"{name}: {engine.outputs[name]} where {due} was due")
        return _hit_tokens(engine) - before

    def _push_out(self, name: str) -> None:
        """Ask so much else that the engine hands out every block once; of that nothing is kept."""
        shape, tokens = self._engine.shape, max(1, self._longest_tokens - 2)
        for index in range(-(-shape.num_blocks * shape.tokens_per_block // tokens)):
            draw = random.Random(f"{name} {index}")
            kept_out = {"kv_transfer_params": {"no_read": True, "no_write": True}}
            prompt = [draw.randrange(90) for _ in range(tokens)]
            self._engine.add(f"pushes out before {name}, {index}", prompt, 1, extra_args=kept_out)
            self._settle()

    def _due_of_prompt(self, prompt_tokens: int) -> int:
        room = min(self._fits, self._queue)
        due = self._reach.of_prompt(prompt_tokens)
        if self._reach.one_prefix:
            return min(due, self._reach.of_chunks(room))
        # A point that not all groups could store is none.
        return due if self._reach.chunks(prompt_tokens) <= room else 0

    def _due_of_turn(self, prompt_tokens: int, count: int) -> int:
        # The last token has no KV; with asynchronous scheduling the one before it may be under way.
        shape = self._engine.shape
        computed = prompt_tokens + count - 1 - shape.asynchronous
        if shape.settings["store_policy"] == "lazy":
            # vLLM hashes what it plans for certain: of guesses that the last step found right it has no hash.
            computed -= shape.guesses
        if self._reach.chunks(computed) > min(self._fits, self._queue):
            # How the rest of a full pool or queue is shared is nobody's promise.
            return self._due_of_prompt(prompt_tokens) if self._reach.one_prefix else 0
        if not self._reach.one_prefix or self._engine.shape.settings["offload_prompt_only"]:
            # Behind a window of what is generated blocks are gone before anything is stored.
            return self._due_of_prompt(prompt_tokens)
        return self._reach.of_prompt(computed + 1)

    def _demand(self, what: str, hit_tokens: int, due: int) -> None:
        # What the policy held for worth less than all that could leave is nobody's promise.
        if hit_tokens < due and _bypassed(self._engine) == self._bypassed:
            manager = self._engine.connector._deciding._manager
            raise LeakError(
                f"{what} of a session of {len(self._ask.prompt)} tokens: {hit_tokens} of {due} came from host"
                f" memory ({manager.used_count} of {manager.capacity} slots used)"
            )


def _hit_tokens(engine: ModelEngine) -> int:
    return int(engine.counted.data.get("hit_tokens|host", 0))


def _bypassed(engine: ModelEngine) -> int:
    return int(engine.counted.data.get("skipped_store_chunks|bypassed", 0))
