"""The host tier chunk by chunk: a model of the six primitives that is slow, and meant to be obviously right.

Knows chunks by the hash of their prefix, in dicts and lists, of one full-attention group. Takes from the
tier under test what is free to choose, which slots, and never asks it anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.base import LookupResult, Refusal
from kvtide.testing.naive_policies import Chunk, NaivePolicy

ROOM_WANTED = 40


@dataclass(slots=True, eq=False)
class NaiveStore:
    """A store that is under way: ``prefix[start:]``."""

    prefix: list[Chunk]
    start: int
    visit: int
    parent: "NaiveStore | None"
    slots: list[int] = field(default_factory=list)
    copied: bool = False
    doomed: bool = False

    @property
    def chunks(self) -> list[Chunk]:
        """What it stores."""
        return self.prefix[self.start :]


@dataclass(slots=True, eq=False)
class NaiveLoad:
    """A load that is under way; all of ``prefix`` has to stay."""

    prefix: list[Chunk]
    slots: list[int]
    generation: int


@dataclass(slots=True)
class NaiveOffer:
    """What ``prepare_store`` should answer."""

    start: int
    stop: int
    evicted: list[Chunk]
    refused_count: int
    refusal: Refusal | None
    store: NaiveStore | None


class NaiveHost:
    """Residency, pins and pending stores of the host tier.

    Args:
        policy: Who leaves.
        threshold: Offers of different requests until a chunk is admitted.
    """

    def __init__(self, policy: NaivePolicy, threshold: int = 1) -> None:
        self.policy = policy
        self.capacity = 0
        self.generation = 0
        self.ready: dict[Chunk, int] = {}
        self.parent: dict[Chunk, Chunk | None] = {}  # of every chunk ever seen
        self.stores: list[NaiveStore] = []
        self.loads: list[NaiveLoad] = []
        self._threshold = threshold
        self._offers: dict[Chunk, set[str]] = {}

    @property
    def taken(self) -> set[int]:
        """Slots that nobody else may get."""
        slots = set(self.ready.values())
        for held in [*(store.slots for store in self.stores), *(load.slots for load in self.loads)]:
            slots.update(held)
        return slots

    @property
    def free_count(self) -> int:
        """Slots that anybody may get."""
        return self.capacity - len(self.taken)

    def grow(self, capacity: int) -> None:
        """Have more slots."""
        self.capacity = max(self.capacity, capacity)
        self.policy.resize(self.capacity)

    def lookup(self, run: ChunkRun) -> LookupResult:
        """See ``OffloadingManager.lookup``."""
        prefix = self._prefix(run)
        ready = run.start
        while ready < run.stop and prefix[ready] in self.ready:
            ready += 1
        later = ready < run.stop and self._store_with(prefix[ready]) is not None
        return LookupResult(ready - run.start, later)

    def touch(self, run: ChunkRun, visit: int) -> None:
        """See ``OffloadingManager.touch``."""
        self._touch(self._prefix(run), visit)

    def load(self, run: ChunkRun) -> NaiveLoad:
        """Begin to read chunks that are ready."""
        prefix = self._prefix(run)
        slots = [self.ready[chunk] for chunk in prefix[run.start :]]
        self.loads.append(NaiveLoad(prefix, slots, self.generation))
        return self.loads[-1]

    def end_load(self, load: NaiveLoad) -> None:
        """End it."""
        self.loads.remove(load)

    def offer(self, run: ChunkRun, ctx: ReqContext, limit: int | None = None) -> NaiveOffer:
        """See ``OffloadingManager.prepare_store``; the slots are to be noted in the store that it gives."""
        prefix = self._prefix(run)
        self._touch(prefix, ctx.visit)
        known = 0
        while known < run.stop and (prefix[known] in self.ready or self._store_with(prefix[known])):
            known += 1
        if known < run.start or known >= run.stop:
            return NaiveOffer(known, known, [], 0, None, None)
        missing, refusal = run.stop - known, None
        wanted = self._admitted(prefix[known:], ctx.request_id)
        if wanted < missing:
            refusal = Refusal.BELOW_THRESHOLD
        if limit is not None and limit < wanted:
            wanted, refusal = limit, Refusal.QUEUE_FULL
        remembered = self.policy.remembered()
        again = [chunk for chunk in reversed(prefix[known : known + wanted]) if chunk in remembered]
        self.policy.asked_again(again)
        before = prefix[known - 1] if known else None
        evicted = self.evict(wanted - self.free_count, keep=before if wanted else None)
        fitting = min(wanted, self.free_count)
        if fitting < wanted:
            refusal = Refusal.POOL_FULL if self.capacity else Refusal.POOL_NOT_READY
        if not fitting:
            return NaiveOffer(known, known, evicted, missing, refusal, None)
        parent = self._store_with(before) if before is not None else None
        store = NaiveStore(prefix[: known + fitting], known, ctx.visit, parent)
        self.stores.append(store)
        return NaiveOffer(known, known + fitting, evicted, missing - fitting, refusal, store)

    def copied(self, store: NaiveStore) -> list[NaiveStore]:
        """Note that the bytes are in place: list the stores that can become ready now, to be ``settle``d."""
        store.copied = True
        if store.doomed:
            self.stores.remove(store)
        return self.settled()

    def settled(self) -> list[NaiveStore]:
        """List the stores whose bytes, and whose parents, are in place."""
        return [one for one in self.stores if one.copied and not one.doomed and one.parent is None]

    def settle(self, store: NaiveStore) -> None:
        """Make one of them ready."""
        self.stores.remove(store)
        for other in self.stores:
            if other.parent is store:
                other.parent = None
        for depth, (chunk, slot) in enumerate(zip(store.chunks, store.slots, strict=True), store.start):
            self.ready[chunk] = slot
            self.policy.arrived(chunk, store.visit, depth)
        self._touch(store.prefix, store.visit)
        self.policy.forget(self._name_extended)

    def fail(self, store: NaiveStore) -> None:
        """End a store that failed, and forget what is pending on it."""
        store.copied = True
        doomed = [store]
        while doomed:
            one = doomed.pop()
            doomed += [other for other in self.stores if other.parent is one]
            one.doomed, one.parent = True, None
            if one.copied:
                self.stores.remove(one)

    def evict(self, count: int, keep: Chunk | None = None) -> list[Chunk]:
        """Let up to ``count`` chunks go; list them."""
        gone: list[Chunk] = []
        kept = {chunk for load in self.loads if load.generation == self.generation for chunk in load.prefix}
        kept.add(keep) if keep is not None else None
        while len(gone) < count:
            extended = {self.parent[chunk] for chunk in self._coming()} | {
                self.parent[chunk] for chunk in self.ready
            }
            chunk = self.policy.victim(lambda one: one not in extended and one not in kept)  # noqa: B023
            if chunk is None:
                break
            del self.ready[chunk]
            self.policy.left(chunk)
            gone.append(chunk)
        if count > 0:
            self.policy.forget(self._name_extended)
        return gone

    def keep_room(self) -> list[Chunk]:
        """See ``OffloadingManager.keep_room``."""
        if self.free_count < 4 * self.capacity // (5 * ROOM_WANTED):
            return self.evict(self.capacity // ROOM_WANTED - self.free_count)
        return []

    def reset(self) -> None:
        """See ``OffloadingManager.reset``."""
        self.generation += 1
        self.ready = {}
        for store in self.stores:
            store.doomed, store.parent = True, None
        self.stores = [store for store in self.stores if not store.copied]
        self.policy.clear()

    # -- inside ---------------------------------------------------------------------------------

    def _prefix(self, run: ChunkRun) -> list[Chunk]:
        prefix = [run.hash_of(index) for index in range(run.stop)]
        self.parent.update(zip(prefix, (None, *prefix), strict=False))
        return prefix

    def _coming(self) -> list[Chunk]:
        return [chunk for store in self.stores if not store.doomed for chunk in store.chunks]

    def _store_with(self, chunk: Chunk) -> NaiveStore | None:
        return next((store for store in self.stores if not store.doomed and chunk in store.chunks), None)

    def _touch(self, prefix: Sequence[Chunk], visit: int) -> None:
        for chunk in reversed(prefix):
            if chunk in self.ready:
                self.policy.used(chunk, visit)

    def _name_extended(self, name: Chunk) -> bool:
        known = (*self.ready, *self.policy.remembered())
        return any(self.parent[chunk] == name for chunk in known)

    def _admitted(self, chunks: Sequence[Chunk], request_id: str) -> int:
        if self._threshold <= 1:
            return len(chunks)
        for chunk in chunks:
            self._offers.setdefault(chunk, set()).add(request_id)
        admitted = [len(self._offers[chunk]) >= self._threshold for chunk in chunks]
        return admitted.index(False) if False in admitted else len(chunks)
