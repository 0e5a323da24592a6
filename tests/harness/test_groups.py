"""Every kind of KV cache group that vLLM can page: stored, pushed out, asked again, hit, every byte compared.

The bytes are judged by the model engine's oracle, after each load and before each read.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, RSWASpec

from kvtide.errors import LayoutError
from kvtide.geometry import KVGeometry
from kvtide.jobs import Direction, JobId
from kvtide.testing import HeldDevice
from kvtide.vllm.layout import geometry_of
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.promises import WrongBytesError
from kvtide.vllm.testing.reach import Reach
from kvtide.vllm.testing.shape import EngineShape, Runner


def group(name: str, *arguments: Any, layers: int = 2, **more: Any) -> GroupShape:
    return GroupShape(tuple(f"{name}.{layer}" for layer in range(layers)), *arguments, **more)


FULL = group("full", 4)
LATENT = group("latent", 4, Kind.MLA, words=2)
WINDOW = group("window", 4, Kind.WINDOW, 10)
RECURRENT = group("recurrent", 4, Kind.MAMBA, words=3)
DRAFT = group("draft", 4, draft=True, layers=1)


ONE_GROUP = {
    "full attention": EngineShape(groups=(FULL,)),
    "full attention, padded pages": EngineShape(groups=(replace(FULL, padded_words=7),)),
    "full attention, two kernel blocks in one": EngineShape(groups=(replace(FULL, split=True),)),
    "latent attention": EngineShape(groups=(LATENT,), rank_count=2),
    "layers that keep more than others": EngineShape(
        groups=(group("latent", 4, Kind.MLA, words_by_layer=(3, 1, 3), layers=3),), block_first=True
    ),
    "layers that keep more than others, layer by layer": EngineShape(
        groups=(group("full", 4, words_by_layer=(1, 2, 1), layers=3),)
    ),
    "recurrent alone": EngineShape(groups=(RECURRENT,)),
}
SEVERAL_GROUPS = {
    "a window": EngineShape(groups=(FULL, WINDOW)),
    "windows, packed and padded": EngineShape(
        groups=(FULL, replace(WINDOW, padded_words=9), group("wide", 4, Kind.WINDOW, 6, words=3, layers=1)),
        block_first=True,
    ),
    "latent attention, full and windowed": EngineShape(
        groups=(LATENT, group("narrow", 4, Kind.WINDOW_MLA, 10)), rank_count=2, block_first=True
    ),
    "chunked-local attention": EngineShape(groups=(FULL, group("local", 4, Kind.CHUNKED, 28))),
    "recurrent beside full attention": EngineShape(groups=(FULL, RECURRENT)),
    "recurrent, packed": EngineShape(groups=(FULL, RECURRENT), block_first=True),
    "two recurrent groups": EngineShape(
        groups=(FULL, RECURRENT, group("other", 4, Kind.MAMBA, words=2, layers=1))
    ),
    "recurrent, newer runner": EngineShape(groups=(FULL, RECURRENT), runner=Runner.V2),
    "recurrent, states left in the middle of a step": EngineShape(
        groups=(FULL, replace(RECURRENT, checkpoints=True)), retention_tokens=0
    ),
    "recurrent, hashes finer than blocks": EngineShape(groups=(FULL, RECURRENT), match_tokens=2),
    "recurrent beside a window": EngineShape(groups=(FULL, RECURRENT, WINDOW)),
    "larger blocks of full attention": EngineShape(groups=(group("large", 8), WINDOW)),
    "smaller blocks of full attention": EngineShape(groups=(FULL, group("large", 8, Kind.WINDOW, 10))),
    "a window that is computed again": EngineShape(
        groups=(LATENT, group("replayed", 4, Kind.REPLAY, 8)), rank_count=2, block_first=True
    ),
    "a ring that is never cached": EngineShape(
        groups=(LATENT, group("ring", 8, Kind.RING, 4)), block_first=True
    ),
}
PARALLEL = {
    "a block's tokens over two ranks": EngineShape(groups=(group("full", 4, context_ranks=2),), rank_count=2),
    "a block's tokens over two of four ranks": EngineShape(
        groups=(group("latent", 2, Kind.MLA, context_ranks=2),), rank_count=4
    ),
    "a block's tokens over two ranks, recurrent": EngineShape(
        groups=(group("full", 4, context_ranks=2), RECURRENT), rank_count=2
    ),
    "two stages": EngineShape(groups=(FULL, WINDOW), rank_count=2, stages=2),
    "two stages of two ranks": EngineShape(groups=(FULL,), rank_count=4, stages=2, runner=Runner.V2),
}
GUESSES = {
    "guesses from the prompt": EngineShape(groups=(FULL,), guesses=2, runner=Runner.V1_DRAFTING),
    "guesses from the prompt, a window": EngineShape(
        groups=(FULL, WINDOW), guesses=3, runner=Runner.V1_DRAFTING
    ),
    "a drafter with layers of its own": EngineShape(
        groups=(FULL, DRAFT), guesses=2, runner=Runner.V1_DRAFTING
    ),
    "a drafter, newer runner": EngineShape(groups=(FULL, DRAFT), guesses=2, runner=Runner.V2),
    "guesses and states": EngineShape(
        groups=(FULL, replace(RECURRENT, guesses=2)), guesses=2, runner=Runner.V1_DRAFTING
    ),
    "a drafter and states": EngineShape(
        groups=(FULL, replace(RECURRENT, guesses=2), DRAFT), guesses=2, runner=Runner.V2
    ),
}
SHAPES = {**ONE_GROUP, **SEVERAL_GROUPS, **PARALLEL, **GUESSES}


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest, asynchronous: bool) -> EngineShape:
    return replace(SHAPES[request.param], asynchronous=asynchronous, num_blocks=65)


class Forgetful(HeldDevice):
    """Says that it has copied."""

    def finish(self, job_id: JobId | None = None) -> None:
        for ended in self.held if job_id is None else [job_id]:
            del self._open[ended]
            self._note(ended, 0, success=True)


def engine_of(folder: Path, shape: EngineShape, loads: type[HeldDevice] = HeldDevice) -> ModelEngine:
    copiers: dict[tuple[int, Direction], HeldDevice] = {}

    def copier(rank: int, direction: Direction) -> HeldDevice:
        kind = loads if direction is Direction.LOAD else HeldDevice
        one = copiers.setdefault((rank, direction), kind(direction))
        one.auto_finish = True
        return one

    return ModelEngine(folder, shape, copier, chance=random.Random(5))


def settle(engine: ModelEngine) -> None:
    for _ in range(400):
        if not engine.busy:
            break
        if engine.scheduler.has_requests():
            engine.step()
        else:
            engine.update()
    assert not engine.busy
    engine.check()
    engine.check_cached()


def ask(engine: ModelEngine, name: str, prompt: list[int], max_tokens: int = 6) -> int:
    """Ask until the answer is there and right; returns the tokens that came from host memory."""
    before = int(engine.counted.data.get("hit_tokens|host", 0))
    engine.add(name, prompt, max_tokens)
    settle(engine)
    assert engine.outputs[name] == PatternModel.answer(prompt, max_tokens)
    return int(engine.counted.data.get("hit_tokens|host", 0)) - before


def empty(engine: ModelEngine) -> None:
    """Empty the device: hashes and bytes."""
    assert engine.scheduler.reset_prefix_cache()
    engine.memory.clear(range(engine.shape.num_blocks))


def tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(90) for _ in range(count)]


def stores_evicts_and_hits(folder: Path, shape: EngineShape) -> None:
    engine = engine_of(folder, shape)
    reach = Reach(shape, engine.hash_tokens)
    # Of states one is left where the last whole block of a prompt ends: it has to end a chunk too.
    count = next(count for count in range(41, 70) if reach.of_prompt(count) >= 32)
    prompt = tokens(count, seed=1)
    assert ask(engine, "first", prompt) == 0
    empty(engine)
    assert ask(engine, "again", prompt) >= reach.of_prompt(count)
    for group in shape.groups:
        assert (engine.oracle.loaded_words[group.kind.value] > 0) == group.offloaded
    engine.close()


def test_what_was_stored_is_hit_and_exact(tmp_path: Path, shape: EngineShape) -> None:
    stores_evicts_and_hits(tmp_path, shape)


def test_what_was_stored_in_chunks_of_several_blocks_is_hit_and_exact(
    tmp_path: Path, shape: EngineShape
) -> None:
    stores_evicts_and_hits(tmp_path, replace(shape, settings={"blocks_per_chunk": 2}))


def test_what_follows_a_prompt_goes_on_from_what_was_stored(tmp_path: Path, shape: EngineShape) -> None:
    engine = engine_of(tmp_path, shape)
    prompt = tokens(42, seed=2)
    ask(engine, "first turn", prompt, 12)
    empty(engine)
    turn = [*prompt, *engine.outputs["first turn"], *tokens(9, seed=3)]
    assert ask(engine, "second turn", turn, 8) >= 24
    empty(engine)
    assert ask(engine, "and again", turn, 8) >= 40
    engine.close()


def test_a_load_that_brings_nothing_is_seen_in_every_kind(tmp_path: Path, shape: EngineShape) -> None:
    engine = engine_of(tmp_path, replace(shape, settings={"self_test": False}), Forgetful)
    prompt = tokens(41, seed=1)
    ask(engine, "first", prompt)
    empty(engine)
    with pytest.raises(WrongBytesError, match="loaded"):
        ask(engine, "again", prompt)
    engine.close()


def test_what_one_group_alone_has_on_the_device_is_no_hit(tmp_path: Path, asynchronous: bool) -> None:
    # vLLM can take the hit of full attention for that of all groups, for connectors that ask for it
    # (``supports_divergent_local_hybrid_hits``): what the others lack before it would have to be brought too.
    groups = (FULL, RECURRENT, group("window", 4, Kind.WINDOW, 30))
    engine = engine_of(tmp_path, EngineShape(65, groups, asynchronous))
    prompt = tokens(42, seed=4)
    ask(engine, "first", prompt)
    pool = engine.scheduler.kv_cache_manager.block_pool
    first = set(engine._requests["first"].block_hashes[:6])
    gone = {
        block.block_id
        for block in pool.blocks
        if (name := block.block_hash) is not None
        and (get_group_id(name) or get_block_hash(name) not in first)
    }
    engine.scheduler.kv_cache_manager.evict_blocks(gone)
    engine.memory.clear(sorted(gone))
    assert ask(engine, "again", prompt) == 40
    engine.close()


def test_a_window_that_is_not_computed_again_after_a_load_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES["a window that is computed again"]
    engine = engine_of(tmp_path, replace(shape, num_blocks=65))
    prompt = tokens(41, seed=1)
    ask(engine, "first", prompt)
    empty(engine)
    # Who says that a load restores the window keeps vLLM from it.
    monkeypatch.setattr(engine.connector, "get_loaded_kv_cache_group_ids", lambda request: (0, 1))
    with pytest.raises(WrongBytesError, match="goes on at 40 without its window"):
        ask(engine, "again", prompt)
    engine.close()


def geometry_with(folder: Path, spec: KVCacheSpec, **flags: bool) -> KVGeometry:
    shape = EngineShape(groups=(FULL,))
    config = shape.vllm_config(folder)
    (kv_cache_config,) = shape.kv_cache_configs(config)
    kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["other.0"], spec, **flags))
    return geometry_of(config, kv_cache_config, 1)


def test_attention_that_drops_what_is_between_is_not_taken_for_full_attention(tmp_path: Path) -> None:
    # vLLM calls it full attention; its blocks leave a request in the middle.
    spec = RSWASpec(block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32, rswa_window=8)
    with pytest.raises(LayoutError, match="2 KV cache groups: full_attention, reference sliding window;"):
        geometry_with(tmp_path, spec)


def test_a_group_that_is_in_host_memory_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"keeps KV cache groups \[1\] in host memory"):
        geometry_with(tmp_path, FULL.spec(["other.0"]), host_resident=True)
