"""Preemption forced: more requests than the engine's pool can hold, and every answer as without it.

In float32 and by their tokens: a preempted request is computed in other pieces and beside others, and that
alone changes last bits, in bfloat16 enough of them to turn a token.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from engine import models
from engine.tiny_engine import TinyEngine, prompt_of, tiny_engine
from kvtide.jobs import Direction

REQUESTS = 8
PROMPT_TOKENS = 70
NEW_TOKENS = 120
"""A request grows from 3 blocks to 6: all of them are admitted, and half of them do not fit to the end."""

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
SETTINGS = {"host_memory": "24MiB"}
SMALL_POOL_BLOCKS = 22
LARGE_POOL_BLOCKS = 200
LATE_STEPS = 50


@dataclass(frozen=True, slots=True)
class Reference:
    """What the model says with room for everybody and without kvtide.

    Attributes:
        answers: To the prompts.
        longer: The prompts, each with its answer and one token more.
        continued: Answers to those.
    """

    answers: list[list[int]]
    longer: list[list[int]]
    continued: list[list[int]]


def submit_all(engine: TinyEngine) -> list[str]:
    prompts = [prompt_of(700 + number, PROMPT_TOKENS) for number in range(REQUESTS)]
    return [engine.submit(prompt, NEW_TOKENS) for prompt in prompts]


def ask_all(engine: TinyEngine) -> list[list[int]]:
    return [reply.token_ids for reply in engine.finish(submit_all(engine))]


@pytest.fixture(scope="module")
def reference() -> Reference:
    with tiny_engine(models.llama(), LARGE_POOL_BLOCKS, **OPTIONS) as engine:
        answers = ask_all(engine)
        assert engine.preemption_count == 0
        longer = [
            [*prompt_of(700 + number, PROMPT_TOKENS), *answer, 7] for number, answer in enumerate(answers)
        ]
        return Reference(answers, longer, [engine.ask(prompt).token_ids for prompt in longer])


def test_eight_requests_on_a_22_block_pool_answer_as_on_a_large_one(reference: Reference) -> None:
    with tiny_engine(models.llama(), SMALL_POOL_BLOCKS, SETTINGS, **OPTIONS) as engine:
        answers = ask_all(engine)
        engine.drain()
        assert engine.preemption_count > 0
        # Resumed requests got their KV back, rather than computing all of it again.
        assert engine.totals["hit_tokens|host"] > 0
        assert engine.totals.get("failed_load_requests|", 0) == 0
    assert answers == reference.answers
    assert {len(answer) for answer in answers} == {NEW_TOKENS}


def test_a_slow_store_is_over_before_its_blocks_belong_to_somebody_else(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(models.llama(), SMALL_POOL_BLOCKS, SETTINGS, **OPTIONS) as engine:
        with monkeypatch.context() as patch:
            # A store ends when a step waits for it, which is the last moment at which its blocks still hold
            # what was to be stored, or else many steps late.
            stores = engine.hold(patch, Direction.STORE)
            names = submit_all(engine)
            while not all(engine.reply(name).finish_reason for name in names):
                for _ in range(LATE_STEPS):
                    engine.step()
                stores.finish()
            answers = [engine.reply(name).token_ids for name in names]
            assert engine.preemption_count > 0
            assert stores.waited
            while engine.scheduler.has_requests():
                stores.finish()
                engine.step()
            engine.drain()
        assert answers == reference.answers
        engine.llm.reset_prefix_cache()
        continued = [engine.ask(prompt) for prompt in reference.longer]
    assert [reply.token_ids for reply in continued] == reference.continued
    assert sum(reply.loaded_tokens for reply in continued) > REQUESTS * PROMPT_TOKENS
