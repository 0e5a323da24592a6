"""The host tier: the six primitives over the slots of the pool.

Knows which chunk is in which slot, what is on its way and who reads what; does not know bytes, requests or
time. Where a prefix is, is the catalog's business; what is not ready yet is kept outside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.errors import IllegalTransitionError, MissingChunkError
from kvtide.events import ChunkContent, OffloadingEvent
from kvtide.jobs import CPULoadStoreSpec, Ids, OffloadPolicy, ReqContext, ids
from kvtide.keys import ChunkRun, Medium, PackedKeys
from kvtide.manager.arrivals import Arrivals
from kvtide.manager.base import LookupResult, OffloadingManager, PrepareStoreOutput, Refusal
from kvtide.manager.catalog import Catalog, CatalogGroup
from kvtide.manager.pending import PendingStore
from kvtide.manager.reuse import ReuseFilter
from kvtide.manager.room import ROOM_WANTED, Arriving, Newcomer, judged_as, make_room
from kvtide.manager.slots import Slots, packed
from kvtide.metrics import MetricsDelta
from kvtide.policies import EvictionPolicy

HOST = 0
"""The tier's index in the catalog."""

RUNS_PER_STEP = 512
"""Runs evicted in one step at most: about two milliseconds. What did not fit is offered again."""

REMAINS_PER_STEP = 4
"""Dictionaries of a catalog that was reset that are freed in one step: a million keys are in 256 of them."""

NOTHING = CPULoadStoreSpec(ids(()), (0,))


@dataclass(slots=True)
class _Load:
    spec: CPULoadStoreSpec
    pin: int


@dataclass(slots=True)
class _Gap:
    """Chunks ``[start, stop)`` that are missing.

    Attributes:
        pin: Of what they continue.
        parent: The pending store they continue.
        slot_before: Of the chunk before them.
    """

    start: int
    stop: int
    pin: int
    parent: PendingStore | None = None
    slot_before: int | None = None


