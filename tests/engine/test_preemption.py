"""Preemption forced: more requests than the engine's pool can hold, and every answer as without it."""

from typing import Any

from engine import models
from engine.tiny_engine import Reply, TinyEngine, prompt_of, tiny_engine

REQUESTS = 8
PROMPT_TOKENS = 70
NEW_TOKENS = 120
"""A request grows from 3 blocks to 6: all of them are admitted, and half of them do not fit to the end."""

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
SMALL_POOL_BLOCKS = 22
LARGE_POOL_BLOCKS = 200


def answers(engine: TinyEngine) -> list[Reply]:
    names = [engine.submit(prompt_of(700 + number, PROMPT_TOKENS), NEW_TOKENS) for number in range(REQUESTS)]
    replies = engine.finish(names)
    engine.drain()
    return replies


def test_eight_requests_on_a_22_block_pool_answer_as_on_a_large_one() -> None:
    # In float32 and by their tokens: a preempted request is computed in other pieces and beside others, and
    # that alone changes last bits, in bfloat16 enough of them to turn a token.
    model = models.llama()
    with tiny_engine(model, LARGE_POOL_BLOCKS, **OPTIONS) as engine:
        reference = answers(engine)
        assert engine.preemption_count == 0
    with tiny_engine(model, SMALL_POOL_BLOCKS, {"host_memory": "24MiB"}, **OPTIONS) as engine:
        replies = answers(engine)
        assert engine.preemption_count > 0
        # Resumed requests got their KV back, rather than computing all of it again.
        assert engine.totals["hit_tokens|host"] > 0
        assert engine.totals.get("failed_load_requests|", 0) == 0
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in reference]
    assert all(len(reply.token_ids) == NEW_TOKENS for reply in replies)
