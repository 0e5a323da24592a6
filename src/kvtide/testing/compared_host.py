"""The host tier and its naive model, driven together: every answer and every victim is compared.

Knows both and believes neither; any difference is an ``AssertionError`` that says where.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.events import OffloadingEvent
from kvtide.jobs import CPULoadStoreSpec, ReqContext
from kvtide.keys import ChunkRun, make_offload_key
from kvtide.manager.base import LookupResult, PrepareStoreOutput
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.reuse import ReuseFilter
from kvtide.policies import EvictionPolicy
from kvtide.testing.naive_host import NaiveHost, NaiveLoad, NaiveStore
from kvtide.testing.naive_policies import Chunk, NaivePolicy


@dataclass(slots=True, eq=False)
class Storing:
    """A store that both have begun."""

    output: PrepareStoreOutput
    naive: NaiveStore
    ctx: ReqContext


@dataclass(slots=True, eq=False)
class Loading:
    """A load that both have begun."""

    run: ChunkRun
    spec: CPULoadStoreSpec
    naive: NaiveLoad


class ComparedHost:
    """Both tiers under one roof.

    Args:
        policy: The one under test.
        oracle: What it should do.
        threshold: Of admission.

    Attributes:
        manager: The production tier, with events.
        naive: Its model.
        storing: Stores that have not ended.
        loading: Loads that have not ended.
        evicted: Every victim so far, in order.
    """

    def __init__(self, policy: EvictionPolicy, oracle: NaivePolicy, threshold: int = 1) -> None:
        self.manager = CPUOffloadingManager(policy, ReuseFilter(threshold, 1 << 20), with_events=True)
        self.naive = NaiveHost(oracle, threshold)
        self.storing: list[Storing] = []
        self.loading: list[Loading] = []
        self.evicted: list[Chunk] = []
        self._done: list[Storing] = []

    def grow(self, capacity: int) -> None:
        """Have more slots."""
        self.manager.grow(capacity)
        self.naive.grow(capacity)

    def lookup(self, run: ChunkRun, ctx: ReqContext) -> LookupResult:
        """Ask both."""
        before = self.manager.residency_epoch
        found, expected = self.manager.lookup(run, ctx), self.naive.lookup(run)
        assert found == expected, f"{run}: {found}, should be {expected}"
        assert self.manager.residency_epoch == before, "a lookup changed something"
        return found

    def touch(self, run: ChunkRun, ctx: ReqContext) -> None:
        """Use a prefix."""
        self.manager.touch(run, ctx)
        self.naive.touch(run, ctx.visit)

    def store(self, run: ChunkRun, ctx: ReqContext, limit: int | None = None) -> Storing | None:
        """Begin a store; None when neither stores anything."""
        output, expected = self.manager.prepare_store(run, ctx, limit), self.naive.offer(run, ctx, limit)
        self._compare_removed(expected.evicted)
        assert tuple(output.evicted_keys) == tuple(make_offload_key(chunk, 0) for chunk in expected.evicted)
        assert (output.refused_count, output.refusal) == (expected.refused_count, expected.refusal)
        stored = output.keys_to_store
        assert len(stored) == expected.stop - expected.start, (
            f"{stored} is stored, {expected.start} to {expected.stop} should be"
        )
        assert len(output.store_spec.slots) == len(stored)
        if expected.store is None:
            return None
        assert (stored.start, stored.stop) == (expected.start, expected.stop)
        assert stored.hashes() == expected.store.chunks
        slots = list(output.store_spec.slots)
        taken = self.naive.taken
        assert len(set(slots)) == len(slots), f"{slots}: one is given twice"
        assert not taken & set(slots), f"{slots} given, {taken} are taken"
        assert all(0 <= slot < self.naive.capacity for slot in slots)
        expected.store.slots = slots
        self.storing.append(Storing(output, expected.store, ctx))
        return self.storing[-1]

    def end_store(self, storing: Storing, success: bool = True) -> None:
        """End one of ``storing``."""
        self.storing.remove(storing)
        self._done = [*self._done, storing][-8:]
        self.manager.complete_store(
            storing.output.keys_to_store, storing.output.store_spec, storing.ctx, success
        )
        if success:
            ready = self.naive.copied(storing.naive)
        else:
            doomed_before = storing.naive.doomed
            if doomed_before:
                self.naive.copied(storing.naive)
            else:
                self.naive.fail(storing.naive)
            ready = []
        events = self.manager.take_events()
        # Siblings may become ready in any order, after their parents: the events say in which.
        by_chunk = {store.chunks[0]: store for store in self.naive.stores}
        for event in events:
            assert not event.removed, f"{event} when a store ended"
            assert isinstance(event.keys, ChunkRun)
            store = by_chunk[event.keys.hash_of(event.keys.start)]
            assert store in ready, f"{event.keys} became ready before its parent or its bytes"
            assert event.keys.hashes() == store.chunks
            self.naive.settle(store)
            ready = self.naive.settled()
        assert not ready, f"{len(ready)} stores should be ready"

    def end_store_again(self) -> None:
        """Repeat the end of a store: nothing happens."""
        for storing in self._done:
            before = self.manager.residency_epoch, self.manager.room_epoch
            self.manager.complete_store(
                storing.output.keys_to_store, storing.output.store_spec, storing.ctx, True
            )
            assert (self.manager.residency_epoch, self.manager.room_epoch) == before
            assert not self.manager.take_events()

    def load(self, run: ChunkRun, ctx: ReqContext) -> Loading:
        """Begin to read chunks that are ready."""
        spec, expected = self.manager.prepare_load(run, ctx), self.naive.load(run)
        assert list(spec.slots) == expected.slots, f"{run}: {list(spec.slots)}, not {expected.slots}"
        self.loading.append(Loading(run, spec, expected))
        return self.loading[-1]

    def end_load(self, loading: Loading, ctx: ReqContext) -> None:
        """End one of ``loading``."""
        self.loading.remove(loading)
        self.manager.complete_load(loading.run, loading.spec, ctx)
        self.naive.end_load(loading.naive)

    def keep_room(self) -> None:
        """Free a little ahead."""
        self.manager.keep_room()
        self._compare_removed(self.naive.keep_room())

    def evict(self, count: int) -> None:
        """Let chunks go without storing any."""
        gone = self.manager._evict(count)
        expected = self.naive.evict(count)
        assert tuple(gone) == tuple(make_offload_key(chunk, 0) for chunk in expected)
        self._compare_removed(expected)

    def reset(self) -> None:
        """Forget every chunk."""
        ready = {make_offload_key(chunk, 0) for chunk in self.naive.ready}
        self.manager.reset()
        removed = [key for event in self.manager.take_events() if event.removed for key in event.keys]
        assert len(removed) == len(ready), "a reset tells once what has gone"
        assert set(removed) == ready, "a reset tells what has gone"
        self.naive.reset()

    def check(self) -> None:
        """Compare the books, which the manager checks for itself as well."""
        self.manager.check_invariants(idle=not self.storing and not self.loading)
        assert self.manager.capacity == self.naive.capacity
        taken = self.naive.taken
        assert self.manager.used_count == len(taken), f"{self.manager.used_count} used, not {len(taken)}"
        read = {slot for load in self.naive.loads for slot in load.slots}
        assert self.manager.pinned_count == len(read)
        assert not self.manager.take_events(), "nobody knows what for"

    def finish(self, ctx: ReqContext) -> None:
        """End all that is open, and see that nothing is left."""
        while self.storing:
            self.end_store(self.storing[0])
        while self.loading:
            self.end_load(self.loading[0], ctx)
        self.check()

    def _compare_removed(self, expected: Sequence[Chunk]) -> None:
        self.evicted += expected
        removed = _removed(self.manager.take_events())
        wanted = [make_offload_key(chunk, 0) for chunk in expected]
        assert removed == wanted, f"{_short(removed)} left, {_short(wanted)} should have"


def _removed(events: Sequence[OffloadingEvent]) -> list[bytes]:
    assert all(event.removed for event in events)
    return [key for event in events for key in event.keys]


def _short(keys: Sequence[bytes]) -> list[str]:
    return [key.hex()[:6] for key in keys]
