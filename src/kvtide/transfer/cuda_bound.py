"""CUDA itself: ``CudaRuntime`` over cuda-bindings, torch (for the engine's stream) and Triton (for a kernel).

Imports them when it is built, so that this file can be read where there is no device.
"""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtide.transfer.cuda_runtime import CudaError, Event, Stream
from kvtide.transfer.plans import CopyPlan

logger = logging.getLogger(__name__)


class BoundRuntime:
    """One device, which is the current one of the thread that builds this.

    Args:
        device_index: Of the device, as torch counts.

    Raises:
        CudaError: There is no such device, or its driver is too old for cuda-bindings.
        ImportError: torch or cuda-bindings is missing.
    """

    def __init__(self, device_index: int) -> None:
        import torch
        from cuda.bindings import runtime

        self._torch = torch
        self._cuda = runtime
        self._device_index = device_index
        self._move: Any = None
        self._streams: dict[Stream, Any] = {}
        self._call("cudaSetDevice", device_index)
        self._batches = hasattr(runtime, "cudaMemcpyBatchAsync")  # CUDA 12.8
        self._attributes = self._batch_attributes() if self._batches else None

    @property
    def has_batches(self) -> bool:
        """Whether the copy engine takes many pieces with one call, as far as is known by now."""
        return self._batches

    # -- CudaRuntime ------------------------------------------------------------------------------

    def new_stream(self, urgent: bool) -> Stream:
        """See ``CudaRuntime``."""
        lowest, greatest = self._call("cudaDeviceGetStreamPriorityRange")
        priority = greatest if urgent else lowest
        (stream,) = self._call("cudaStreamCreateWithPriority", self._cuda.cudaStreamNonBlocking, priority)
        made = Stream(int(stream))
        self._streams[made] = self._torch.cuda.ExternalStream(
            made, device=self._torch.device("cuda", self._device_index)
        )
        return made

    def new_event(self) -> Event:
        """See ``CudaRuntime``."""
        (event,) = self._call("cudaEventCreateWithFlags", self._cuda.cudaEventDefault)
        return Event(int(event))

    def engine_stream(self) -> Stream:
        """See ``CudaRuntime``."""
        return Stream(int(self._torch.cuda.current_stream(self._device_index).cuda_stream))

    def record(self, event: Event, stream: Stream) -> None:
        """See ``CudaRuntime``."""
        self._call("cudaEventRecord", event, stream)

    def let_wait(self, stream: Stream, event: Event) -> None:
        """See ``CudaRuntime``."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def has_ended(self, event: Event) -> bool:
        """See ``CudaRuntime``."""
        (code,) = self._cuda.cudaEventQuery(event)
        if code == self._cuda.cudaError_t.cudaErrorNotReady:
            return False
        self._check("cudaEventQuery", code)
        return True

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """See ``CudaRuntime``."""
        (milliseconds,) = self._call("cudaEventElapsedTime", begin, end)
        return float(milliseconds) * 1e-3

    def copy_pieces(self, plan: CopyPlan, stream: Stream) -> None:
        """See ``CudaRuntime``. One call, or one a piece where runtime or driver is older than CUDA 12.8."""
        columns = plan.target.tolist(), plan.source.tolist(), plan.size.tolist()
        if self._batches:
            code, *_ = self._cuda.cudaMemcpyBatchAsync(
                *columns, len(plan.size), [self._attributes], [0], 1, stream
            )
            if not self._is_unknown(code):
                self._check("cudaMemcpyBatchAsync", code)
                return
            self._batches = False
            logger.warning("the driver takes no batches of copies; each piece is a call of its own")
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        for target, source, size in zip(*columns, strict=True):
            self._call("cudaMemcpyAsync", target, source, size, kind, stream)

    def move_pieces(self, table: int, count: int, wide: bool, stream: Stream) -> None:
        """See ``CudaRuntime``. Compiles the kernel when it is called first: not in a step."""
        if self._move is None:
            from kvtide.transfer.kernels_triton import move_pieces

            self._move = move_pieces
        # Triton launches on torch's current stream.
        with self._torch.cuda.stream(self._streams[stream]):
            try:
                self._move(table, count, wide)
            except Exception as error:  # whatever a compiler, its cache or a launcher raises
                raise CudaError("the kernel for small pieces", repr(error)) from error

    def register(self, address: int, byte_count: int) -> None:
        """See ``CudaRuntime``."""
        flags = self._cuda.cudaHostRegisterPortable | self._cuda.cudaHostRegisterMapped
        with self._beside_captures():
            self._call("cudaHostRegister", address, byte_count, flags)
            (seen_at,) = self._call("cudaHostGetDevicePointer", address, 0)
            if int(seen_at) != address:  # not on Linux with 64 bits, as far as is known
                self._call("cudaHostUnregister", address)
                raise CudaError(
                    "cudaHostGetDevicePointer", f"{address:#x} is {int(seen_at):#x} to the device"
                )

    def unregister(self, address: int) -> None:
        """See ``CudaRuntime``."""
        with self._beside_captures():
            self._call("cudaHostUnregister", address)

    def drop(self, streams: list[Stream], events: list[Event]) -> None:
        """See ``CudaRuntime``."""
        for event in events:
            self._call("cudaEventDestroy", event)
        for stream in streams:
            del self._streams[stream]
            self._call("cudaStreamDestroy", stream)

    @contextmanager
    def device_memory(self, byte_count: int) -> Iterator[int]:
        """Take device memory for a while.

        Raises:
            CudaError: There is not so much left.
        """
        try:
            memory = self._torch.empty(
                byte_count, dtype=self._torch.uint8, device=f"cuda:{self._device_index}"
            )
        except self._torch.OutOfMemoryError as error:
            raise CudaError("device memory", str(error)) from error
        yield memory.data_ptr()

    # -- inside -----------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        code, *results = getattr(self._cuda, name)(*args)
        self._check(name, code)
        return tuple(results)

    def _check(self, name: str, code: Any) -> None:
        if code == self._cuda.cudaError_t.cudaSuccess:
            return
        # A refused call is remembered too; where torch shares this runtime its next call would raise it.
        self._cuda.cudaGetLastError()
        _, reason = self._cuda.cudaGetErrorString(code)
        raise CudaError(name, f"{code.name}: {reason.decode() if reason else 'no reason given'}")

    def _is_unknown(self, code: Any) -> bool:
        errors = self._cuda.cudaError_t
        return code in (errors.cudaErrorCallRequiresNewerDriver, errors.cudaErrorNotSupported)

    def _batch_attributes(self) -> Any:
        attributes = self._cuda.cudaMemcpyAttributes()
        # In stream order: what is read was written by whatever the stream waits for.
        attributes.srcAccessOrder = self._cuda.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = int(self._cuda.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)
        return attributes

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Let this thread call what a graph capture of another thread would forbid, and be ended by."""
        relaxed = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self._call("cudaSetDevice", self._device_index)
        (before,) = self._call("cudaThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._call("cudaThreadExchangeStreamCaptureMode", before)


def device_count() -> int:
    """Devices that can be used; 0 where there is no driver or no torch with CUDA."""
    try:
        import torch
    except ImportError:
        return 0
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
