"""The host tier: the six primitives, one by one and in any order."""

import random

import pytest
from fakes import chained_hashes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import IllegalTransitionError, MissingChunkError
from kvtide.geometry import GroupGeometry, GroupKind
from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun, Medium, make_offload_key
from kvtide.manager.base import PrepareStoreOutput, Refusal
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.reuse import ReuseFilter
from kvtide.policies import LRUPolicy

GROUP = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 1, 4)
CTX = ReqContext("r")


def prefix(name: int, chunks: int, start: int = 0) -> ChunkRun:
    hashes = chained_hashes([name] * (4 * chunks))
    return GROUP.run(hashes, start, chunks)


def manager_of(slots: int, **arguments) -> CPUOffloadingManager:
    manager = CPUOffloadingManager(LRUPolicy(), **arguments)
    manager.grow(slots)
    return manager


def complete(manager: CPUOffloadingManager, output: PrepareStoreOutput, success: bool = True) -> None:
    manager.complete_store(output.keys_to_store, output.store_spec, CTX, success)
    manager.check_invariants(idle=False)


def store(manager: CPUOffloadingManager, run: ChunkRun) -> PrepareStoreOutput:
    manager.touch(run, CTX)
    output = manager.prepare_store(run, CTX)
    complete(manager, output)
    return output


def test_a_chunk_is_invisible_until_its_store_is_complete() -> None:
    manager = manager_of(4)
    output = manager.prepare_store(prefix(1, 3), CTX)
    assert (manager.lookup(prefix(1, 3), CTX).ready_count, manager.lookup(prefix(1, 3), CTX).later) == (
        0,
        True,
    )
    complete(manager, output)
    assert (manager.lookup(prefix(1, 3), CTX).ready_count, manager.lookup(prefix(1, 3), CTX).later) == (
        3,
        False,
    )


def test_only_what_is_missing_is_stored_and_next_to_its_parent() -> None:
    manager = manager_of(16)
    assert tuple(store(manager, prefix(1, 3)).store_spec.slots) == (0, 1, 2)
    output = store(manager, prefix(1, 5))
    assert (output.keys_to_store.start, output.keys_to_store.stop) == (3, 5)
    assert tuple(output.store_spec.slots) == (3, 4)
    assert not store(manager, prefix(1, 5)).keys_to_store


def test_a_run_without_its_parent_is_not_stored() -> None:
    manager = manager_of(16)
    assert not manager.prepare_store(prefix(1, 5, start=2), CTX).keys_to_store
    assert manager.used_count == 0


def test_no_room_means_the_longest_prefix_that_fits() -> None:
    manager = manager_of(4)
    output = store(manager, prefix(1, 6))
    assert len(output.keys_to_store) == 4
    assert (output.refused_count, output.refusal) == (2, Refusal.POOL_FULL)
    # Its own prefix is never evicted to make room for itself.
    assert store(manager, prefix(1, 6)).keys_to_store.start == 4
    assert manager.lookup(prefix(1, 6), CTX).ready_count == 4


def test_the_queue_limits_what_is_stored_at_once() -> None:
    output = manager_of(8).prepare_store(prefix(1, 6), CTX, limit=2)
    assert (len(output.keys_to_store), output.refused_count, output.refusal) == (2, 4, Refusal.QUEUE_FULL)


def test_what_extends_a_chunk_leaves_before_it() -> None:
    manager = manager_of(4)
    store(manager, prefix(1, 3))
    evicted = [tuple(store(manager, prefix(name, 1)).evicted_keys) for name in (2, 3, 4)]
    first = prefix(1, 3)
    assert evicted[0] == ()
    assert evicted[1] == (first[2],)
    assert evicted[2] == (first[1],)
    assert manager.lookup(first, CTX).ready_count == 1


def test_the_least_recently_used_leaves_first_and_a_touch_refreshes() -> None:
    manager = manager_of(2)
    store(manager, prefix(1, 1))
    store(manager, prefix(2, 1))
    manager.touch(prefix(1, 1), CTX)
    assert tuple(store(manager, prefix(3, 1)).evicted_keys) == (prefix(2, 1)[0],)


def test_a_pinned_chunk_stays_and_so_does_a_pinned_chunk_that_became_a_leaf() -> None:
    manager = manager_of(2)
    store(manager, prefix(1, 2))
    spec = manager.prepare_load(prefix(1, 1), CTX)  # the parent alone
    assert tuple(store(manager, prefix(2, 1)).evicted_keys) == (prefix(1, 2)[1],)
    output = store(manager, prefix(3, 1))
    assert tuple(output.evicted_keys) == (prefix(2, 1)[0],)
    pinned_by_two = manager.prepare_load(prefix(3, 1), CTX)
    assert store(manager, prefix(4, 1)).refusal is Refusal.POOL_FULL
    manager.complete_load(prefix(1, 1), spec, CTX)
    assert tuple(store(manager, prefix(4, 1)).evicted_keys) == (prefix(1, 1)[0],)
    manager.complete_load(prefix(3, 1), pinned_by_two, CTX)
    manager.check_invariants(idle=True)


