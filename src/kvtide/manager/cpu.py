"""The host tier: which chunk is in which slot of the pool.

A chunk's id is its slot. Knows slots, prefixes, pins and what is pending; does not know bytes, requests
or time. The structure is a plain one, a dictionary entry per chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtide.errors import IllegalTransitionError, MissingChunkError
from kvtide.events import ChunkContent, OffloadingEvent
from kvtide.jobs import CPULoadStoreSpec, ReqContext
from kvtide.keys import ChunkRun, Medium, OffloadKey, make_offload_key
from kvtide.manager.base import LookupResult, OffloadingManager, PrepareStoreOutput, Refusal
from kvtide.manager.reuse import ReuseFilter
from kvtide.manager.slots import SlotAllocator
from kvtide.metrics import MetricsDelta
from kvtide.policies import EvictionPolicy


class _State(Enum):
    PENDING = auto()  # a copy into the slot is under way, or its parent is not ready yet
    READY = auto()
    FORGOTTEN = auto()  # no longer in the index; the slot is freed when the last copy has ended


@dataclass(slots=True)
class _Chunk:
    name: tuple[int, bytes]  # group index, hash
    parent: int | None
    state: _State = _State.PENDING
    pins: int = 0
    kids: int = 0


@dataclass(slots=True)
class _PendingStore:
    run: ChunkRun
    slots: tuple[int, ...]
    parent: int | None
    copied: bool = False
    content: ChunkContent | None = None


class CPUOffloadingManager(OffloadingManager):
    """Slots, reference counts, policy and events of the host pool.

    Args:
        policy: Who leaves.
        admission: What is worth storing.
        metrics: Where to count.
        with_events: Whether anyone listens.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        admission: ReuseFilter | None = None,
        metrics: MetricsDelta | None = None,
        with_events: bool = False,
    ) -> None:
        self._policy = policy
        # An empty filter is false: ask for None.
        self._admission = ReuseFilter(1, 1) if admission is None else admission
        self._metrics = MetricsDelta() if metrics is None else metrics
        self._with_events = with_events
        self._slots = SlotAllocator()
        self._index: dict[tuple[int, bytes], int] = {}
        self._chunks: dict[int, _Chunk] = {}
        self._pending: dict[int, _PendingStore] = {}  # by first slot
        self._waiting: dict[int, list[int]] = {}  # slot of a pending parent -> first slots of its children
        self._pinned_count = 0
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

    def grow(self, capacity: int) -> None:
        """Use more slots, as the pool reports them ready."""
        if capacity > self._slots.capacity:
            self._slots.grow(capacity)
            self.room_epoch += 1

    # -- reading --------------------------------------------------------------------------------

    def lookup(self, run: ChunkRun, ctx: ReqContext) -> LookupResult:
        ready = self._leading(run, ready_only=True)
        later = ready < len(run) and self._find(run, run.start + ready) is not None
        return LookupResult(ready, later)

    def prepare_load(self, run: ChunkRun, ctx: ReqContext) -> CPULoadStoreSpec:
        slots: list[int] = []
        for chunk_index in range(run.start, run.stop):
            slot = self._find(run, chunk_index)
            if slot is None or self._chunks[slot].state is not _State.READY:
                raise MissingChunkError(
                    f"chunk {chunk_index} of request {ctx.request_id} ({run.hash_of(chunk_index).hex()})"
                    " was ready when it was looked up and is not any more"
                )
            slots.append(slot)
        for slot in slots:
            self._pin(slot)
        return CPULoadStoreSpec(tuple(slots), (len(slots),))

    def touch(self, run: ChunkRun, ctx: ReqContext) -> None:
        known = self._leading(run)
        names = self._index
        self._policy.touched(names[run.group_index, h] for h in run[:known].hashes())

    def complete_load(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext) -> None:
        for slot in spec.slots:
            chunk = self._chunks.get(slot)
            if chunk is None or not chunk.pins:
                raise IllegalTransitionError(f"slot {slot} is not pinned (request {ctx.request_id})")
        for slot in spec.slots:
            self._unpin(slot)

    # -- writing --------------------------------------------------------------------------------

    def prepare_store(self, run: ChunkRun, ctx: ReqContext, limit: int | None = None) -> PrepareStoreOutput:
        known = self._leading(run)
        missing = run[known:]
        parent = self._find(run, missing.start - 1) if missing.start else None
        if not missing or (missing.start and parent is None):
            return PrepareStoreOutput(missing[:0], CPULoadStoreSpec((), (0,)))
        hashes = missing.hashes()
        admitted = self._admission.admitted(hashes, ctx.request_id)
        refusal = Refusal.BELOW_THRESHOLD if admitted < len(hashes) else None
        wanted = admitted if limit is None else min(admitted, limit)
        if wanted < admitted:
            refusal = Refusal.QUEUE_FULL
        evicted, fitting = self._make_room(wanted, parent)
        if fitting < wanted:
            refusal = Refusal.POOL_FULL if self._slots.capacity else Refusal.POOL_NOT_READY
        slots = tuple(self._slots.allocate(fitting, after=parent)) if fitting else ()
        stored = missing[:fitting].frozen() if fitting else missing[:0]
        if slots:
            self._insert(stored, hashes, slots, parent)
        return PrepareStoreOutput(
            stored, CPULoadStoreSpec(slots, (fitting,)), evicted, len(hashes) - fitting, refusal
        )

    def describe(self, spec: CPULoadStoreSpec, content: ChunkContent) -> None:
        self._pending[spec.slots[0]].content = content

    def complete_store(self, run: ChunkRun, spec: CPULoadStoreSpec, ctx: ReqContext, success: bool) -> None:
        store = self._pending.get(spec.slots[0]) if spec.slots else None
        # A slot may have a new owner by now: only the very run that was prepared can be completed.
        if store is None or store.copied or store.run is not run:
            return
        store.copied = True
        if self._chunks[store.slots[0]].state is _State.FORGOTTEN:
            self._drop_copied(store)
        elif success:
            self._settle(store)
        else:
            self._forget_store(store)

    # -- the rest -------------------------------------------------------------------------------

    def take_events(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        self.generation += 1
        if self._with_events and self._index:
            gone = tuple(
                make_offload_key(h, g) for (g, h), slot in self._index.items() if self._is_ready(slot)
            )
            self._events.append(OffloadingEvent(gone, Medium.HOST, removed=True))
        for slot in list(self._index.values()):
            self._forget(slot)
        for store in list(self._pending.values()):
            if store.copied:
                self._drop_copied(store)
        self._waiting.clear()
        self._changed()
        self.room_epoch += 1

    def check_invariants(self, idle: bool) -> None:
        free, held = self._slots.free_count, len(self._chunks)
        assert free + held == self._slots.capacity, f"{free} free + {held} held != {self._slots.capacity}"
        assert len(set(self._index.values())) == len(self._index), "a slot is indexed twice"
        kids: dict[int, int] = {}
        for name, slot in self._index.items():
            chunk = self._chunks[slot]
            assert chunk.name == name, f"slot {slot} is indexed under another name"
            assert chunk.state is not _State.FORGOTTEN, f"slot {slot} is forgotten and indexed"
            if chunk.parent is not None:
                kids[chunk.parent] = kids.get(chunk.parent, 0) + 1
                parent = self._chunks[chunk.parent]
                assert parent.name in self._index, f"slot {slot} has lost its parent"
                assert chunk.state is not _State.READY or parent.state is _State.READY, f"slot {slot}: orphan"
        for slot, chunk in self._chunks.items():
            assert chunk.kids == kids.get(slot, 0), (
                f"slot {slot}: {chunk.kids} kids, {kids.get(slot, 0)} found"
            )
        pins = sum(chunk.pins > 0 for chunk in self._chunks.values())
        assert pins == self._pinned_count, f"{pins} slots are pinned, {self._pinned_count} counted"
        if idle:
            assert not pins, f"{pins} slots are pinned and no job is open"
            assert not self._pending, f"{len(self._pending)} stores are pending and no job is open"
            forgotten = [s for s, c in self._chunks.items() if c.state is _State.FORGOTTEN]
            assert not forgotten, f"slots {forgotten} are forgotten and not free"

    # -- finding --------------------------------------------------------------------------------

    def _find(self, run: ChunkRun, chunk_index: int) -> int | None:
        return self._index.get((run.group_index, run.hash_of(chunk_index)))

    def _is_ready(self, slot: int) -> bool:
        return self._chunks[slot].state is _State.READY

    def _leading(self, run: ChunkRun, ready_only: bool = False) -> int:
        """Count the leading chunks that are known (or ready): closed under parents, hence monotone."""
        low, high = 0, len(run)
        while low < high:
            middle = (low + high) // 2
            slot = self._find(run, run.start + middle)
            if slot is not None and (not ready_only or self._is_ready(slot)):
                low = middle + 1
            else:
                high = middle
        return low

    # -- changing -------------------------------------------------------------------------------

    def _insert(
        self, run: ChunkRun, hashes: Sequence[bytes], slots: tuple[int, ...], parent: int | None
    ) -> None:
        above = parent
        for block_hash, slot in zip(hashes, slots, strict=False):
            name = (run.group_index, block_hash)
            self._chunks[slot] = _Chunk(name, above)
            self._index[name] = slot
            if above is not None:
                self._chunks[above].kids += 1
            above = slot
        if parent is not None:
            self._policy.withdraw(parent)
            if not self._is_ready(parent):
                self._waiting.setdefault(parent, []).append(slots[0])
        self._policy.touched(slots)
        self._pending[slots[0]] = _PendingStore(run, slots, parent)
        # Waiting for these chunks may now be an answer where there was none.
        self._changed()

    def _settle(self, store: _PendingStore) -> None:
        """Make a copied store ready, and the stores that waited for it."""
        ready = [store]
        while ready:
            store = ready.pop()
            parent = self._chunks[store.slots[0]].parent
            if parent is not None and not self._is_ready(parent):
                continue
            del self._pending[store.slots[0]]
            for slot in store.slots:
                self._chunks[slot].state = _State.READY
                self._offer_if_free(slot)
            self._metrics.add("stored_chunks", len(store.slots))
            if self._with_events:
                self._events.append(
                    OffloadingEvent(store.run, Medium.HOST, removed=False, content=store.content)
                )
            for slot in store.slots:
                for first in self._waiting.pop(slot, ()):
                    if self._pending[first].copied:
                        ready.append(self._pending[first])
        self._changed()
        self.room_epoch += 1

    def _forget_store(self, store: _PendingStore) -> None:
        """Forget a failed store and everything that is pending on it."""
        doomed = [store]
        while doomed:
            store = doomed.pop()
            if self._chunks[store.slots[0]].state is _State.FORGOTTEN:
                continue
            if store.parent in self._waiting:
                self._waiting[store.parent].remove(store.slots[0])
            for slot in store.slots:
                doomed += [self._pending[first] for first in self._waiting.pop(slot, ())]
            for slot in store.slots:
                self._forget(slot)
            if store.copied:
                self._drop_copied(store)
        self._changed()

    def _drop_copied(self, store: _PendingStore) -> None:
        """Free the slots of a forgotten store whose copy has ended."""
        if self._pending.pop(store.slots[0], None) is None:
            return
        for slot in store.slots:
            del self._chunks[slot]
        self._slots.free(store.slots)
        self.room_epoch += 1

    def _forget(self, slot: int) -> None:
        """Take a chunk out of the index; its slot stays while a copy touches it."""
        chunk = self._chunks[slot]
        del self._index[chunk.name]
        self._policy.forget(slot)
        was_pending = chunk.state is _State.PENDING
        chunk.state = _State.FORGOTTEN
        if chunk.parent is not None and (parent := self._chunks.get(chunk.parent)) is not None:
            parent.kids -= 1
            self._offer_if_free(chunk.parent)
        chunk.parent = None
        if not was_pending and not chunk.pins:
            self._release(slot)

    def _release(self, slot: int) -> None:
        del self._chunks[slot]
        self._slots.free((slot,))

    def _pin(self, slot: int) -> None:
        chunk = self._chunks[slot]
        chunk.pins += 1
        if chunk.pins == 1:
            self._pinned_count += 1
            self._policy.withdraw(slot)

    def _unpin(self, slot: int) -> None:
        chunk = self._chunks[slot]
        chunk.pins -= 1
        if chunk.pins:
            return
        self._pinned_count -= 1
        self.room_epoch += 1
        if chunk.state is _State.FORGOTTEN:
            self._release(slot)
        else:
            self._offer_if_free(slot)

    def _offer_if_free(self, slot: int) -> None:
        chunk = self._chunks[slot]
        if chunk.state is _State.READY and not chunk.pins and not chunk.kids:
            self._policy.offer(slot)

    def _make_room(self, wanted: int, parent: int | None) -> tuple[tuple[OffloadKey, ...], int]:
        """Evict until ``wanted`` slots are free or nothing may leave; never the prefix that is extended."""
        if self._slots.free_count >= wanted:
            return (), wanted
        if parent is not None:
            self._policy.withdraw(parent)
        evicted: list[OffloadKey] = []
        while self._slots.free_count < wanted and (slot := self._policy.victim()) is not None:
            group_index, block_hash = self._chunks[slot].name
            evicted.append(make_offload_key(block_hash, group_index))
            self._forget(slot)
        if parent is not None:
            self._offer_if_free(parent)
        if evicted:
            self._metrics.add("evicted_chunks", len(evicted))
            self._changed()
            if self._with_events:
                self._events.append(OffloadingEvent(tuple(evicted), Medium.HOST, removed=True))
        return tuple(evicted), min(wanted, self._slots.free_count)

    def _changed(self) -> None:
        self.residency_epoch += 1
