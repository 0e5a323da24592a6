"""The host tier: the six primitives over the slots of the pool.

Knows which chunk is in which slot, what is on its way and who reads what; does not know bytes, requests or
time. Where a prefix is, is the catalog's business; what is not ready yet is kept outside it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.errors import IllegalTransitionError, MissingChunkError
from kvtide.events import ChunkContent, OffloadingEvent
from kvtide.jobs import CPULoadStoreSpec, Ids, OffloadPolicy, ReqContext
from kvtide.keys import ChunkRun, Medium, PackedKeys
from kvtide.manager.base import LookupResult, OffloadingManager, PrepareStoreOutput, Refusal
from kvtide.manager.catalog import Catalog, CatalogGroup
from kvtide.manager.extents import Extent, ExtentAllocator
from kvtide.manager.pending import PendingStore, PendingStores
from kvtide.manager.reuse import ReuseFilter
from kvtide.metrics import MetricsDelta
from kvtide.policies import EvictionPolicy

HOST = 0
"""The tier's index in the catalog."""

RUNS_PER_STEP = 512
"""Runs evicted in one step at most: about two milliseconds. What did not fit is offered again."""

SLOTS_BEHIND_A_RUN = 32
"""Slots kept behind a run that grows: a session that decodes stores one chunk at a time."""

REMAINS_PER_STEP = 4
"""Dictionaries of a catalog that was reset that are freed in one step: a million keys are in 256 of them."""

ROOM_WANTED = 40
"""One slot in so many is freed ahead, when four fifths of that are left. A full pool hands out crumbs."""


NOTHING = CPULoadStoreSpec(array("i"), (0,))


