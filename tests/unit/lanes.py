"""A lane that does what it is told when it is told, and remembers what it was asked."""

from collections import Counter
from collections.abc import Collection, Sequence

from kvtide.jobs import JobId, PartFate
from kvtide.keys import OffloadKey
from kvtide.tiers.breaker import BreakerState
from kvtide.tiers.records import ChunkName, RecordHeader, Shard
from kvtide.transfer.lane import Lane, TierDirection, TierOutcome, TierPart, TierState


class HeldLane(Lane):
    """Holds every job until ``finish``.

    Attributes:
        records: What the tier has.
        asked: Discards, cancels, generations and recounts, in order.
        room: Whether jobs are taken.
        ends: What ``close`` says.
    """

    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self.records: dict[OffloadKey, tuple[ChunkName, bytes]] = {}
        self.asked: list[object] = []
        self.room = self.ends = True
        self.opened = True
        self.breaker = BreakerState.CLOSED
        self.takes_writes = True
        self.begun = 0
        self.capacity_bytes = 1 << 20
        self._open: dict[JobId, tuple[TierDirection, list[TierPart]]] = {}
        self._ended: list[TierOutcome] = []
        self._late: set[JobId] = set()
        self._inventory: list[RecordHeader] | None = []

    @property
    def held(self) -> list[JobId]:
        return list(self._open)

    def names(self, job_id: JobId) -> list[ChunkName]:
        return [part.name for part in self._open[job_id][1]]

    def finish(self, job_id: JobId, *fates: PartFate, trouble: Sequence[str] = ()) -> None:
        """End a job: what is DONE is written or read now; without fates, all of it."""
        direction, parts = self._open.pop(job_id)
        fates = fates or (PartFate.DONE,) * len(parts)
        byte_count = 0
        for part, fate in zip(parts, fates, strict=True):
            if fate is not PartFate.DONE:
                continue
            byte_count += len(part.payload)
            if direction is TierDirection.WRITE:
                self.records[part.name.key] = (part.name, bytes(part.payload))
            else:
                part.payload[:] = self.records[part.name.key][1]
        self._ended.append(
            TierOutcome(job_id, direction, bytes(fates), byte_count, 0.25, 0.5, Counter(trouble))
        )

    def be_late(self, job_id: JobId) -> None:
        self._late.add(job_id)

    def tell(self) -> None:
        """Have what is there told as an inventory."""
        listed = [
            RecordHeader(bytes(32), 0, name, Shard(), len(payload), bytes(16), 1000)
            for name, payload in self.records.values()
        ]
        self._inventory = sorted(listed, key=lambda header: header.name.chunk_index)

    # -- Lane -------------------------------------------------------------------------------------

    def submit(
        self,
        job_id: JobId,
        direction: TierDirection,
        parts: Sequence[TierPart],
        lead: tuple[bytes, ...] = (),
    ) -> bool:
        if self.room:
            assert job_id not in self._open
            self._open[job_id] = (direction, list(parts))
        return self.room

    def cancel(self, job_ids: Collection[JobId]) -> None:
        self.asked.append(("cancel", set(job_ids)))

    def discard(self, keys: Collection[OffloadKey]) -> None:
        self.asked.append(("discard", tuple(keys)))
        for key in keys:
            self.records.pop(key, None)

    def begin_generation(self, trusted: bool = False) -> None:
        self.asked.append(("generation", trusted))
        self.records.clear()
        for job_id in self.held:
            _, parts = self._open[job_id]
            self.finish(job_id, *(PartFate.FAILED,) * len(parts), trouble=["cancelled"])

    @property
    def generations_begun(self) -> int:
        return self.begun

    def poll(self) -> list[TierOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def take_late(self) -> set[JobId]:
        late, self._late = self._late, set()
        return late

    def take_inventory(self, limit: int) -> list[RecordHeader] | None:
        if not self._inventory:
            found, self._inventory = self._inventory, None
            return None if found is None or not self.opened else found or None
        told, self._inventory = self._inventory[:limit], self._inventory[limit:]
        return told

    def recount(self) -> None:
        self.asked.append(("recount",))
        self.tell()

    def state(self) -> TierState:
        return TierState(self.breaker, self.takes_writes, self.capacity_bytes, 0, 0, self.opened)

    def close(self, patience_s: float) -> bool:
        self.asked.append(("close", patience_s))
        return self.ends