def test_a_parent_is_not_evicted_to_make_room_for_its_child() -> None:
    manager = manager_of(1)
    store(manager, prefix(1, 1))
    output = store(manager, prefix(1, 2))
    assert (tuple(output.evicted_keys), output.refusal) == ((), Refusal.POOL_FULL)
    assert manager.lookup(prefix(1, 2), CTX).ready_count == 1


def test_loading_what_is_not_ready_names_it_and_pins_nothing() -> None:
    manager = manager_of(8)
    store(manager, prefix(1, 2))
    with pytest.raises(MissingChunkError, match="chunk 2 of request r"):
        manager.prepare_load(prefix(1, 3), CTX)
    assert manager.pinned_count == 0


def test_unpinning_what_is_not_pinned_is_our_bug_and_changes_nothing() -> None:
    manager = manager_of(8)
    store(manager, prefix(1, 2))
    spec = manager.prepare_load(prefix(1, 2), CTX)
    manager.complete_load(prefix(1, 2), spec, CTX)
    with pytest.raises(IllegalTransitionError, match="slot 0 is not pinned"):
        manager.complete_load(prefix(1, 2), spec, CTX)
    manager.check_invariants(idle=True)


def test_a_failed_store_frees_its_slots_and_dooms_what_is_pending_on_it() -> None:
    manager = manager_of(8)
    first = manager.prepare_store(prefix(1, 2), CTX)
    second = manager.prepare_store(prefix(1, 4), CTX)
    third = manager.prepare_store(prefix(1, 5), CTX)
    complete(manager, third)  # copied before its parents: not ready
    assert manager.lookup(prefix(1, 5), CTX).ready_count == 0
    complete(manager, first, success=False)
    assert (manager.lookup(prefix(1, 5), CTX).ready_count, manager.lookup(prefix(1, 5), CTX).later) == (
        0,
        False,
    )
    # The slots of the second are still being written: they are not given away.
    assert manager.used_count == 2
    again = manager.prepare_store(prefix(1, 5), CTX)
    assert not set(again.store_spec.slots) & set(second.store_spec.slots)
    complete(manager, second)
    complete(manager, again)
    assert manager.lookup(prefix(1, 5), CTX).ready_count == 5
    manager.check_invariants(idle=True)


def test_a_child_that_failed_is_not_waited_for_by_its_parent() -> None:
    manager = manager_of(8)
    first = manager.prepare_store(prefix(1, 2), CTX)
    second = manager.prepare_store(prefix(1, 4), CTX)
    complete(manager, second, success=False)
    complete(manager, first)
    assert manager.lookup(prefix(1, 4), CTX).ready_count == 2
    manager.check_invariants(idle=True)


def test_stores_completed_out_of_order_become_ready_in_order() -> None:
    manager = manager_of(8, with_events=True)
    outputs = [manager.prepare_store(prefix(1, count), CTX) for count in (2, 4, 6)]
    complete(manager, outputs[2])
    complete(manager, outputs[1])
    assert manager.take_events() == []
    complete(manager, outputs[0])
    assert [event.keys.start for event in manager.take_events()] == [0, 2, 4]
    assert manager.lookup(prefix(1, 6), CTX).ready_count == 6


def test_a_completion_that_is_repeated_has_no_effect_on_the_next_owner_of_the_slots() -> None:
    manager = manager_of(2)
    first = manager.prepare_store(prefix(1, 2), CTX)
    complete(manager, first, success=False)
    second = manager.prepare_store(prefix(2, 2), CTX)
    assert second.store_spec.slots == first.store_spec.slots
    complete(manager, first)
    assert manager.lookup(prefix(2, 2), CTX).ready_count == 0
    assert manager.lookup(prefix(1, 2), CTX).ready_count == 0


def test_a_reset_forgets_all_and_frees_under_no_copy() -> None:
    manager = manager_of(6)
    store(manager, prefix(1, 2))
    spec = manager.prepare_load(prefix(1, 2), CTX)
    pending = manager.prepare_store(prefix(2, 2), CTX)
    store(manager, prefix(3, 2))
    manager.reset()
    assert manager.generation == 1
    assert [manager.lookup(prefix(name, 2), CTX).ready_count for name in (1, 2, 3)] == [0, 0, 0]
    assert manager.used_count == 4
    again = manager.prepare_store(prefix(1, 2), CTX)
    assert not set(again.store_spec.slots) & {*spec.slots, *pending.store_spec.slots}
    manager.complete_load(prefix(1, 2), spec, CTX)
    complete(manager, pending)
    complete(manager, again)
    assert manager.lookup(prefix(2, 2), CTX).ready_count == 0
    assert manager.used_count == 2
    manager.check_invariants(idle=True)


