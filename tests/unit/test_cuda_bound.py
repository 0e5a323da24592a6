"""What the binding makes of the answers of cuda-bindings: calls and answers shaped as theirs; no device."""

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
from cuda_world import plan_of

from kvtide.transfer.cuda_bound import BoundRuntime
from kvtide.transfer.cuda_runtime import CudaError, Event, Stream


class Code(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorCallRequiresNewerDriver = 36
    cudaErrorNotReady = 600
    cudaErrorNotSupported = 801


class Mode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeRelaxed = 2


class Bindings(ModuleType):
    """``cuda.bindings.runtime`` as far as it is used.

    Attributes:
        answers: By name of a call, what it answers; success without.
        calls: Names and arguments, in order.
    """

    cudaError_t = Code
    cudaStreamCaptureMode = Mode
    cudaHostRegisterPortable, cudaHostRegisterMapped = 1, 2

    class cudaMemcpyKind(IntEnum):
        cudaMemcpyDefault = 4

    class cudaMemcpySrcAccessOrder(IntEnum):
        cudaMemcpySrcAccessOrderStream = 1

    class cudaMemcpyFlags(IntEnum):
        cudaMemcpyFlagPreferOverlapWithCompute = 1

    class cudaMemcpyAttributes:
        srcAccessOrder, flags = 0, 0

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.answers: dict[str, tuple[Any, ...]] = {
            "cudaGetErrorString": (Code.cudaSuccess, b"because"),
            "cudaThreadExchangeStreamCaptureMode": (Code.cudaSuccess, Mode.cudaStreamCaptureModeGlobal),
            "cudaHostGetDevicePointer": (Code.cudaSuccess, 4096),
        }
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            return self.answers.get(name, (Code.cudaSuccess,))

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    bindings = Bindings()
    package, parent = ModuleType("cuda"), ModuleType("cuda.bindings")
    parent.runtime = bindings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", parent)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", bindings)
    return bindings


PLAN = plan_of([(100, 200, 8), (300, 400, 16)])


def test_a_batch_is_one_call_in_stream_order(bindings: Bindings) -> None:
    BoundRuntime(0).copy_pieces(PLAN, Stream(7))
    ((targets, sources, sizes, count, attributes, indices, attribute_count, stream),) = bindings.named(
        "cudaMemcpyBatchAsync"
    )
    assert (targets, sources, sizes, count) == ([200, 400], [100, 300], [8, 16], 2)
    assert (indices, attribute_count, stream) == ([0], 1, 7)
    assert attributes[0].srcAccessOrder == 1


@pytest.mark.parametrize("code", [Code.cudaErrorCallRequiresNewerDriver, Code.cudaErrorNotSupported])
def test_a_driver_that_knows_no_batches_gets_a_call_a_piece_from_then_on(
    bindings: Bindings, code: Code
) -> None:
    bindings.answers["cudaMemcpyBatchAsync"] = (code, 0)  # CUDA 12 says where in the batch
    runtime = BoundRuntime(0)
    runtime.copy_pieces(PLAN, Stream(7))
    runtime.copy_pieces(PLAN, Stream(7))
    assert len(bindings.named("cudaMemcpyBatchAsync")) == 1
    assert bindings.named("cudaMemcpyAsync") == 2 * [(200, 100, 8, 4, 7), (400, 300, 16, 4, 7)]


def test_a_refusal_names_the_call_and_the_reason_and_is_not_left_for_others(bindings: Bindings) -> None:
    bindings.answers["cudaMemcpyBatchAsync"] = (Code.cudaErrorInvalidValue,)
    with pytest.raises(CudaError, match="cudaMemcpyBatchAsync: cudaErrorInvalidValue: because"):
        BoundRuntime(0).copy_pieces(PLAN, Stream(7))
    assert bindings.named("cudaGetLastError")
    assert not bindings.named("cudaMemcpyAsync")


def test_not_ready_is_an_answer_and_anything_else_an_error(bindings: Bindings) -> None:
    runtime = BoundRuntime(0)
    assert runtime.has_ended(Event(9))
    bindings.answers["cudaEventQuery"] = (Code.cudaErrorNotReady,)
    assert not runtime.has_ended(Event(9))
    bindings.answers["cudaEventQuery"] = (Code.cudaErrorInvalidValue,)
    with pytest.raises(CudaError, match="cudaEventQuery"):
        runtime.has_ended(Event(9))


@pytest.mark.parametrize("refused", [False, True])
def test_memory_is_registered_beside_graph_captures_of_others(bindings: Bindings, refused: bool) -> None:
    runtime = BoundRuntime(0)
    if refused:
        bindings.answers["cudaHostRegister"] = (Code.cudaErrorInvalidValue,)
        with pytest.raises(CudaError, match="cudaHostRegister"):
            runtime.register(4096, 512)
    else:
        runtime.register(4096, 512)
    assert bindings.named("cudaHostRegister") == [(4096, 512, 3)]
    modes = bindings.named("cudaThreadExchangeStreamCaptureMode")
    assert modes == [(Mode.cudaStreamCaptureModeRelaxed,), (Mode.cudaStreamCaptureModeGlobal,)]


def test_memory_that_the_device_sees_elsewhere_is_given_back(bindings: Bindings) -> None:
    bindings.answers["cudaHostGetDevicePointer"] = (Code.cudaSuccess, 12288)
    with pytest.raises(CudaError, match="0x1000 is 0x3000 to the device"):
        BoundRuntime(0).register(4096, 512)
    assert bindings.named("cudaHostUnregister") == [(4096,)]