class CPUOffloadingManager(OffloadingManager):
    """Slots, pins, policy and events of the host pool.

    Args:
        policy: Who leaves.
        admission: What is worth storing.
        metrics: Where to count.
        with_events: Whether anyone listens.
        groups: The KV cache groups.
        lower_policies: Of the tiers below, see ``Catalog``.
        frees_ahead: Whether ``keep_room`` frees a few slots before they are needed. They hold nothing.

    Attributes:
        catalog: Which chunk is where, in every tier.
        groups: The KV cache groups.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        admission: ReuseFilter | None = None,
        metrics: MetricsDelta | None = None,
        with_events: bool = False,
        groups: Sequence[CatalogGroup] = (CatalogGroup(),),
        lower_policies: Sequence[EvictionPolicy | None] = (),
        frees_ahead: bool = True,
    ) -> None:
        self._policy = policy
        self._frees_ahead = frees_ahead
        # An empty filter is false: ask for None.
        self._admission = ReuseFilter(1, 1) if admission is None else admission
        self._metrics = MetricsDelta() if metrics is None else metrics
        self._with_events = with_events
        self.groups = tuple(groups)
        self.catalog = Catalog(self.groups, (policy, *lower_policies))
        self._slots = Slots()
        self._arrivals = Arrivals(HOST, self.catalog, self.groups, self._now_ready, self._now_free)
        self._pending = self._arrivals.pending
        self._loads: dict[int, _Load] = {}  # by the identity of the spec, which is kept with it
        self._remains: list[dict[bytes, int]] = []  # of catalogs that were reset
        self._runs_left = RUNS_PER_STEP
        self._events: list[OffloadingEvent] = []

    # -- capacity -------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots that can be used so far."""
        return self._slots.capacity

    @property
    def used_count(self) -> int:
        """Slots that hold a chunk, ready or on the way."""
        return self._slots.capacity - self._slots.free_count

    @property
    def free_count(self) -> int:
        """Slots that hold nothing."""
        return self._slots.free_count

    @property
    def pinned_count(self) -> int:
        """Slots that open copies are reading."""
        return self._slots.pinned_count

    def grow(self, capacity: int, planned: int = 0) -> None:
        """Use more slots, as the pool reports them ready.

        Args:
            capacity: Slots that can be used now.
            planned: Slots there will be.
        """
        if capacity > self._slots.capacity:
            self._slots.grow(capacity, planned)
            self.catalog.reserve(self._slots.planned)
            self._policy.resize(capacity)
            self.room_epoch += 1

    def keep_room(self) -> None:
        """Free a few slots ahead, in large pieces, so that what is stored next lies together."""
        free, capacity = self._slots.free_count, self._slots.capacity
        if self._frees_ahead and free < 4 * capacity // (5 * ROOM_WANTED):
            self._evict(capacity // ROOM_WANTED - free)
        if not self._runs_left:
            self.room_epoch += 1
        del self._remains[-REMAINS_PER_STEP:]
        self._runs_left = RUNS_PER_STEP

    # -- reading --------------------------------------------------------------------------------

    def lookup(self, run: ChunkRun, ctx: ReqContext) -> LookupResult:
        stride = self.groups[run.group_index].stride
        as_they_are = run.hashes_per_chunk == stride and not run.lookahead
        keys = run.block_hashes if as_they_are else run.positions(stride)[0]
        ready = self.catalog.resident(run.group_index, keys, run.start, run.stop, HOST)
        later = False
        if len(self._pending) and ready < len(run):
            missing = first = run.start + ready
            if not ready and self.groups[run.group_index].window is None:
                # The store that brings it may begin above the run.
                first = self.catalog.resident(run.group_index, keys, 0, missing, HOST)
            later = self._pending.follow(run, first)[0] > missing
        return LookupResult(ready, later)

    def known_count(self, run: ChunkRun) -> int:
        keys, _, _ = self._positions(run)
        return self._pending.follow(run, self.catalog.resident(run.group_index, keys, 0, run.stop, HOST))[0]

    def restore_point(self, run: ChunkRun) -> int:
        keys, _, stop = self._positions(run)
        point = self.catalog.restore_point(keys, stop, (HOST,))
        return point // self.groups[run.group_index].stride

    def prepare_load(self, run: ChunkRun, ctx: ReqContext) -> CPULoadStoreSpec:
        keys, _, stop = self._positions(run)
        slots = self.catalog.slots(HOST, run.group_index, keys, run.start, run.stop)
        if len(slots) < len(run) or (len(slots) and slots.min() < 0):
            missing = run.start + (int(slots.argmin()) if len(slots) == len(run) else len(slots))
            raise MissingChunkError(
                f"chunk {missing} of request {ctx.request_id} ({run.hash_of(missing).hex()})"
                " was ready when it was looked up and is not any more"
            )
        spec = CPULoadStoreSpec(packed(slots), (len(slots),))
        self._loads[id(spec)] = _Load(spec, self.catalog.pin(keys, stop))
        self.hold(spec.slots)
        return spec

    def visited(self, run: ChunkRun, ctx: ReqContext, now_s: float) -> None:
        keys, _, stop = self._positions(run)
        self.catalog.visited(keys, stop, ctx.visit, now_s)

    def touch(self, run: ChunkRun, ctx: ReqContext) -> None:
        keys, _, stop = self._positions(run)
        self.catalog.touch(keys, stop, ctx.visit)

    def complete_load(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext) -> None:
        load = self._loads.pop(id(spec), None)
        if load is None:
            raise IllegalTransitionError(
                f"slot {next(iter(spec.slots), None)} is not pinned (request {ctx.request_id})"
            )
        self.release(spec.slots)
        self.catalog.unpin(load.pin)
        self.room_epoch += 1

    def lacking(self, run: ChunkRun) -> tuple[int, int]:
        """Find the first chunks in a row, one past the last, that are neither ready nor on their way.

        Args:
            run: Of a group without a window, from the beginning of the prompt.
        """
        start, stop, _ = self._arrivals.absent(run)
        return start, stop

    def keep(self, run: ChunkRun) -> int:
        """Keep what is ready of a prompt up to a run's end where it is, until ``let_go``.

        Returns:
            A handle; one of before a reset means nothing.
        """
        keys, _, stop = self._positions(run)
        return self.catalog.pin(keys, min(stop, self.catalog.tree.find(keys, stop)[1]))

    def let_go(self, handle: int) -> None:
        """Undo ``keep``."""
        self.catalog.unpin(handle)
        self.room_epoch += 1

    def hold(self, slots: Ids) -> None:
        """Let nobody else have slots while a copy reads them, whatever becomes of their chunks."""
        self._slots.hold(slots)

    def release(self, slots: Ids) -> None:
        """Undo ``hold``, once a copy."""
        if self._slots.release(slots):
            self.room_epoch += 1

    # -- writing --------------------------------------------------------------------------------

    def prepare_store(self, run: ChunkRun, ctx: ReqContext, limit: int | None = None) -> PrepareStoreOutput:
        gap = self._gap_of(run, ctx)
        evicted: PackedKeys = PackedKeys()
        wanted, refusal = 0, None
        if missing := gap.stop - gap.start:
            admitted = missing
            if ctx.policy is OffloadPolicy.CHUNK_LEVEL:
                admitted = self._admission.admitted(run.between(gap.start, gap.stop), ctx.request_id)
            wanted = admitted if limit is None else min(admitted, limit)
            if wanted < missing:
                refusal = Refusal.QUEUE_FULL if wanted < admitted else Refusal.BELOW_THRESHOLD
        if wanted:
            keys, stride = self._positions(run)[0], self.groups[run.group_index].stride
            self.catalog.recall(HOST, keys, gap.start * stride, (gap.start + wanted) * stride)
            # What is extended is pinned, hence not evicted to make room.
            arriving = Arriving(HOST, judged_as(ctx), gap.start * stride, stride)
            worth, evicted = self._make_room(arriving, wanted)
            if worth < wanted:
                wanted, refusal = worth, Refusal.BYPASSED
            if self._slots.free_count < wanted:
                wanted = self._slots.free_count
                refusal = Refusal.POOL_FULL if self._slots.capacity else Refusal.POOL_NOT_READY
        if gap.parent is not None or not wanted:
            self.catalog.unpin(gap.pin)
        refused = missing - wanted if refusal else 0
        stored = run.between(gap.start, gap.start + wanted)
        if not wanted:
            return PrepareStoreOutput(stored, NOTHING, evicted, refused, refusal)
        slots = self._slots.allocate(wanted, gap.slot_before)
        pin = None if gap.parent is not None else gap.pin
        self._pending.add(PendingStore(stored, slots, ctx.visit, gap.parent, pin))
        # Waiting for these chunks may now be an answer where there was none.
        self._changed()
        return PrepareStoreOutput(stored, CPULoadStoreSpec(slots, (wanted,)), evicted, refused, refusal)

    def _make_room(self, arriving: Arriving, wanted: int) -> tuple[int, PackedKeys]:
        """Let others go for chunks that come: see ``make_room``; tell also who left."""
        left: list[tuple[int, bytes]] = []

        def evict(slots: int, newcomer: Newcomer | None) -> int:
            gone = self._evict(slots - self._slots.free_count, newcomer)
            left.extend(gone.runs)
            return len(gone)

        ahead = self._slots.capacity // ROOM_WANTED if self._frees_ahead else 0
        worth = make_room(self.catalog, arriving, wanted, self._slots.free_count - ahead, evict)
        return worth, PackedKeys(tuple(left), self.catalog.tree.width) if left else PackedKeys()

    def _gap_of(self, run: ChunkRun, ctx: ReqContext) -> "_Gap":
        """Find the first missing chunks of a run, note its use and pin what they continue."""
        keys, _, stop = self._positions(run)
        group = run.group_index
        if self.groups[group].window is not None:
            self.catalog.touch(keys, stop, ctx.visit)
            start, end, _ = self._arrivals.absent(run)
            # Also what other groups hold beside it: a point that not all hold is none.
            known = self.catalog.tree.find(keys, end * self.groups[group].stride)[1]
            return _Gap(start, end, self.catalog.pin(keys, known))
        # The whole prefix has to be there, whatever the run begins with.
        ready, pin, before = self.catalog.begin_store(HOST, group, keys, run.stop, ctx.visit)
        known, parent = self._pending.follow(run, ready)
        if not run.start <= known < run.stop:
            return _Gap(known, known, pin)
        if parent is not None:
            before = parent.slots[known - 1 - parent.run.start]
        return _Gap(known, run.stop, pin, parent, before)

    def describe(self, run: ChunkRun, spec: CPULoadStoreSpec, content: ChunkContent) -> None:
        store = self._pending.get(spec.slots, run)
        if store is not None:
            store.content = content

    def complete_store(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext, success: bool) -> None:
        self.complete_part(run, spec, len(run) if success else 0)

    def complete_part(self, run: ChunkRun, spec: CPULoadStoreSpec, done_count: int) -> None:
        """Do what ``complete_store`` does, where only the first ``done_count`` chunks have come."""
        if self._arrivals.complete(run, spec.slots, done_count):
            self._changed()

    def abandon_store(self, run: ChunkRun, spec: CPULoadStoreSpec) -> None:
        if self._arrivals.abandon(run, spec.slots):
            self._changed()

    # -- the rest -------------------------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        self.generation += 1
        if self._with_events:
            self._tell_removed(self.catalog.names(HOST))
        self._arrivals.forget()
        self._policy.clear()
        self._remains += self.catalog.clear()
        self.catalog.reserve(self._slots.planned)
        pending = [np.frombuffer(store.slots, dtype=np.int32) for store in self._pending]
        self._slots.clear(np.concatenate((np.zeros(0, dtype=np.int32), *pending)))
        self._changed()
        self.room_epoch += 1

    def check_invariants(self, idle: bool) -> None:
        self.catalog.check_invariants()
        ready = self.catalog.all_slots(HOST)
        pending = [slot for store in self._pending for slot in store.slots]
        assert len(set(ready)) == len(ready), "a slot holds two chunks"
        assert not set(ready) & set(pending), "a slot is ready and on the way"
        self._slots.check_invariants({*ready, *pending})
        if idle:
            assert not self._loads, f"{len(self._loads)} loads are pinned and no job is open"
            assert not len(self._pending), f"{len(self._pending)} stores are pending and no job is open"

    # -- inside ---------------------------------------------------------------------------------

    def _positions(self, run: ChunkRun) -> tuple[Sequence[bytes], int, int]:
        return self._arrivals.positions(run)

    def _now_ready(self, store: PendingStore) -> None:
        self._metrics.add("stored_chunks", len(store.slots))
        if self._with_events:
            self._events.append(OffloadingEvent(store.run, Medium.HOST, removed=False, content=store.content))
        self.room_epoch += 1

    def _now_free(self, store: PendingStore) -> None:
        self._give_back(np.frombuffer(store.slots, dtype=np.int32))

    def _give_back(self, slots: np.ndarray) -> None:
        """Free slots that hold nothing any more; those that copies still read, when these have ended."""
        self._slots.give_back(slots)
        self.room_epoch += 1

    def _evict(self, wanted: int, newcomer: Newcomer | None = None) -> PackedKeys:
        """Free up to ``wanted`` slots, as many as may leave now."""
        if wanted <= 0:
            return PackedKeys()
        gone = self.catalog.evict(HOST, wanted, self._runs_left, newcomer)
        self._runs_left -= gone.run_count
        if not gone.count:
            return PackedKeys()
        self._give_back(np.concatenate(gone.slots))
        self._metrics.add("evicted_chunks", gone.count)
        self._changed()
        return self._tell_removed(gone.names)

    def _tell_removed(self, names: Sequence[tuple[int, bytes]]) -> PackedKeys:
        keys = PackedKeys(tuple(names), self.catalog.tree.width)
        if self._with_events and names:
            self._events.append(OffloadingEvent(keys, Medium.HOST, removed=True))
        return keys

    def _changed(self) -> None:
        self.residency_epoch += 1
