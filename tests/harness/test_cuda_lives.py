"""vLLM's schedulers, the whole connector and the CUDA copiers, over a runtime that is late on purpose."""

import random
from pathlib import Path

import pytest

from kvtide import spec
from kvtide.jobs import Direction
from kvtide.testing import LazyCuda
from kvtide.transfer import cuda, cuda_ways
from kvtide.transfer.cuda import CudaCopier
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.groups import GroupShape
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.promises import WrongBytesError
from kvtide.vllm.testing.shape import EngineShape


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> LazyCuda:
    monkeypatch.setattr(cuda, "NAP_S", 0.0)
    monkeypatch.setattr(cuda_ways, "FEW_PIECES", 1)
    runtime = LazyCuda(random.Random(11))
    runtime.device[0] = 1 << 62  # the engine's tensors, wherever they are
    return runtime


def engine_over(
    runtime: LazyCuda, folder: Path, asynchronous: bool, from_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> ModelEngine:
    device = CudaDevice(runtime)
    device.engine_from_bytes = dict.fromkeys(Direction, from_bytes)
    monkeypatch.setattr(spec, "REGISTRARS", {"cpu": lambda: device})
    groups = (GroupShape(("layers.0", "layers.1", "layers.2"), 4),)
    shape = EngineShape(33, groups, asynchronous, host_pages=64)
    return ModelEngine(folder, shape, lambda _, direction: CudaCopier(direction, device))


def ask_forty(engine: ModelEngine) -> dict[str, list[int]]:
    """Prompts that share beginnings, more of them than the device holds; what was asked."""
    chance = random.Random(12)
    stems = [[100 * stem + at for at in range(24)] for stem in range(10)]
    asked = {str(number): [*chance.choice(stems), 1000 + number] for number in range(40)}
    for name, prompt in asked.items():
        engine.add(name, prompt, 3)
        for _ in range(chance.randrange(4)):
            engine.step()
    engine.run_until_idle(3000)
    return asked


@pytest.mark.parametrize("from_bytes", [0, 1 << 20], ids=["engine", "kernel"])
def test_what_is_loaded_is_right_whichever_way_it_went(
    runtime: LazyCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asynchronous: bool, from_bytes: int
) -> None:
    engine = engine_over(runtime, tmp_path, asynchronous, from_bytes, monkeypatch)
    assert runtime.registered  # the pool, by the spec
    asked = ask_forty(engine)
    engine.check()
    assert engine.outputs == {name: PatternModel.answer(prompt, 3) for name, prompt in asked.items()}
    assert engine.checked_loads > 5
    assert bool(runtime.calls["move_pieces"]) == (from_bytes > 0)
    for rank in engine.ranks:
        rank.shutdown()
    assert not runtime.registered


def test_an_end_that_is_reported_too_early_is_seen_by_the_model(
    runtime: LazyCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asynchronous: bool
) -> None:
    engine = engine_over(runtime, tmp_path, asynchronous, 0, monkeypatch)
    monkeypatch.setattr(LazyCuda, "has_ended", lambda self, event: True)
    with pytest.raises(WrongBytesError):
        ask_forty(engine)
