"""Prompts that push one another out of a small pool, and the pairs of answers that come of it.

Knows sizes and order. Does not judge: that is ``kvtide.demo.exactness``.
"""

from collections.abc import Sequence

from engine.tiny_engine import BLOCK_TOKENS, Reply, TinyEngine, prompt_of
from kvtide.demo.exactness import Record, Verdict, judge

PROMPT_TOKENS = 650
STORED_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
PROMPT_BLOCKS = STORED_TOKENS // BLOCK_TOKENS + 1
POOL_BLOCKS = PROMPT_BLOCKS + 9
"""Room for one prompt and its answer. vLLM gives out what was freed first, so with three prompts in turn
each one is gone completely when it is asked again."""


def prompts_of(seed: int, count: int = 3) -> list[list[int]]:
    """Draw prompts that share nothing."""
    return [prompt_of(seed * 100 + number, PROMPT_TOKENS) for number in range(count)]


def ask_twice(engine: TinyEngine, prompts: Sequence[list[int]]) -> list[Reply]:
    """Ask each prompt twice in a row: the second answers come out of the engine's own cache."""
    replies = []
    for prompt in prompts:
        engine.ask(prompt)
        replies.append(engine.ask(prompt))
    return replies


def pushed_out(engine: TinyEngine, seed: int) -> tuple[list[int], Reply]:
    """Ask a prompt and push it out of the engine's pool: it lies in host memory only."""
    prompt, *others = prompts_of(seed)
    reply = engine.ask(prompt)
    for other in others:
        engine.ask(other, 1)
    return prompt, reply


def paired(loads: Sequence[Reply], hits: Sequence[Reply]) -> list[Record]:
    """Lay answers after a load beside those after a hit."""
    return [
        Record(number, 0, load.answer(), hit.answer())
        for number, (load, hit) in enumerate(zip(loads, hits, strict=True))
    ]


def assert_exact(loads: Sequence[Reply], hits: Sequence[Reply], min_loaded_tokens: int = 512) -> Verdict:
    """Hold every load against its hit: bit for bit, none left out."""
    verdict = judge(paired(loads, hits), min_loaded_tokens)
    assert not verdict.not_comparable, verdict.not_comparable
    assert verdict.compared_requests == len(loads)
    assert verdict.exact, str(verdict.first_divergence)
    assert all(hit.loaded_tokens == 0 for hit in hits), "the reference was loaded too"
    return verdict