@dataclass(slots=True)
class _Load:
    spec: CPULoadStoreSpec
    pin: int
    generation: int


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
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        admission: ReuseFilter | None = None,
        metrics: MetricsDelta | None = None,
        with_events: bool = False,
        groups: Sequence[CatalogGroup] = (CatalogGroup(),),
    ) -> None:
        self._policy = policy
        # An empty filter is false: ask for None.
        self._admission = ReuseFilter(1, 1) if admission is None else admission
        self._metrics = MetricsDelta() if metrics is None else metrics
        self._with_events = with_events
        self._groups = tuple(groups)
        self._catalog = Catalog(self._groups, (policy,))
        self._slots = ExtentAllocator(SLOTS_BEHIND_A_RUN)
        self._pending = PendingStores([group.window is not None for group in groups])
        self._loads: dict[int, _Load] = {}  # by the identity of the spec, which is kept with it
        self._readers = np.zeros(0, dtype=np.int32)  # open loads, per slot
        self._pinned_count = 0
        self._planned = 0
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
    def pinned_count(self) -> int:
        """Slots that open loads are reading."""
        return self._pinned_count

    def grow(self, capacity: int, planned: int = 0) -> None:
        """Use more slots, as the pool reports them ready.

        Args:
            capacity: Slots that can be used now.
            planned: Slots there will be.
        """
        if capacity > self._slots.capacity:
            self._slots.grow(capacity)
            self._planned = max(capacity, planned, self._planned)
            self._catalog.reserve(self._planned)
            if capacity > len(self._readers):
                readers = np.zeros(self._planned, dtype=np.int32)
                readers[: len(self._readers)] = self._readers
                self._readers = readers
            self._policy.resize(capacity)
            self.room_epoch += 1

    def keep_room(self) -> None:
        """Free a few slots ahead, in large pieces, so that what is stored next lies together."""
        free, capacity = self._slots.free_count, self._slots.capacity
        if free < 4 * capacity // (5 * ROOM_WANTED):
            self._evict(capacity // ROOM_WANTED - free)
        if not self._runs_left:
            self.room_epoch += 1
        del self._remains[-REMAINS_PER_STEP:]
        self._runs_left = RUNS_PER_STEP

    # -- reading --------------------------------------------------------------------------------

    def lookup(self, run: ChunkRun, ctx: ReqContext) -> LookupResult:
        stride = self._groups[run.group_index].stride
        as_they_are = run.hashes_per_chunk == stride and not run.lookahead
        keys = run.block_hashes if as_they_are else run.positions(stride)[0]
        ready = self._catalog.resident(run.group_index, keys, run.start, run.stop)
        later = False
        if len(self._pending) and ready < len(run):
            missing = first = run.start + ready
            if not ready and self._groups[run.group_index].window is None:
                # The store that brings it may begin above the run.
                first = self._catalog.resident(run.group_index, keys, 0, missing)
            later = self._pending.follow(run, first)[0] > missing
        return LookupResult(ready, later)

    def known_count(self, run: ChunkRun) -> int:
        keys, _, _ = self._positions(run)
        return self._pending.follow(run, self._catalog.resident(run.group_index, keys, 0, run.stop))[0]

    def restore_point(self, run: ChunkRun) -> int:
        keys, _, stop = self._positions(run)
        point = self._catalog.restore_point(keys, stop)
        return point // self._groups[run.group_index].stride

    def prepare_load(self, run: ChunkRun, ctx: ReqContext) -> CPULoadStoreSpec:
        keys, _, stop = self._positions(run)
        slots = self._catalog.slots(HOST, run.group_index, keys, run.start, run.stop)
        if len(slots) < len(run) or (len(slots) and slots.min() < 0):
            missing = run.start + (int(slots.argmin()) if len(slots) == len(run) else len(slots))
            raise MissingChunkError(
                f"chunk {missing} of request {ctx.request_id} ({run.hash_of(missing).hex()})"
                " was ready when it was looked up and is not any more"
            )
        spec = CPULoadStoreSpec(_packed(slots), (len(slots),))
        self._loads[id(spec)] = _Load(spec, self._catalog.pin(keys, stop), self.generation)
        self._readers[slots] += 1
        self._pinned_count += int(np.count_nonzero(self._readers[slots] == 1))
        return spec

    def touch(self, run: ChunkRun, ctx: ReqContext) -> None:
        keys, _, stop = self._positions(run)
        self._catalog.touch(keys, stop, ctx.visit)

    def complete_load(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext) -> None:
        load = self._loads.pop(id(spec), None)
        if load is None:
            raise IllegalTransitionError(
                f"slot {next(iter(spec.slots), None)} is not pinned (request {ctx.request_id})"
            )
        slots = np.frombuffer(spec.slots, dtype=np.int32)
        self._readers[slots] -= 1
        unread = slots[self._readers[slots] == 0]
        self._pinned_count -= len(unread)
        if load.generation == self.generation:
            self._catalog.unpin(load.pin)
        else:
            self._slots.free_all(unread)
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
            keys, stride = self._positions(run)[0], self._groups[run.group_index].stride
            self._catalog.recall(HOST, keys, gap.start * stride, (gap.start + wanted) * stride)
            # What is extended is pinned, hence not evicted to make room.
            evicted = self._evict(wanted - self._slots.free_count)
            if self._slots.free_count < wanted:
                wanted = self._slots.free_count
                refusal = Refusal.POOL_FULL if self._slots.capacity else Refusal.POOL_NOT_READY
        if gap.parent is not None or not wanted:
            self._catalog.unpin(gap.pin)
        refused = missing - wanted if refusal else 0
        stored = run.between(gap.start, gap.start + wanted)
        if not wanted:
            return PrepareStoreOutput(stored, NOTHING, evicted, refused, refusal)
        slots = _ids_of(self._slots.allocate(wanted, gap.slot_before))
        pin = None if gap.parent is not None else gap.pin
        self._pending.add(PendingStore(stored, slots, ctx.visit, gap.parent, pin))
        # Waiting for these chunks may now be an answer where there was none.
        self._changed()
        return PrepareStoreOutput(stored, CPULoadStoreSpec(slots, (wanted,)), evicted, refused, refusal)

    def _gap_of(self, run: ChunkRun, ctx: ReqContext) -> "_Gap":
        """Find the first missing chunks of a run, note its use and pin what they continue."""
        keys, _, stop = self._positions(run)
        group = run.group_index
        if self._groups[group].window is not None:
            self._catalog.touch(keys, stop, ctx.visit)
            start, end = self._absent(run)
            # Also what other groups hold beside it: a point that not all hold is none.
            known = self._catalog.tree.find(keys, end * self._groups[group].stride)[1]
            return _Gap(start, end, self._catalog.pin(keys, known))
        # The whole prefix has to be there, whatever the run begins with.
        ready, pin, before = self._catalog.begin_store(HOST, group, keys, run.stop, ctx.visit)
        known, parent = self._pending.follow(run, ready)
        if not run.start <= known < run.stop:
            return _Gap(known, known, pin)
        if parent is not None:
            before = parent.slots[known - 1 - parent.run.start]
        return _Gap(known, run.stop, pin, parent, before)

    def _absent(self, run: ChunkRun) -> tuple[int, int]:
        """Find the first chunks in a row of a windowed run that are neither there nor on their way."""
        keys, _, _ = self._positions(run)
        slots = self._catalog.slots(HOST, run.group_index, keys, run.start, run.stop)
        there = np.zeros(len(run), dtype=bool)
        there[: len(slots)] = slots >= 0
        for index in range(len(run)):
            there[index] |= self._pending.begins_at(run, run.start + index) is not None
        if there.all():
            return run.stop, run.stop
        start = int(there.argmin())
        behind = there[start:]
        return run.start + start, run.start + start + (int(behind.argmax()) if behind.any() else len(behind))

    def describe(self, run: ChunkRun, spec: CPULoadStoreSpec, content: ChunkContent) -> None:
        store = self._pending.get(spec.slots, run)
        if store is not None:
            store.content = content

    def complete_store(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext, success: bool) -> None:
        store = self._pending.get(spec.slots, run)
        if store is None or store.copied:
            return
        store.copied = True
        if store.doomed:
            self._free(store)
        elif success and store.intact:
            self._settle(store)
        else:
            self._doom(store)

    def abandon_store(self, run: ChunkRun, spec: CPULoadStoreSpec) -> None:
        store = self._pending.get(spec.slots, run)
        if store is not None and not store.copied and not store.doomed:
            self._doom(store)

    # -- the rest -------------------------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        self.generation += 1
        if self._with_events:
            self._tell_removed(self._catalog.names(HOST))
        for store in self._pending:
            self._forget(store)
        self._policy.clear()
        self._remains += self._catalog.tree.surrender()
        self._catalog = Catalog(self._groups, (self._policy,))
        self._catalog.reserve(self._planned)
        held = [np.frombuffer(store.slots, dtype=np.int32) for store in self._pending]
        self._slots.clear(np.concatenate((*held, np.flatnonzero(self._readers))))
        self._changed()
        self.room_epoch += 1

    def check_invariants(self, idle: bool) -> None:
        self._catalog.check_invariants()
        ready = self._catalog.all_slots(HOST)
        pending = [slot for store in self._pending for slot in store.slots]
        read = set(np.flatnonzero(self._readers).tolist())
        held = {*ready, *pending, *read}
        free = self._slots.free_count
        assert len(set(ready)) == len(ready), "a slot holds two chunks"
        assert not set(ready) & set(pending), "a slot is ready and on the way"
        assert free + len(held) == self._slots.capacity, f"{free} free + {len(held)} held != {self.capacity}"
        assert len(read) == self._pinned_count, f"{len(read)} slots are read, {self._pinned_count} counted"
        pins = sum(load.generation == self.generation for load in self._loads.values())
        pins += sum(store.pin is not None for store in self._pending)
        assert pins >= self._catalog.pin_count, f"{self._catalog.pin_count} pins, {pins} wanted"
        if idle:
            assert not self._loads, f"{len(self._loads)} loads are pinned and no job is open"
            assert not len(self._pending), f"{len(self._pending)} stores are pending and no job is open"

    # -- inside ---------------------------------------------------------------------------------

    def _positions(self, run: ChunkRun) -> tuple[Sequence[bytes], int, int]:
        return run.positions(self._groups[run.group_index].stride)

    def _settle(self, store: PendingStore) -> None:
        """Make a copied store ready, and the stores that waited for it."""
        ready = [store]
        while ready:
            store = ready.pop()
            if store.parent is not None:
                continue
            run = store.run
            keys, _, _ = self._positions(run)
            slots = np.frombuffer(store.slots, dtype=np.int32)
            self._catalog.insert(HOST, run.group_index, keys, run.start, slots, store.visit)
            for child in store.children:
                keys, begin, _ = self._positions(child.run)
                child.parent, child.pin = None, self._catalog.pin(keys, begin)
                if child.copied:
                    ready.append(child)
            if store.pin is not None:
                self._catalog.unpin(store.pin)
            self._pending.remove(store)
            self._metrics.add("stored_chunks", len(store.slots))
            if self._with_events:
                self._events.append(OffloadingEvent(run, Medium.HOST, removed=False, content=store.content))
        self._changed()
        self.room_epoch += 1

    def _doom(self, store: PendingStore) -> None:
        """Forget a failed store and everything that is pending on it."""
        if store.parent is not None:
            store.parent.children.remove(store)
        doomed = [store]
        while doomed:
            store = doomed.pop()
            doomed += store.children
            if store.pin is not None:
                self._catalog.unpin(store.pin)
            self._forget(store)
        self._changed()

    def _forget(self, store: PendingStore) -> None:
        """Nobody finds a pending store any more; its slots are freed when its copy has ended."""
        if not store.doomed:
            self._pending.forget_name(store)
        store.doomed, store.pin, store.parent, store.children = True, None, None, []
        if store.copied:
            self._free(store)

    def _free(self, store: PendingStore) -> None:
        self._pending.remove(store)
        self._slots.free_all(np.frombuffer(store.slots, dtype=np.int32))
        self.room_epoch += 1

    def _evict(self, wanted: int) -> PackedKeys:
        """Free up to ``wanted`` slots, as many as may leave now."""
        if wanted <= 0:
            return PackedKeys()
        gone = self._catalog.evict(HOST, wanted, self._runs_left)
        self._runs_left -= gone.run_count
        if not gone.count:
            return PackedKeys()
        self._slots.free_all(np.concatenate(gone.slots))
        self._metrics.add("evicted_chunks", gone.count)
        self._changed()
        self.room_epoch += 1
        return self._tell_removed(gone.names)

    def _tell_removed(self, names: Sequence[tuple[int, bytes]]) -> PackedKeys:
        keys = PackedKeys(tuple(names), self._catalog.tree.width)
        if self._with_events and names:
            self._events.append(OffloadingEvent(keys, Medium.HOST, removed=True))
        return keys

    def _changed(self) -> None:
        self.residency_epoch += 1


def _ids_of(extents: Sequence[Extent]) -> Ids:
    if len(extents) == 1 and extents[0][1] == 1:
        return array("i", (extents[0][0],))
    return _packed(
        np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in extents])
    )


def _packed(numbers: np.ndarray) -> Ids:
    found = array("i")
    found.frombytes(numbers.tobytes())
    return found
