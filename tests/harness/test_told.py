"""KV events are held against what was asked, and one that says something else is found."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from vllm.distributed.kv_events import BlockStored

from kvtide.testing import FaultPlan, FaultyDevice, VirtualClock
from kvtide.vllm.testing import EngineShape, ModelEngine
from kvtide.vllm.testing.asks import ADAPTERS
from kvtide.vllm.testing.promises import LeakError
from kvtide.vllm.testing.told import Told

PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ModelEngine]:
    """An engine that has announced two prompts, which part after three blocks, for an adapter."""
    plan, clock = FaultPlan(random.Random(0), {"instant": 1.0}), VirtualClock()
    shape = EngineShape(with_events=True)
    engine = ModelEngine(tmp_path, shape, lambda rank, direction: FaultyDevice(plan, clock), clock)
    for name, prompt in (("one", PROMPT), ("other", PROMPT[:12] + PROMPT[:12])):
        engine.add(name, prompt, 1, lora_request=ADAPTERS[0])
        while engine.busy:
            engine.step()
            clock.advance(0.001)
    yield engine
    engine.close()


def told(engine: ModelEngine) -> list[BlockStored]:
    assert engine.ledger is not None
    return engine.ledger.told


def test_what_is_announced_is_what_was_asked(engine: ModelEngine) -> None:
    count = len(told(engine))
    assert sum(len(event.block_hashes) for event in told(engine)) == 7 + 3
    assert Told().check(engine) == count
    assert told(engine) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": PROMPT[1:13]},
        {"lora_name": None},
        {"parent_block_hash": None},
        {"block_size": 3},
        {"block_hashes": [1, 2, 3]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_one_that_says_something_else_is_found(engine: ModelEngine, wrong: dict[str, object]) -> None:
    told(engine)[-1] = msgspec.structs.replace(told(engine)[-1], **wrong)
    with pytest.raises(LeakError):
        Told().check(engine)
