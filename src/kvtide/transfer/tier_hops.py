"""The hops between a rank's host pool and the tiers below it: jobs in, lanes at work, answers out.

Knows which slot is which piece of memory and which lane leads to which tier; does not know what a chunk is
worth, or what else a job does.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.jobs import (
    CPULoadStoreSpec,
    Discard,
    Hop,
    HopKey,
    HopResult,
    InventoryPiece,
    JobId,
    PartFate,
    StorageLoadStoreSpec,
    TierReport,
    TransferJob,
)
from kvtide.keys import make_offload_key, split_offload_key
from kvtide.metrics import MetricsDelta
from kvtide.tiers.breaker import BreakerState
from kvtide.tiers.records import ChunkName, RecordHeader
from kvtide.transfer.lane import Lane, TierDirection, TierOutcome, TierPart
from kvtide.transfer.pool import HostPool

logger = logging.getLogger(__name__)

RECORDS_PER_STEP = 384
"""Of an inventory, so many are told in one step: about two milliseconds, and a hundred kilobytes."""


@dataclass(frozen=True, slots=True)
class TierSeat:
    """A tier, as one rank uses it.

    Attributes:
        lane: The way to it.
        record_bytes: Per group, what one chunk takes of its capacity; 0 where another rank writes it.
        shard_counts: Per group, how many ranks write a part of each chunk.
        names_limit: Of chunks that are remembered to be in a tier that evicts by its own rules; None for one
            that has a capacity.
    """

    lane: Lane
    record_bytes: tuple[int, ...]
    shard_counts: tuple[int, ...]
    names_limit: int | None = None


@dataclass(slots=True)
class HopAnswers:
    """What the ladder has to say in one step."""

    results: dict[HopKey, HopResult]
    fates: dict[HopKey, bytes]
    reports: dict[int, TierReport]
    inventory: tuple[InventoryPiece, ...]


class TierHops:
    """One rank's tiers.

    Args:
        seats: The tiers, the nearest first.
        pool: The rank's host memory.
        chunk_bytes: Per group, bytes of one chunk.
        metrics: Where to count.
    """

    def __init__(
        self, seats: Sequence[TierSeat], pool: HostPool, chunk_bytes: Sequence[int], metrics: MetricsDelta
    ) -> None:
        self._seats = tuple(seats)
        self._pool = pool
        self._memory = memoryview(pool.view)  # type: ignore[arg-type]
        self._chunk_bytes = tuple(chunk_bytes)
        self._metrics = metrics
        self._open: dict[tuple[int, JobId], int] = {}  # tier and job: index of the hop
        self._results: dict[HopKey, HopResult] = {}
        self._fates: dict[HopKey, bytes] = {}
        self._reported: dict[int, TierReport] = {}
        self._generation = 0
        self._asked = [0] * len(self._seats)  # generations
        self._telling = set(range(len(self._seats)))  # tiers whose inventory is not told to its end

    def begin(self, job: TransferJob, first: int) -> None:
        """Begin all hops of a job from index ``first`` on; what is not taken is answered as failed."""
        for index, hop in enumerate(job.hops[first:], first):
            tier = _tier_of(hop)
            lane = self._seats[tier - 1].lane
            direction, parts, lead = self._parts(hop)
            self._open[tier, job.job_id] = index
            if not lane.submit(job.job_id, direction, parts, lead):
                del self._open[tier, job.job_id]
                self._metrics.add("tier_errors", len(parts), f"{lane.name},queue_full")
                self._results[job.job_id, index] = HopResult.FAILED

    def refuse(self, job: TransferJob, first: int) -> None:
        """Answer for hops that never begin: what they would have written is not there."""
        for index in range(first, len(job.hops)):
            self._results[job.job_id, index] = HopResult.FAILED

    def cancel(self, job_ids: Collection[JobId]) -> None:
        """Let what has not begun of these jobs not begin."""
        if job_ids:
            for seat in self._seats:
                seat.lane.cancel(job_ids)

    def discard(self, discards: Collection[Discard]) -> None:
        """Forget chunks, in the background."""
        for discard in discards:
            self._seats[discard.tier - 1].lane.discard(discard.keys)

    def begin_generation(self, generation: int, keeps: bool) -> None:
        """Serve nothing of before; or, where a reset keeps what is below, tell anew what that is."""
        self._generation = generation
        for index, seat in enumerate(self._seats):
            if keeps:
                seat.lane.recount()
                self._telling.add(index)
            else:
                seat.lane.begin_generation()
                self._asked[index] += 1
                self._telling.discard(index)

    @property
    def generation_is_durable(self) -> bool:
        """Whether a restart would not undo the last reset."""
        return all(
            seat.lane.generations_begun >= asked for seat, asked in zip(self._seats, self._asked, strict=True)
        )

    def poll(self) -> None:
        """Take note of what has ended, or takes too long."""
        for tier, seat in enumerate(self._seats, 1):
            for outcome in seat.lane.poll():
                self._note(tier, seat.lane.name, outcome)
            for job_id in seat.lane.take_late():
                index = self._open.get((tier, job_id))
                if index is not None:
                    self._results.setdefault((job_id, index), HopResult.LATE)

    def take_answers(self) -> HopAnswers:
        """Hand out what the scheduler side has to know."""
        answers = HopAnswers(self._results, self._fates, self._changed_reports(), self._pieces())
        self._results, self._fates = {}, {}
        return answers

    def close(self, patience_s: float) -> None:
        """End every lane. Where calls do not return their threads keep the memory they use."""
        for seat in self._seats:
            if not seat.lane.close(patience_s):
                logger.warning("%s: calls do not return; it is left as it is", seat.lane.name)

    # -- inside ---------------------------------------------------------------------------------

    def _parts(self, hop: Hop) -> tuple[TierDirection, list[TierPart], tuple[bytes, ...]]:
        direction, storage, host = TierDirection.WRITE, hop.target, hop.source
        if not isinstance(storage, StorageLoadStoreSpec):
            direction, storage, host = TierDirection.READ, hop.source, hop.target
        assert isinstance(storage, StorageLoadStoreSpec)
        assert isinstance(host, CPULoadStoreSpec)
        count, step = self._chunk_bytes[storage.group_index], self._pool.slot_bytes
        parts, parent = [], storage.parent_hash
        for index, (block_hash, slot) in enumerate(
            zip(storage.hashes, host.slots, strict=True), storage.start
        ):
            name = ChunkName(make_offload_key(block_hash, storage.group_index), parent, index)
            parts.append(TierPart(name, self._memory[slot * step : slot * step + count]))
            parent = block_hash
        return direction, parts, storage.lead

    def _note(self, tier: int, name: str, outcome: TierOutcome) -> None:
        index = self._open.pop((tier, outcome.job_id), None)
        if index is None:
            return
        key = outcome.job_id, index
        direction = "read" if outcome.direction is TierDirection.READ else "write"
        self._metrics.add("tier_bytes", outcome.byte_count, f"{name},{direction}")
        self._metrics.add("tier_seconds", outcome.busy_s, f"{name},{direction}")
        for trouble, count in outcome.trouble.items():
            self._metrics.add("tier_errors", count, f"{name},{_kind(trouble)}")
        done = outcome.fates.count(PartFate.DONE) == len(outcome.fates)
        self._results[key] = HopResult.DONE if done else HopResult.FAILED
        if not done:
            self._fates[key] = outcome.fates

    def _changed_reports(self) -> dict[int, TierReport]:
        changed = {}
        for tier, seat in enumerate(self._seats, 1):
            state = seat.lane.state()
            serves = state.opened and state.state is not BreakerState.OPEN
            capacity_bytes = state.capacity_bytes if seat.names_limit is None else _bytes_of_names(seat)
            report = TierReport(
                serves, serves and state.takes_writes, capacity_bytes, seat.record_bytes, state.chunk_read_s
            )
            # A tier that is not open yet has no capacity, and nothing to say.
            if state.opened and report != self._reported.get(tier):
                self._reported[tier] = changed[tier] = report
        return changed

    def _pieces(self) -> tuple[InventoryPiece, ...]:
        pieces = []
        for index in sorted(self._telling):
            headers = self._seats[index].lane.take_inventory(RECORDS_PER_STEP)
            if headers is None:
                self._telling.discard(index)
            if headers is None or headers:
                pieces.append(self._piece(index, headers or [], headers is None))
        return tuple(pieces)

    def _piece(self, index: int, headers: Sequence[RecordHeader], last: bool) -> InventoryPiece:
        names = [(header.name, *split_offload_key(header.name.key)) for header in headers]
        width = len(names[0][1]) if names else 1
        return InventoryPiece(
            index + 1,
            self._generation,
            self._seats[index].shard_counts,
            np.array([group for _, _, group in names], dtype=np.uint16).tobytes(),
            np.array([name.chunk_index for name, _, _ in names], dtype=np.uint32).tobytes(),
            np.array([header.written_at_s for header in headers], dtype=np.uint64).tobytes(),
            b"".join(block_hash for _, block_hash, _ in names),
            b"".join(name.parent_hash or bytes(width) for name, _, _ in names),
            width,
            last,
        )


def _bytes_of_names(seat: TierSeat) -> int:
    """What the chunks take that are remembered to be in a shared tier."""
    return (seat.names_limit or 0) * max(seat.record_bytes)


def _tier_of(hop: Hop) -> int:
    for end in (hop.target, hop.source):
        if isinstance(end, StorageLoadStoreSpec):
            return end.tier
    raise ValueError(f"no tier below host memory is part of {hop}")


def _kind(trouble: str) -> str:
    """Turn what a lane says went wrong into a label."""
    return KINDS.get(trouble, "unavailable")


KINDS = {
    "miss": "miss",
    "CorruptRecordError": "corrupt",
    "TierFullError": "full",
    "late": "late",
    "cancelled": "cancelled",
    "out": "out",
}
"""Of errors: labels of a metric."""
