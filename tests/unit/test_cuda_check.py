"""``scripts/gpu_check.py`` over a double of a device: what it would find, and what it says without one."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvtide.jobs import Direction
from kvtide.testing import LazyCuda
from kvtide.transfer.cuda_device import CudaDevice
from kvtide.transfer.cuda_runtime import Stream
from kvtide.transfer.plans import CopyPlan
from kvtide.transfer.pool import HostPool

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def bench_over(script: ModuleType, cuda: LazyCuda) -> object:
    def allocate(byte_count: int) -> torch.Tensor:
        return torch.from_numpy(cuda.device_array(byte_count))

    return script.Bench(CudaDevice(cuda), allocate, cuda.run)


def test_without_a_device_it_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "device_count", lambda: 0)
    assert script.main([]) == 3
    assert "nothing was checked" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["--mib", "1"])
    assert "--mib 1" in capsys.readouterr().err


def test_bytes_are_compared_and_every_figure_is_there(script: ModuleType) -> None:
    cuda = LazyCuda(random.Random(1))
    bench = bench_over(script, cuda)
    pool = HostPool(64, 4096, registrar=bench.device)
    assert pool.await_slots(64, 20.0)
    memory = bench.allocate(64 * 4096)
    field = script.Field(memory.data_ptr(), pool.address, 64 * 4096)
    results = script.check(bench, field, (4096, 16384), (1000, 4096), 5, 8)
    assert results["compared_bytes"] == 3 * 2 * (1000 + 4096) * 4 * (96 + 48)
    printed = script.table(results["pieces"], results["whole"]).splitlines()
    assert len(printed) == 4
    assert bench.device.engine_from_bytes == dict.fromkeys(Direction, 28 << 10)
    pool.close()


class Forgetful(LazyCuda):
    """Loses a piece of a batch now and then."""

    def copy_pieces(self, plan: CopyPlan, stream: Stream) -> None:
        if len(plan.size) > 40:
            plan = CopyPlan(plan.source[1:], plan.target[1:], plan.size[1:])
        super().copy_pieces(plan, stream)


def test_bytes_that_do_not_arrive_are_found(script: ModuleType) -> None:
    bench = bench_over(script, Forgetful(random.Random(2)))
    bench.device.engine_from_bytes = dict.fromkeys(Direction, 0)
    with pytest.raises(script.WrongBytesError, match="wrong bytes"):
        script.round_trip(bench, 4096, False, 1)
