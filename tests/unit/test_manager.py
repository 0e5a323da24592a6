"""The host tier: the six primitives, one by one and in any order."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fakes import chained_hashes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import IllegalTransitionError, MissingChunkError
from kvtide.geometry import GroupGeometry, GroupKind
from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun, Medium, make_offload_key
from kvtide.manager.base import PrepareStoreOutput, Refusal
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.reuse import ReuseFilter
from kvtide.policies import ARCPolicy, LRUPolicy
from kvtide.testing import ComparedHost, NaiveARC, NaiveLRU, RandomDay
from kvtide.testing.workloads import chained_hashes as hashes_of

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

POLICIES = [(LRUPolicy, NaiveLRU), (ARCPolicy, NaiveARC)]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


def compared(capacity: int, which: int = 0, threshold: int = 1) -> ComparedHost:
    policy, oracle = POLICIES[which]
    host = ComparedHost(policy(), oracle(), threshold)
    host.grow(capacity)
    return host


def path(*tokens: int, start: int = 0) -> ChunkRun:
    return ChunkRun(chained_hashes(tokens, 1), 0, 1, start, len(tokens))


@pytest.mark.parametrize(("policy", "oracle"), POLICIES)
def test_any_order_of_calls_agrees_with_a_naive_model(policy, oracle) -> None:
    for seed in range(10_000, 10_150):
        with seeded(seed):
            RandomDay(seed, ComparedHost(policy(), oracle(), threshold=1 + (seed % 5 == 0))).run(100)


@pytest.mark.parametrize(("policy", "oracle"), POLICIES)
def test_any_order_of_calls_agrees_where_room_is_kept_ahead(policy, oracle) -> None:
    for seed in range(8):
        with seeded(seed):
            RandomDay(seed, ComparedHost(policy(), oracle()), capacity=128 + 3 * seed).run(400)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 12), which=st.sampled_from((0, 1)))
def test_any_order_of_calls_in_a_small_pool_agrees_with_a_naive_model(seed, capacity, which) -> None:
    policy, oracle = POLICIES[which]
    RandomDay(seed, ComparedHost(policy(), oracle()), capacity).run(60)


def test_room_is_freed_ahead_when_four_fifths_of_it_are_left() -> None:
    host = compared(400)
    for name in range(100):
        host.end_store(host.store(path(name, 0, 0, 0), CTX))
        host.keep_room()
    assert host.naive.free_count == 10, "one slot in 40"
    host.end_store(host.store(path(100, 0), CTX))
    host.keep_room()
    assert host.naive.free_count == 8, "four fifths of that are enough"
    host.end_store(host.store(path(101), CTX))
    host.keep_room()
    assert host.naive.free_count == 10
    host.check()


# -- what one step may cost ----------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_what_a_step_may_evict_is_bounded_and_the_next_step_goes_on(which, monkeypatch) -> None:
    monkeypatch.setattr("kvtide.manager.cpu.RUNS_PER_STEP", 3)
    host = compared(10, which)
    manager = host.manager
    for name in range(10):
        manager.keep_room()
        store(manager, path(name))
    manager.keep_room()
    manager.take_events()
    run = path(50, 0, 0, 0, 0, 0, 0)
    output = manager.prepare_store(run, CTX)
    assert (len(output.keys_to_store), output.refused_count, output.refusal) == (3, 4, Refusal.POOL_FULL)
    assert not manager.prepare_store(run, CTX).keys_to_store, "this step has evicted enough"
    complete(manager, output)
    epoch = manager.room_epoch
    manager.keep_room()
    assert manager.room_epoch != epoch, "it is offered again"
    output = manager.prepare_store(run, CTX)
    assert (output.keys_to_store.start, output.keys_to_store.stop) == (3, 6)
    complete(manager, output)
    manager.keep_room()
    complete(manager, manager.prepare_store(run, CTX))
    assert manager.lookup(run, CTX).ready_count == 7
    left = [key for event in manager.take_events() if event.removed for key in event.keys]
    assert left == [path(name)[0] for name in range(7)], "in the same order"
    manager.check_invariants(idle=True)


@pytest.mark.parametrize("which", [0, 1])
def test_a_search_that_is_cut_short_goes_on_where_it_was(which, monkeypatch) -> None:
    monkeypatch.setattr("kvtide.policies.recency.SCAN_LIMIT", 2)
    manager = compared(12, which).manager
    for name in range(12):
        store(manager, path(name))
    loads = [(path(name), manager.prepare_load(path(name), CTX)) for name in range(11)]
    refused, stored = 0, manager.prepare_store(path(50), CTX)
    while not stored.keys_to_store:
        refused += 1
        assert refused <= 11, "not now is not never"
        assert stored.refusal is Refusal.POOL_FULL
        manager.keep_room()
        stored = manager.prepare_store(path(50), CTX)
    assert tuple(stored.evicted_keys) == (path(11)[0],)
    complete(manager, stored)
    for run, spec in reversed(loads):
        manager.complete_load(run, spec, CTX)
    stored = manager.prepare_store(path(60, 0), CTX)
    assert tuple(stored.evicted_keys) == (path(0)[0], path(1)[0]), "passed over, and still in their order"
    complete(manager, stored)
    manager.check_invariants(idle=True)


# -- several groups in one pool ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LRUPolicy, ARCPolicy])
def test_groups_of_several_strides_share_the_pool_and_each_finds_its_own(policy) -> None:
    strides = (1, 2, 4)
    for seed in range(30):
        with seeded(seed):
            chance = random.Random(seed)
            groups = [CatalogGroup(stride) for stride in strides]
            manager = CPUOffloadingManager(policy(), with_events=True, groups=groups)
            manager.grow(chance.choice((3, 10, 40)))
            per_position = chance.choice((1, 2))
            ready: dict[bytes, int] = {}  # key -> slot, as the events tell
            last_given: dict[bytes, int] = {}
            open_stores: list[tuple[PrepareStoreOutput, ReqContext]] = []
            for visit in range(60):
                ctx, group = ReqContext(str(visit), None, visit // 3), chance.randrange(3)
                tokens = [chance.randrange(2) for _ in range(chance.randint(4, 20))]
                hashes, stop = hashes_of(tokens, 32, per_position), len(tokens) // strides[group]
                run = ChunkRun(hashes, group, strides[group] * per_position, 0, stop)
                output = manager.prepare_store(run, ctx)
                for event in manager.take_events():
                    assert event.removed
                    for key in event.keys:
                        del ready[key]
                given = dict(zip(output.keys_to_store, output.store_spec.slots, strict=True))
                assert not {*given.values()} & {*ready.values()}, "a slot has one owner"
                assert not given.keys() & ready.keys(), "nothing is stored twice"
                last_given |= given
                open_stores.append((output, ctx))
                while len(open_stores) > 2:
                    output, ctx = open_stores.pop(chance.randrange(3))
                    manager.complete_store(
                        output.keys_to_store, output.store_spec, ctx, success=chance.random() < 0.8
                    )
                    for event in manager.take_events():
                        assert not event.removed
                        ready |= {key: last_given[key] for key in event.keys}
                found = manager.lookup(run, ctx).ready_count
                keys = list(run)
                assert found == next((i for i, key in enumerate(keys) if key not in ready), stop)
                spec = manager.prepare_load(run[:found], ctx)
                assert list(spec.slots) == [ready[key] for key in keys[:found]]
                manager.complete_load(run[:found], spec, ctx)
                manager.check_invariants(idle=False)


# -- an adversary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("capacity", [1, 2])
def test_a_pool_of_next_to_nothing(capacity: int, which: int) -> None:
    host = compared(capacity, which)
    for visit in range(1, 40):
        tokens = (visit % 3, *range(visit % 4))
        storing = host.store(path(*tokens), ReqContext(str(visit), None, visit))
        if storing is not None:
            host.end_store(storing, success=visit % 5 > 0)
        if host.lookup(path(*tokens), CTX).ready_count and visit % 2:
            host.end_load(host.load(path(tokens[0]), CTX), CTX)
        host.check()
    host.finish(CTX)


@pytest.mark.parametrize("which", [0, 1])
def test_a_very_long_prompt_with_a_branch_at_every_chunk(which: int) -> None:
    host = compared(700, which)
    trunk = tuple(range(300))
    host.end_store(host.store(path(*trunk), ReqContext("0", None, 1000)))
    for depth in range(1, 300):
        host.end_store(host.store(path(*trunk[:depth], 999), ReqContext(str(depth), None, depth)))
    host.check()
    assert host.lookup(path(*trunk), CTX).ready_count == 300
    host.end_load(host.load(path(*trunk), CTX), CTX)
    host.evict(150)
    host.end_store(host.store(path(*trunk[:299], 998, 997), CTX))
    host.keep_room()  # the next step: this one has evicted its share
    host.evict(1000)
    host.check()
    assert host.manager.used_count == 0


def test_prompts_that_are_prefixes_of_each_other_in_any_order() -> None:
    for order in itertools.permutations((1, 3, 4, 6)):
        host = compared(16)
        for length in order:
            host.end_store(host.store(path(*range(length)), CTX)) if length > len(host.naive.ready) else None
            host.touch(path(*range(length)), CTX)
            host.check()
        for length in range(1, 7):
            assert host.lookup(path(*range(length)), CTX).ready_count == length
        host.evict(3)
        host.evict(100)
        host.check()


def test_a_run_from_the_middle_waits_for_the_store_that_brings_its_beginning() -> None:
    manager = manager_of(8)
    output = manager.prepare_store(path(1, 2, 3, 4), CTX)
    for start in range(4):
        result = manager.lookup(path(1, 2, 3, 4, start=start), CTX)
        assert (result.ready_count, result.later) == (0, True), f"from chunk {start}"
    assert not manager.lookup(path(1, 2, 9, start=2), CTX).later, "another branch"
    assert not manager.lookup(path(1, 2, 3, 4, 5, start=4), CTX).later, "the store ends before it"
    complete(manager, output)
    assert manager.lookup(path(1, 2, 3, 4, start=3), CTX).ready_count == 1


def test_nothing_to_store_is_stored() -> None:
    manager = manager_of(4)
    for run in (path(), path(1, 2, start=2), path(1, 2)[:0]):
        output = manager.prepare_store(run, CTX)
        assert (len(output.keys_to_store), output.refused_count, output.refusal) == (0, 0, None)
        complete(manager, output)
        assert manager.lookup(run, CTX).ready_count == 0
    spec = manager.prepare_load(path(), CTX)
    manager.complete_load(path(), spec, CTX)
    manager.check_invariants(idle=True)
    assert manager.used_count == 0


def test_a_limit_of_nothing_evicts_nothing() -> None:
    manager = manager_of(1)
    store(manager, path(1))
    output = manager.prepare_store(path(2), CTX, limit=0)
    assert (len(output.keys_to_store), output.refusal) == (0, Refusal.QUEUE_FULL)
    assert manager.lookup(path(1), CTX).ready_count == 1
    manager.check_invariants(idle=True)


def test_two_resets_with_the_same_load_and_store_open() -> None:
    manager = manager_of(6)
    store(manager, path(1, 2))
    loads = [manager.prepare_load(path(1, 2), CTX) for _ in range(2)]
    pending = manager.prepare_store(path(3, 4), CTX)
    for _ in range(2):
        manager.reset()
        manager.check_invariants(idle=False)
        assert (manager.used_count, manager.pinned_count) == (4, 2)
    again = manager.prepare_store(path(1, 2, 3), CTX)
    assert not set(again.store_spec.slots) & {*loads[0].slots, *pending.store_spec.slots}
    complete(manager, again)
    manager.reset()
    manager.complete_load(path(1, 2), loads[0], CTX)
    assert manager.pinned_count == 2, "the other one is still reading"
    manager.complete_load(path(1, 2), loads[1], CTX)
    complete(manager, pending)
    assert manager.used_count == 0
    manager.check_invariants(idle=True)


def test_an_old_pin_is_not_the_pin_of_whoever_got_its_node() -> None:
    manager = manager_of(2)
    store(manager, path(1, 2))
    old = manager.prepare_load(path(1, 2), CTX)
    manager.reset()
    manager.grow(6)
    store(manager, path(5, 6))
    new = manager.prepare_load(path(5, 6), CTX)
    manager.complete_load(path(1, 2), old, CTX)
    assert manager.pinned_count == 2
    store(manager, path(7, 8, 9, 10))
    assert manager.lookup(path(5, 6), CTX).ready_count == 2, "still read, hence still there"
    manager.complete_load(path(5, 6), new, CTX)
    manager.check_invariants(idle=True)


def test_a_name_that_is_forgotten_while_its_store_is_under_way_comes_back_as_new() -> None:
    host = compared(2, which=1)
    for visit, token in enumerate((9, 9, 1, 2), 1):
        storing = host.store(path(token), ReqContext(str(visit), None, visit))
        if storing is not None:
            host.end_store(storing)
    assert host.naive.policy.remembered()
    coming = host.store(path(1), ReqContext("5", None, 5))
    for visit in range(6, 30):
        storing = host.store(path(visit, visit), ReqContext(str(visit), None, visit))
        if storing is not None:
            host.end_store(storing)
        host.check()
    host.end_store(coming)
    host.finish(CTX)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("success", [True, False])
def test_branches_inside_a_pending_run_settle_or_fall_with_it(success: bool, which: int) -> None:
    host = compared(32, which)
    trunk = host.store(path(0, 1, 2, 3, 4), CTX)
    branches = [host.store(path(*range(depth), 9, 9), CTX) for depth in range(1, 5)]
    leaf = host.store(path(0, 1, 9, 9, 7), CTX)
    for storing in (leaf, branches[1], branches[3]):
        host.end_store(storing)
        assert host.lookup(path(0), CTX).ready_count == 0
    host.end_store(branches[0], success=False)
    host.end_store(trunk, success)
    assert host.lookup(path(0, 1, 9, 9, 7), CTX).ready_count == (5 if success else 0)
    host.end_store_again()
    host.finish(CTX)
    host.evict(100)
    assert host.manager.used_count == 0


def test_a_prompt_that_changed_under_its_store_is_not_taken_for_what_was_copied() -> None:
    manager = manager_of(8)
    hashes = chained_hashes([1, 2, 3], 1)
    output = manager.prepare_store(ChunkRun(hashes, 0, 1, 0, 3), CTX)
    hashes[1:] = chained_hashes([1, 8, 9], 1)[1:]
    complete(manager, output)
    for run in (path(1, 2, 3), path(1, 8, 9)):
        assert manager.lookup(run, CTX).ready_count == 0
    assert manager.used_count == 0
    manager.check_invariants(idle=True)


def test_the_end_of_a_store_whose_prompt_changed_leaves_its_successor_alone() -> None:
    manager = manager_of(16)
    hashes = chained_hashes([1, 2, 3], 1)
    changed = manager.prepare_store(ChunkRun(hashes, 0, 1, 0, 3), CTX)
    hashes[1:] = chained_hashes([1, 8, 9], 1)[1:]
    successor = manager.prepare_store(path(1, 2, 3), CTX)
    complete(manager, changed)
    third = manager.prepare_store(path(1, 2, 3), CTX)
    assert manager.lookup(path(1, 2, 3), CTX).later
    complete(manager, successor)
    complete(manager, third)
    assert manager.lookup(path(1, 2, 3), CTX).ready_count == 3
    assert manager.used_count == 3, "stored once"


def test_keys_of_another_width_are_refused_by_name() -> None:
    manager = manager_of(8)
    store(manager, path(1, 2))
    other = ChunkRun(hashes_of([1, 2], hash_bytes=16), 0, 1, 0, 2)
    output = manager.prepare_store(other, CTX)
    with pytest.raises(ValueError, match="block hashes of 32 bytes"):
        manager.complete_store(output.keys_to_store, output.store_spec, CTX, True)
