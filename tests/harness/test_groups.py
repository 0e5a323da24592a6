"""Every kind of KV cache group that vLLM can page: stored, pushed out, asked again, hit, every byte compared.

The bytes are judged by the model engine's oracle, after each load and before each read.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from kvtide.jobs import Direction
from kvtide.testing import HeldDevice
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.shape import EngineShape, Runner

FULL = GroupShape(("full.0", "full.1"), 4)
RECURRENT = GroupShape(("recurrent.0", "recurrent.1", "recurrent.2"), 4, Kind.MAMBA, words=3)

SHAPES = {
    "recurrent beside full attention": EngineShape(groups=(FULL, RECURRENT)),
    "recurrent, layers together": EngineShape(groups=(FULL, RECURRENT), block_first=True),
    "recurrent alone": EngineShape(groups=(RECURRENT,)),
    "two recurrent groups": EngineShape(
        groups=(FULL, RECURRENT, GroupShape(("recurrent.3",), 4, Kind.MAMBA, words=2))
    ),
    "recurrent, newer runner": EngineShape(groups=(FULL, RECURRENT), runner=Runner.V2),
}


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> EngineShape:
    return SHAPES[request.param]


def engine_of(folder: Path, shape: EngineShape) -> ModelEngine:
    copiers: dict[Any, HeldDevice] = {}

    def copier(rank: int, direction: Direction) -> HeldDevice:
        one = copiers.setdefault((rank, direction), HeldDevice(direction))
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


def tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(90) for _ in range(count)]


def test_stored_pushed_out_asked_again_hit_and_exact(
    tmp_path: Path, shape: EngineShape, asynchronous: bool
) -> None:
    import dataclasses

    engine = engine_of(tmp_path, dataclasses.replace(shape, asynchronous=asynchronous))
    prompt = tokens(41, seed=1)
    assert ask(engine, "first", prompt) == 0
    assert engine.scheduler.reset_prefix_cache()
    hit = ask(engine, "again", prompt)
    assert hit >= 32
    for group in shape.groups:
        assert engine.oracle.loaded_words[group.kind.value] > 0
    engine.close()
