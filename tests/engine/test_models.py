"""Every kind of model that can be paged: stored, pushed out, asked again, loaded, and exactly like a hit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import models
from engine.exchanges import (
    POOL_BLOCKS,
    PROMPT_BLOCKS,
    STORED_TOKENS,
    ask_twice,
    assert_exact,
    prompts_of,
)
from engine.planned import assert_planned
from engine.tiny_engine import BLOCK_TOKENS, prompt_of, tiny_engine


@pytest.mark.parametrize(
    ("model", "groups", "blocks_per_chunk"),
    [
        (models.gemma2, 2, 1),
        (models.gemma3, 6, 1),
        (models.gemma3, 6, 4),
        (models.gpt_oss, 2, 1),
        (models.llama4, 4, 1),
    ],
    ids=["gemma2-1", "gemma3-1", "gemma3-4", "gpt-oss-1", "llama4-1"],
)
def test_windows_and_full_attention_load_together_and_answer_like_a_hit(
    model: Callable[[], Path], groups: int, blocks_per_chunk: int
) -> None:
    prompts = prompts_of(30, 6)
    # While a prompt is computed each group holds all of it.
    pool_blocks = groups * (PROMPT_BLOCKS + 3) + 1
    settings = {"host_memory": "128MiB", "blocks_per_chunk": blocks_per_chunk}
    with tiny_engine(model(), pool_blocks, settings, max_model_len=700) as engine:
        assert len(engine.deciding._geometry.groups) == groups
        assert_planned(engine, model(), BLOCK_TOKENS, blocks_per_chunk)
        # Where the pool is comes with the first step; what a window has passed by then is not stored.
        engine.ask(prompts[0][:40], 1)
        hits = ask_twice(engine, prompts)
        # The last ones may not have been pushed out: layers that look back little need few blocks.
        loads = [engine.ask(prompt) for prompt in prompts[:4]]
        totals = engine.totals
    assert_exact(loads, hits[:4])
    assert [load.loaded_tokens for load in loads] == [STORED_TOKENS] * 4
    assert totals["hit_tokens|host"] == 4 * STORED_TOKENS


DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "ngram": lambda: {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    "eagle": lambda: {"method": "eagle", "num_speculative_tokens": 2, "model": str(models.llama_drafter())},
}


@pytest.mark.parametrize(("drafter", "not_hit"), [("ngram", 0), ("eagle", BLOCK_TOKENS)])
def test_with_drafted_tokens_a_load_answers_like_a_hit_and_brings_as_much(drafter: str, not_hit: int) -> None:
    prompts = prompts_of(30)
    options = {"max_model_len": 700, "speculative_config": DRAFTERS[drafter]()}
    with tiny_engine(models.llama(), POOL_BLOCKS, {"host_memory": "128MiB"}, **options) as engine:
        if drafter == "ngram":  # a drafter with layers of its own has KV that no configuration tells
            assert_planned(engine, models.llama(), BLOCK_TOKENS)
        engine.ask(prompts[0][:40], 1)
        hits = ask_twice(engine, prompts)
        loads = [engine.ask(prompt) for prompt in prompts]
    assert_exact(loads, hits)
    # The KV that a drafter has for the last token of a block depends on the token after it.
    assert {hit.local_tokens for hit in hits} == {STORED_TOKENS - not_hit}
    assert {load.loaded_tokens for load in loads} == {STORED_TOKENS - not_hit}


def test_latent_attention_is_loaded_the_same_way_each_time() -> None:
    # With it vLLM's CPU backend keeps no prefixes itself: there is no hit to hold a load against.
    prompts = prompts_of(30)
    options = {"max_model_len": 700, "block_size": None}
    with tiny_engine(models.mla(), 3 * POOL_BLOCKS, {"host_memory": "128MiB"}, **options) as engine:
        assert [group.kind.value for group in engine.deciding._geometry.groups] == ["mla_attention"]
        assert_planned(engine, models.mla(), 16)
        engine.ask(prompts[0][:40], 1)
        stored = [engine.ask(prompt) for prompt in prompts]
        once, again = ([engine.ask(prompt) for prompt in prompts] for _ in range(2))
    assert {reply.loaded_tokens for reply in stored} == {0}
    assert {reply.loaded_tokens for reply in (*once, *again)} == {STORED_TOKENS}
    assert [reply.logprobs for reply in once] == [reply.logprobs for reply in again]
    assert [reply.token_ids[0] for reply in once] == [reply.token_ids[0] for reply in stored]
    assert len({tuple(reply.token_ids) for reply in once}) == len(prompts)


def test_recurrent_layers_go_on_from_a_state_that_was_loaded_like_from_one_that_was_kept() -> None:
    # vLLM's CPU backend wants blocks of 256 tokens here, and keeps the states where a step ended.
    prompts = [prompt_of(50 + number, 1100) for number in range(4)]
    options = {"max_model_len": 1300, "block_size": None, "enable_prefix_caching": True}
    with tiny_engine(models.qwen3_next(), 26, {"host_memory": "128MiB"}, **options) as engine:
        assert_planned(engine, models.qwen3_next(), 128)
        engine.ask(prompts[0][:40], 1)
        hits = ask_twice(engine, prompts)
        loads = [engine.ask(prompt) for prompt in prompts]
        totals = engine.totals
    assert_exact(loads, hits)
    assert [load.loaded_tokens for load in loads] == [1024] * 4
    assert totals["hit_tokens|host"] == 4 * 1024
    assert len({tuple(load.token_ids) for load in loads}) == 4


def two_ranks(model: Path, pool_blocks: int, *given: dict[str, Any]) -> dict[str, Any]:
    """Run ``two_ranks.py`` and hand out what it has to tell."""
    child = Path(__file__).with_name("two_ranks.py")
    # vLLM binds each rank to cores of its own, and there may be fewer than it wants.
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, child, model, str(pool_blocks), *map(json.dumps, given)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told: dict[str, Any] = json.loads(
        next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    )
    return told


def test_two_ranks_each_load_their_shard_and_answer_like_a_hit() -> None:
    told = two_ranks(models.llama(), PROMPT_BLOCKS + 9)
    for load, hit in zip(told["loads"], told["hits"], strict=True):
        assert (load["tokens"], load["logprobs"]) == (hit["tokens"], hit["logprobs"])
        assert (hit["cached"], load["cached"]) == (STORED_TOKENS, STORED_TOKENS)
    assert (told["loaded_before"], told["loaded"]) == (0, 4 * STORED_TOKENS)
    assert len({tuple(load["tokens"]) for load in told["loads"]}) == 4


def test_what_two_ranks_have_alike_lies_on_disk_once(tmp_path: Path) -> None:
    # Latents of 5 chunks a prompt; host memory holds those of one prompt and a half, on each rank.
    settings = {"host_memory": "1MiB", "disk": str(tmp_path), "disk_limit": "64MiB", "disk_reserve": 0}
    settings |= {"disk_deadline_s": 30.0, "defer_limit_s": 30.0, "promotion_share": 0.9}
    told = two_ranks(models.mla(), 3 * PROMPT_BLOCKS, settings, {"block_size": None})
    assert told["from_disk"] > 0
    assert told["loaded"] > 0
    assert [path.parent.name for path in tmp_path.rglob("slab-*")] == ["rank-0"]
