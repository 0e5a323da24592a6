"""What a copier asks of CUDA: streams, events, two ways to move bytes, and memory the device may read.

Knows no jobs and no plans beyond their three columns. ``cuda_bound.py`` is the real one; a double that
executes late and in any order that streams allow is ``kvtide.testing.LazyCuda``.
"""

from typing import NewType, Protocol

from kvtide.transfer.plans import CopyPlan

Stream = NewType("Stream", int)
"""A ``cudaStream_t``."""

Event = NewType("Event", int)
"""A ``cudaEvent_t``."""


class CudaError(Exception):
    """The runtime refused a call, or something submitted earlier has gone wrong by now.

    Args:
        call: What was asked for.
        reason: What the runtime said.
    """

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.call = call
        self.reason = reason


class CudaRuntime(Protocol):
    """One device, used by one thread; only ``register`` and ``unregister`` may come from others.

    No call but these two waits for the device or for anything submitted to it. Each raises ``CudaError``.
    """

    def new_stream(self, urgent: bool) -> Stream:
        """Make a stream that is not ordered against the default one; an urgent one goes first."""

    def new_event(self) -> Event:
        """Make an event that keeps the time; it counts as ended until it is recorded."""

    def engine_stream(self) -> Stream:
        """Name the stream that the calling thread submits its forwards to."""

    def record(self, event: Event, stream: Stream) -> None:
        """Let an event end once all that was submitted to the stream until now has."""

    def let_wait(self, stream: Stream, event: Event) -> None:
        """Let what is submitted to the stream from now on wait for the last recording of the event.

        A later recording of the same event changes nothing about that.
        """

    def has_ended(self, event: Event) -> bool:
        """Say whether the last recording of the event has been reached."""

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Seconds of the device from one ended event to another."""

    def copy_pieces(self, plan: CopyPlan, stream: Stream) -> None:
        """Submit pieces to the copy engine; their order among each other is open."""

    def move_pieces(self, table: int, count: int, wide: bool, stream: Stream) -> None:
        """Submit one kernel that moves pieces, each read and written by the device's processors.

        Args:
            table: Address of ``int64[3, count]`` in registered memory: sources, targets, sizes. It is read
                when the kernel runs, so it must stay until then.
            count: Pieces, at least one.
            wide: Every source, target and size is a multiple of 16.
            stream: Where to.
        """

    def register(self, address: int, byte_count: int) -> None:
        """Lock pages of the host and let the device reach them under the same address."""

    def unregister(self, address: int) -> None:
        """Undo ``register`` of what begins at the address."""

    def drop(self, streams: list[Stream], events: list[Event]) -> None:
        """Give streams and events back; nothing of them is in use any more."""
