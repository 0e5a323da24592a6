"""Copies between a CUDA device and the host pool.

A copier has one stream. What the device has to wait for it is told by events; the host waits only where it
is asked to (``wait``, ``close``). A copy is submitted in portions, and only so far ahead that the stream
does not run dry between two steps: what has not been submitted can be overtaken by a shorter one,
cancelled, or run out of time.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from kvtide.jobs import Direction, JobId
from kvtide.transfer.cuda_device import CudaDevice, OpenCopy
from kvtide.transfer.cuda_order import Touched
from kvtide.transfer.cuda_runtime import CudaError, Event, Stream
from kvtide.transfer.cuda_ways import Portion, cut_at, portions_of
from kvtide.transfer.devices import CopyOutcome
from kvtide.transfer.plans import CopyPlan

logger = logging.getLogger(__name__)

AHEAD_BYTES = 512 << 20
"""So much is on a stream at once: 20 ms at 25 GB/s, about as long as a step."""

PATIENCE_S = 1.0
"""Who has waited so long goes before shorter copies."""

NAP_S = 50e-6
"""Between two looks at what is waited for."""

COMPLAIN_S = 5.0
"""So often an end that does not come is logged."""


@dataclass(slots=True, eq=False)
class _Copy:
    job_id: JobId
    byte_count: int
    submitted_s: float
    begin_by_s: float
    order: int
    touched: Touched
    after: list[OpenCopy]
    portions: deque[Portion]
    left_bytes: int  # not submitted
    begin: Event | None = None
    last: Event | None = None
    flying: int = 0
    done_bytes: int = 0
    cancelled: bool = False
    failed: bool = False
    ended: bool = False

    @property
    def settled(self) -> bool:
        return not self.portions or self.cancelled or self.failed or self.ended


@dataclass(frozen=True, slots=True)
class _Flight:
    copy: _Copy
    byte_count: int
    end: Event
    tables: list[int] = field(default_factory=list)


class CudaCopier:
    """One direction of one device; all calls come from the thread that submits the engine's forwards.

    A store begins when the last forward that was noted has ended, a load when all that the engine had
    submitted before it has: its blocks may have been somebody else's until then. A copy that is past its
    deadline or cancelled before it was submitted ends as failed; once submitted it ends when the device says
    so, and never when the device cannot be asked any more.

    Args:
        direction: Which way.
        device: Shared with the other direction.
    """

    def __init__(self, direction: Direction, device: CudaDevice) -> None:
        self._direction = direction
        self._device = device
        self._runtime = device.runtime
        # A load is what a request waits for; a store is waited for by nobody.
        self._stream: Stream = self._runtime.new_stream(urgent=direction is Direction.LOAD)
        self._forward: Event = self._runtime.new_event()
        self._open: dict[JobId, _Copy] = {}
        self._flights: deque[_Flight] = deque()
        self._flying_bytes = 0
        self._order = itertools.count()
        self._ended: list[CopyOutcome] = []
        device.open(self)

    # -- DeviceCopier -----------------------------------------------------------------------------

    def forward_ended(self) -> None:
        """See ``DeviceCopier``."""
        try:
            self._runtime.record(self._forward, self._runtime.engine_stream())
        except CudaError as error:
            self._device.lose(error)

    def submit(self, job_id: JobId, plan: CopyPlan, deadline_s: float) -> None:
        """See ``DeviceCopier``.

        Raises:
            ValueError: The plan leads to host memory that the device may not reach.
        """
        plan = self._reachable(plan)
        if self._direction is Direction.LOAD:
            self.forward_ended()
        now_s = time.monotonic()
        touched = Touched(plan)
        from_bytes = self._device.engine_from_bytes[self._direction] if self._device.has_table else 0
        copy = _Copy(
            job_id,
            plan.byte_count,
            now_s,
            now_s + deadline_s,
            next(self._order),
            touched,
            self._device.before(touched),
            deque(portions_of(plan, from_bytes)),
            plan.byte_count,
        )
        self._open[job_id] = copy
        self._device.copies.append(copy)
        self._device.advance()

    def poll(self) -> list[CopyOutcome]:
        if self._open:
            self._device.advance()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, job_ids: Collection[JobId]) -> None:
        for job_id in job_ids:
            if (copy := self._open.get(job_id)) is not None:
                copy.cancelled = True
        self._device.advance()

    def wait(self, job_ids: Collection[JobId], timeout_s: float) -> bool:
        """See ``DeviceCopier``.

        Raises:
            CudaError: A load is under way and the device cannot be asked any more: no wait would ever end,
                and the engine's next call on the device fails as well.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            self._device.advance()
            if not any(job_id in self._open for job_id in job_ids):
                return True
            if self._device.broken is not None and self._direction is Direction.LOAD:
                raise self._device.broken
            if time.monotonic() >= until_s:
                return False
            time.sleep(NAP_S)

    def close(self) -> None:
        """See ``DeviceCopier``. A context that is lost ends by itself, and is not waited for."""
        self.cancel(list(self._open))
        complain_s = time.monotonic() + COMPLAIN_S
        while self._open and self._device.broken is None:
            time.sleep(NAP_S)
            self._device.advance()
            if time.monotonic() > complain_s:
                complain_s += COMPLAIN_S
                logger.error("copies %s do not end; the end waits for them", sorted(self._open))
        self._device.close(self, [self._stream], [self._forward])

    # -- inside -----------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Note what has ended and submit what may be submitted; True when something was submitted."""
        self._land()
        self._drop_unbegun()
        submitted = False
        while self._flying_bytes < AHEAD_BYTES and self._device.broken is None:
            copy = self._next()
            if copy is None or (len(copy.portions[0].kernel.size) and not self._device.has_table):
                break
            self._submit_portion(copy)
            submitted = True
        return submitted

    def _reachable(self, plan: CopyPlan) -> CopyPlan:
        begins, ends, bounds = self._device.registered()
        storing = self._direction is Direction.STORE
        plan = cut_at(plan, plan.target if storing else plan.source, bounds)
        host = plan.target if storing else plan.source
        at = np.searchsorted(begins, host, side="right") - 1
        # A kernel that reads what is not registered costs the engine its context, not just this copy.
        if len(host) and (not len(begins) or bool(((at < 0) | (host + plan.size > ends[at])).any())):
            raise ValueError("host memory that is not registered with the device")
        return plan

    def _next(self) -> _Copy | None:
        """The copy to submit from: short ones first, and nobody before what it has to come after."""
        now_s = time.monotonic()
        best: tuple[int, int] | None = None
        chosen = None
        for copy in self._open.values():
            if copy.settled or not all(other.settled for other in copy.after):
                continue
            impatient = now_s - copy.submitted_s > PATIENCE_S
            rank = (0 if impatient else copy.left_bytes, copy.order)
            if best is None or rank < best:
                best, chosen = rank, copy
        return chosen

    def _submit_portion(self, copy: _Copy) -> None:
        """Put the next portion on the stream; what goes wrong fails the copy once the rest has ended."""
        portion = copy.portions.popleft()
        copy.left_bytes -= portion.byte_count
        tables: list[int] = []
        try:
            if copy.begin is None:
                self._wait_on_stream(copy)
                copy.begin = self._device.take_event()
                self._runtime.record(copy.begin, self._stream)
            if len(portion.kernel.size):
                index, address = self._device.take_table(portion.kernel)
                tables.append(index)
                self._runtime.move_pieces(address, len(portion.kernel.size), portion.wide, self._stream)
            if len(portion.engine.size):
                self._runtime.copy_pieces(portion.engine, self._stream)
        except CudaError as error:
            logger.error("job %d: %s", copy.job_id, error)
            copy.failed = True
        if copy.last is not None and not copy.flying:
            self._device.free_event(copy.last)
        copy.flying += 1  # for ever, where the end cannot be noted
        try:
            copy.last = self._device.take_event()
            self._runtime.record(copy.last, self._stream)
        except CudaError as error:
            # Whether a byte of this portion is still to come cannot be told.
            self._device.lose(error)
            return
        self._flying_bytes += portion.byte_count
        self._flights.append(_Flight(copy, portion.byte_count, copy.last, tables))

    def _wait_on_stream(self, copy: _Copy) -> None:
        self._runtime.let_wait(self._stream, self._forward)
        for other in copy.after:
            if not other.ended and other.last is not None:
                self._runtime.let_wait(self._stream, other.last)
        copy.after = []

    def _land(self) -> None:
        while self._flights and self._device.broken is None:
            flight = self._flights[0]
            try:
                if not self._runtime.has_ended(flight.end):
                    return
            except CudaError as error:
                self._device.lose(error)
                return
            self._flights.popleft()
            self._flying_bytes -= flight.byte_count
            for index in flight.tables:
                self._device.free_table(index)
            copy = flight.copy
            copy.flying -= 1
            copy.done_bytes += 0 if copy.failed else flight.byte_count
            if flight.end != copy.last:
                self._device.free_event(flight.end)
            if copy.settled and not copy.flying:
                self._end(copy)

    def _drop_unbegun(self) -> None:
        """End what is not on the stream and never will be."""
        now_s = time.monotonic()
        for copy in [copy for copy in self._open.values() if not copy.flying]:
            late = copy.last is None and now_s > copy.begin_by_s
            if late or copy.settled or self._device.broken is not None:
                self._end(copy)

    def _end(self, copy: _Copy) -> None:
        copy.ended = True
        del self._open[copy.job_id]
        self._device.copies.remove(copy)
        copy_s = self._elapsed_s(copy.begin, copy.last)
        for event in (copy.begin, copy.last):
            if event is not None:
                self._device.free_event(event)
        success = copy.done_bytes == copy.byte_count and not copy.failed
        latency_s = time.monotonic() - copy.submitted_s
        self._ended.append(CopyOutcome(copy.job_id, success, copy.done_bytes, copy_s, latency_s))

    def _elapsed_s(self, begin: Event | None, end: Event | None) -> float:
        if begin is None or end is None or self._device.broken is not None:
            return 0.0
        try:
            return self._runtime.elapsed_s(begin, end)
        except CudaError as error:  # a figure for the metrics, no more
            logger.debug("no time of a copy: %s", error)
            return 0.0
