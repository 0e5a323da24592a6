"""What kvtide brings back gives the very answers that the same KV gives in the engine's own cache.

Compared with a hit, never with a cold run: there the prompt is computed in other pieces, and bfloat16 gives
other last bits with or without kvtide.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, ask_twice, assert_exact, prompts_of
from engine.tiny_engine import prompt_of, tiny_engine

LARGE_POOL_BLOCKS = 200


@pytest.mark.parametrize(
    ("model", "blocks_per_chunk"),
    [(models.llama, 1), (models.qwen3, 1), (models.qwen3, 4)],
    ids=["llama-1", "qwen3-1", "qwen3-4"],
)
def test_a_load_answers_like_a_hit(model: Callable[[], Path], blocks_per_chunk: int) -> None:
    prompts = prompts_of(1)
    settings = {"host_memory": "24MiB", "blocks_per_chunk": blocks_per_chunk}
    with tiny_engine(model(), POOL_BLOCKS, settings) as engine:
        hits = ask_twice(engine, prompts)
        loads = [engine.ask(prompt) for prompt in prompts]
        totals = engine.totals
    assert_exact(loads, hits)
    assert [load.local_tokens for load in loads] == [0, 0, 0]
    assert [hit.local_tokens for hit in hits] == [STORED_TOKENS] * 3
    assert totals["hit_tokens|host"] == 3 * STORED_TOKENS
    assert totals["stored_chunks|"] == 3 * STORED_TOKENS // 32 // blocks_per_chunk
    # The model says something, and not the same to everybody.
    assert len({tuple(load.token_ids) for load in loads}) == 3
    assert all(len(set(load.token_ids)) > 3 for load in loads)


def test_a_load_goes_on_inside_a_chunk_where_the_engines_own_hit_ends() -> None:
    one, other = prompts_of(2, 2)
    with tiny_engine(
        models.qwen3(), POOL_BLOCKS - 2, {"host_memory": "24MiB", "blocks_per_chunk": 4}
    ) as engine:
        (hit,) = ask_twice(engine, [one])
        # Blocks are freed from the end of a prompt: 6 at the beginning of the first outlive the second.
        engine.ask(other)
        load = engine.ask(one)
    assert load.local_tokens == 6 * 32
    assert load.loaded_tokens == STORED_TOKENS - 6 * 32
    assert_exact([load], [hit], min_loaded_tokens=256)


def test_only_prompts_are_kept_when_asked_for() -> None:
    prompt, *others = prompts_of(3)
    loaded_tokens = {}
    for prompt_only in (False, True):
        settings = {"host_memory": "24MiB", "offload_prompt_only": prompt_only}
        with tiny_engine(models.llama(), POOL_BLOCKS, settings) as engine:
            reply = engine.ask(prompt, new_tokens=80)
            for other in others:
                engine.ask(other)
            loaded_tokens[prompt_only] = engine.ask([*prompt, *reply.token_ids, 7]).loaded_tokens
    assert loaded_tokens == {False: 704, True: 640}


def test_with_a_threshold_of_two_a_prompt_is_kept_at_second_sight() -> None:
    prompts = prompts_of(4)
    with tiny_engine(models.llama(), POOL_BLOCKS, {"host_memory": "24MiB", "store_threshold": 2}) as engine:
        first = [engine.ask(prompt) for prompt in prompts]
        stored_after_first = engine.totals.get("stored_chunks|", 0)
        second, hits = [], []
        for prompt in prompts:
            second.append(engine.ask(prompt))
            hits.append(engine.ask(prompt))
        third = [engine.ask(prompt) for prompt in prompts]
        totals = engine.totals
    assert stored_after_first == 0
    assert totals["skipped_store_chunks|below_threshold"] == 3 * STORED_TOKENS // 32
    assert [reply.loaded_tokens for reply in first + second] == [0] * 6
    assert_exact(third, hits)


def test_chunked_prefill_before_and_after_a_load() -> None:
    prompts = prompts_of(5)
    longer = [prompt[:STORED_TOKENS] + prompt_of(600 + n, 150) for n, prompt in enumerate(prompts)]
    # The steps of a prefill shape its bits: the reference makes the same ones, in a pool that keeps all.
    with tiny_engine(models.llama(), LARGE_POOL_BLOCKS, max_num_batched_tokens=128) as engine:
        for prompt in prompts:
            engine.ask(prompt)
        hits = [engine.ask(prompt) for prompt in longer]
    settings = {"host_memory": "24MiB", "blocks_per_chunk": 4}
    with tiny_engine(models.llama(), POOL_BLOCKS, settings, max_num_batched_tokens=128) as engine:
        for prompt in prompts:
            engine.ask(prompt)
        loads = [engine.ask(prompt) for prompt in longer]
    assert_exact(loads, hits)


def test_loads_with_the_engines_own_prefix_cache_switched_off() -> None:
    prompts = prompts_of(6)
    with tiny_engine(models.llama(), LARGE_POOL_BLOCKS) as engine:
        hits = ask_twice(engine, prompts)
    with tiny_engine(
        models.llama(), POOL_BLOCKS, {"host_memory": "24MiB"}, enable_prefix_caching=False
    ) as engine:
        loads = ask_twice(engine, prompts)
    assert_exact(loads, hits)
    assert [load.local_tokens for load in loads] == [0, 0, 0]
