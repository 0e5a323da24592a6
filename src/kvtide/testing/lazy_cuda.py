"""A CUDA runtime without a device: it executes late, piece by piece, in any order that streams allow.

Device memory is memory of this process. What is submitted waits in its stream until somebody looks at an
event; then streams, and pieces within a batch, take turns as a seeded chance has it. A copier that forgot
to say what must come first copies wrong bytes sooner or later. Memory that the device may not reach, and
pieces that lie in two registrations, are refused as they are by a driver.
"""

import ctypes
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvtide.transfer.cuda_runtime import CudaError, Event, Stream
from kvtide.transfer.plans import CopyPlan

ENGINE_STREAM = Stream(1)

Piece = tuple[int, int, int]
"""Target, source, size."""


class ForbiddenAccessError(AssertionError):
    """A copy touched memory that the device does not reach, or reaches in two pieces."""


@dataclass(slots=True)
class _Pieces:
    """A batch that is under way; of a kernel only the table is known until it begins."""

    take: Callable[[], list[Piece]]
    cost_s: Callable[[int], float]
    pieces: list[Piece] | None = None


@dataclass(frozen=True, slots=True)
class _Record:
    event: Event
    number: int


@dataclass(frozen=True, slots=True)
class _Wait:
    event: Event
    number: int


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], None]