def test_events_tell_what_can_be_fetched_and_what_no_longer() -> None:
    manager = manager_of(2, with_events=True)
    store(manager, prefix(1, 2))
    (stored,) = manager.take_events()
    assert (list(stored.keys), stored.removed, stored.medium) == (list(prefix(1, 2)), False, Medium.HOST)
    store(manager, prefix(2, 1))
    removed, stored = manager.take_events()
    assert (tuple(removed.keys), removed.removed) == ((prefix(1, 2)[1],), True)
    assert stored.keys[0] == make_offload_key(prefix(2, 1).hash_of(0), 0)
    manager.reset()
    (removed,) = manager.take_events()
    assert set(removed.keys) == {prefix(1, 1)[0], prefix(2, 1)[0]}


def test_the_reuse_filter_counts_each_request_once_and_forgets_the_longest_unseen() -> None:
    admission = ReuseFilter(threshold=2, entries=3)
    names = [bytes([n]) for n in range(4)]
    assert admission.admitted(names[:2], "a") == 0
    assert admission.admitted(names[:2], "a") == 0
    assert admission.admitted(names[:2], "b") == 2
    assert admission.admitted(names[2:], "b") == 0
    assert len(admission) == 3
    assert admission.admitted(names[:1], "c") == 0, "its offers were forgotten"
    assert admission.admitted(names[2:], "c") == 2


# -- any order, against a naive model ------------------------------------------------------------------


class Naive:
    """Prefix tuples in lists; slow and obvious."""

    def __init__(self, slots: int) -> None:
        self.slots, self.clock = slots, 0
        self.used: dict[tuple[int, int], int] = {}  # (name, depth) -> stamp
        self.ready: set[tuple[int, int]] = set()
        self.pins: dict[tuple[int, int], int] = {}

    def touch(self, name: int, count: int) -> None:
        self.clock += 1
        for depth in range(count):
            if (name, depth) in self.used:
                self.used[name, depth] = self.clock

    def lookup(self, name: int, count: int) -> int:
        return next((d for d in range(count) if (name, d) not in self.ready), count)

    def store(self, name: int, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        known = next((d for d in range(count) if (name, d) not in self.used), count)
        evicted = []
        while len(self.used) + count - known > self.slots:
            leaves = [
                (stamp, key)
                for key, stamp in self.used.items()
                if key in self.ready
                and not self.pins.get(key)
                and (key[0], key[1] + 1) not in self.used
                and key != (name, known - 1)
            ]
            if not leaves:
                break
            oldest = min(leaves)[0]
            victims = [key for stamp, key in leaves if stamp == oldest]
            assert len(victims) == 1, "one run, one leaf: no ties"
            del self.used[victims[0]]
            self.ready.discard(victims[0])
            evicted.append(victims[0])
        self.clock += 1
        stored = list(range(known, min(count, known + self.slots - len(self.used))))
        for depth in stored:
            self.used[name, depth] = self.clock
        return stored, evicted


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), slots=st.integers(1, 12))
def test_any_order_of_calls_agrees_with_a_naive_model(seed: int, slots: int) -> None:
    chance, manager, naive = random.Random(seed), manager_of(slots), Naive(slots)
    loads, names = [], {prefix(n, d + 1)[d]: (n, d) for n in range(5) for d in range(6)}
    for _ in range(60):
        name, count = chance.randrange(5), chance.randrange(1, 7)
        run = prefix(name, count)
        action = chance.choice(("store", "store", "load", "touch", "unload"))
        if action == "store":
            manager.touch(run, CTX)
            naive.touch(name, count)
            output = manager.prepare_store(run, CTX)
            stored, evicted = naive.store(name, count)
            assert list(range(output.keys_to_store.start, output.keys_to_store.stop)) == stored
            assert [names[key] for key in output.evicted_keys] == evicted
            complete(manager, output)
            naive.ready |= {(name, depth) for depth in stored}
        elif action == "touch":
            manager.touch(run, CTX)
            naive.touch(name, count)
        elif action == "load" and (hit := manager.lookup(run, CTX).ready_count):
            loads.append((run[:hit], manager.prepare_load(run[:hit], CTX), name))
            for depth in range(hit):
                naive.pins[name, depth] = naive.pins.get((name, depth), 0) + 1
        elif action == "unload" and loads:
            loaded, spec, owner = loads.pop(chance.randrange(len(loads)))
            manager.complete_load(loaded, spec, CTX)
            for depth in range(len(loaded)):
                naive.pins[owner, depth] -= 1
        assert manager.lookup(run, CTX).ready_count == naive.lookup(name, count)
        manager.check_invariants(idle=False)
    for loaded, spec, _ in loads:
        manager.complete_load(loaded, spec, CTX)
    manager.check_invariants(idle=True)