class LazyCuda:
    """A ``CudaRuntime``.

    Args:
        chance: Says who goes on, and how far before a look at an event returns.
        engine_s: Seconds that the copy engine takes for a piece of so many bytes.
        kernel_s: The same of the kernel.

    Attributes:
        fails: By name of a method, the ordinals (from 1) of its calls that are refused.
        calls: How often each was called.
        held: Streams that do not go on.
        device: Where device memory lies: address to bytes.
        registered: Memory of the host that the device reaches: address to bytes.
        now_s: The device's clock.
    """

    def __init__(
        self,
        chance: random.Random,
        engine_s: Callable[[int], float] = lambda size: 1e-6 + size / 25e9,
        kernel_s: Callable[[int], float] = lambda size: size / 20e9,
    ) -> None:
        self._chance = chance
        self._engine_s = engine_s
        self._kernel_s = kernel_s
        self._handles = itertools.count(100)
        self._streams: dict[Stream, deque[_Pieces | _Record | _Wait | _Call]] = {ENGINE_STREAM: deque()}
        self._recorded: Counter[Event] = Counter()
        self._reached: dict[Event, tuple[int, float]] = {}
        self.fails: dict[str, set[int]] = {}
        self.calls: Counter[str] = Counter()
        self.held: set[Stream] = set()
        self.device: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.urgent: dict[Stream, bool] = {}
        self.now_s = 0.0

    # -- what a test does -------------------------------------------------------------------------

    def submit(self, function: Callable[[], None]) -> None:
        """Let the engine do something on its stream when its turn comes."""
        self._streams[ENGINE_STREAM].append(_Call(function))

    def device_array(self, byte_count: int) -> np.ndarray:
        """Take device memory: ``uint8[byte_count]``."""
        array = np.zeros(byte_count, dtype=np.uint8)
        self.device[int(array.ctypes.data)] = byte_count
        return array

    def step(self) -> bool:
        """Execute a little of one stream; False when nothing can go on."""
        able = [stream for stream in self._streams if stream not in self.held and self._can(stream)]
        if not able:
            return False
        self._execute(self._chance.choice(able))
        return True

    def run(self) -> None:
        """Execute all that can be executed."""
        while self.step():
            continue

    # -- CudaRuntime ------------------------------------------------------------------------------

    def new_stream(self, urgent: bool) -> Stream:
        self._count("new_stream")
        stream = Stream(next(self._handles))
        self._streams[stream] = deque()
        self.urgent[stream] = urgent
        return stream

    def new_event(self) -> Event:
        self._count("new_event")
        event = Event(next(self._handles))
        self._reached[event] = (0, 0.0)
        return event

    def engine_stream(self) -> Stream:
        return ENGINE_STREAM

    def record(self, event: Event, stream: Stream) -> None:
        self._count("record")
        self._recorded[event] += 1
        self._streams[stream].append(_Record(event, self._recorded[event]))

    def let_wait(self, stream: Stream, event: Event) -> None:
        self._count("let_wait")
        self._streams[stream].append(_Wait(event, self._recorded[event]))

    def has_ended(self, event: Event) -> bool:
        self._count("has_ended")
        for _ in range(self._chance.randrange(4)):
            self.step()
        return self._reached[event][0] >= self._recorded[event]

    def elapsed_s(self, begin: Event, end: Event) -> float:
        self._count("elapsed_s")
        return self._reached[end][1] - self._reached[begin][1]

    def copy_pieces(self, plan: CopyPlan, stream: Stream) -> None:
        self._count("copy_pieces")
        pieces = list(zip(plan.target.tolist(), plan.source.tolist(), plan.size.tolist(), strict=True))
        self._streams[stream].append(_Pieces(lambda: pieces, self._engine_s))

    def move_pieces(self, table: int, count: int, wide: bool, stream: Stream) -> None:
        self._count("move_pieces")

        def take() -> list[Piece]:
            self._check(table, 24 * count)
            columns = np.frombuffer(ctypes.string_at(table, 24 * count), dtype=np.int64)
            sources, targets, sizes = columns.reshape(3, count).tolist()
            if wide and any(value % 16 for value in (*sources, *targets, *sizes)):
                raise ForbiddenAccessError("a wide access that is not a multiple of 16")
            return list(zip(targets, sources, sizes, strict=True))

        self._streams[stream].append(_Pieces(take, self._kernel_s))

    def register(self, address: int, byte_count: int) -> None:
        self._count("register")
        for begin, count in self.registered.items():
            if begin < address + byte_count and address < begin + count:
                raise CudaError("register", "already mapped")
        self.registered[address] = byte_count

    def unregister(self, address: int) -> None:
        self._count("unregister")
        del self.registered[address]

    def drop(self, streams: Sequence[Stream], events: Sequence[Event]) -> None:
        self._count("drop")
        for stream in streams:
            if self._streams.pop(stream):
                raise ForbiddenAccessError("a stream was dropped with work on it")
        for event in events:
            del self._reached[event]

    @contextmanager
    def device_memory(self, byte_count: int) -> Iterator[int]:
        """Take device memory for a while; its address."""
        self._count("device_memory")
        array = self.device_array(byte_count)
        yield int(array.ctypes.data)
        del self.device[int(array.ctypes.data)]

    # -- inside -----------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        if self.calls[name] in self.fails.get(name, ()):
            raise CudaError(name, f"call {self.calls[name]} was told to fail")

    def _can(self, stream: Stream) -> bool:
        queue = self._streams[stream]
        if not queue:
            return False
        head = queue[0]
        return not isinstance(head, _Wait) or self._reached[head.event][0] >= head.number

    def _execute(self, stream: Stream) -> None:
        queue = self._streams[stream]
        match queue[0]:
            case _Record(event, number):
                self._reached[event] = (number, self.now_s)
            case _Call(function):
                function()
            case _Pieces() as batch:
                if batch.pieces is None:
                    batch.pieces = batch.take()
                    self._chance.shuffle(batch.pieces)
                self._move(batch.pieces.pop(), batch.cost_s)
                if batch.pieces:
                    return
        queue.popleft()

    def _move(self, piece: Piece, cost_s: Callable[[int], float]) -> None:
        target, source, size = piece
        self._check(target, size)
        self._check(source, size)
        ctypes.memmove(target, source, size)
        self.now_s += cost_s(size)

    def _check(self, address: int, byte_count: int) -> None:
        for memory in (self.device, self.registered):
            for begin, count in memory.items():
                if begin <= address and address + byte_count <= begin + count:
                    return
        raise ForbiddenAccessError(f"{byte_count} bytes at {address:#x}")
