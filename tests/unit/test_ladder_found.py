"""What random walks have found in the books of tiers below host memory, each as short as it can be told."""

import numpy as np

from kvtide.events import ChunkContent
from kvtide.jobs import InventoryPiece, ReqContext, TierReport
from kvtide.keys import ChunkRun, split_offload_key
from kvtide.manager.catalog import Catalog, CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.manager.warming import Warming
from kvtide.policies import LRUPolicy

HASHES = [bytes([index]) * 32 for index in range(1, 13)]
CONTEXT = ReqContext("r0", visit=1)


def ladder_of(
    group: CatalogGroup, demotion: Demotion = Demotion.AT_ONCE, with_events: bool = False, records: int = 100
) -> Ladder:
    host = CPUOffloadingManager(
        LRUPolicy(), groups=(group,), with_events=with_events, lower_policies=[LRUPolicy()]
    )
    host.grow(64)
    plan = TierPlan("disk", demotion, 1 << 20, True)
    tier = LowerTier(1, plan, host.catalog, host.groups, 1, host._metrics, with_events)
    tier.note_report(0, TierReport(True, True, records * 10, (10,)))
    return Ladder(host, [tier])


def stored(ladder: Ladder, start: int, stop: int) -> ChunkRun:
    """Store chunks in host memory."""
    run = ChunkRun(HASHES, 0, 1, start, stop)
    output = ladder.host.prepare_store(run, CONTEXT)
    ladder.host.complete_store(output.keys_to_store, output.store_spec, CONTEXT, True)
    return run


def written(tier: LowerTier, start: int, stop: int, done: int | None = None) -> None:
    """Write chunks to a tier; the first ``done`` of them well, all without."""
    run, places = tier.begin_write(ChunkRun(HASHES, 0, 1, start, stop), CONTEXT, None)
    tier.end_write(run, places, len(run) if done is None else done)


def told(start: int, stop: int) -> InventoryPiece:
    """What a rank says that holds chunks."""
    count = stop - start
    parents = [HASHES[index - 1] if index else bytes(32) for index in range(start, stop)]
    return InventoryPiece(
        1,
        0,
        (1,),
        np.zeros(count, dtype=np.uint16).tobytes(),
        np.arange(start, stop, dtype=np.uint32).tobytes(),
        np.ones(count, dtype=np.uint64).tobytes(),
        b"".join(HASHES[start:stop]),
        b"".join(parents),
        32,
        True,
    )


def chunks_of(keys: tuple[bytes, ...]) -> list[int]:
    return sorted(HASHES.index(split_offload_key(key)[0]) for key in keys)  # type: ignore[arg-type]


def held(tier: LowerTier, stop: int) -> list[int]:
    slots = tier._catalog.slots(1, 0, HASHES, 0, stop)
    return np.flatnonzero(slots >= 0).tolist()


def test_what_is_on_its_way_behind_a_gap_is_not_stored_a_second_time() -> None:
    host = ladder_of(CatalogGroup(window=2)).host
    later = host.prepare_store(ChunkRun(HASHES, 0, 1, 3, 6), CONTEXT)
    assert len(later.keys_to_store) == 3
    before = host.prepare_store(ChunkRun(HASHES, 0, 1, 0, 6), CONTEXT)
    assert (before.keys_to_store.start, before.keys_to_store.stop) == (0, 3)
    for output in (later, before):
        host.complete_store(output.keys_to_store, output.store_spec, CONTEXT, True)
    host.check_invariants(idle=True)


def test_chunks_of_a_window_up_to_the_end_of_a_run_are_written_on() -> None:
    ladder = ladder_of(CatalogGroup(window=2), Demotion.SECOND_SIGHT)
    run = stored(ladder, 0, 4)
    (write,) = ladder.catch_up(run, Demotion.SECOND_SIGHT, CONTEXT)
    assert (write.run.start, write.run.stop) == (0, 4)


def test_events_say_the_tokens_of_the_chunks_that_were_written_and_of_no_others() -> None:
    ladder = ladder_of(CatalogGroup(), with_events=True, records=3)
    content = ChunkContent(tuple(range(24)), None)
    run = ChunkRun(HASHES, 0, 1, 0, 6)
    output = ladder.host.prepare_store(run, CONTEXT)
    (write,) = ladder.writes_behind(output.keys_to_store, output.store_spec.slots, CONTEXT, content)
    assert len(write.run) == 3  # there is no room for more
    ladder.end_write(write, bytes((1, 1, 0)))
    (event,) = ladder.take_events()
    assert event.content == ChunkContent(tuple(range(8)), None)


def test_a_reset_takes_back_what_was_announced_below() -> None:
    ladder = ladder_of(CatalogGroup(), with_events=True)
    written(ladder.tiers[0], 0, 3)
    ladder.take_events()
    ladder.tell_removed()
    ladder.host.reset()
    ladder.reset()
    (event,) = ladder.take_events()
    assert event.removed
    assert chunks_of(tuple(event.keys)) == [0, 1, 2]


def test_what_was_being_written_at_a_reset_that_keeps_a_tier_does_not_stay_there_unknown() -> None:
    ladder = ladder_of(CatalogGroup())
    (tier,) = ladder.tiers
    run, places = tier.begin_write(ChunkRun(HASHES, 0, 1, 0, 3), CONTEXT, None)
    ladder.host.reset()
    ladder.reset()
    tier.end_write(run, places, 3)
    assert chunks_of(tier.take_discards()) == [0, 1, 2]


def test_what_ranks_found_before_it_was_written_anew_is_not_forgotten() -> None:
    ladder = ladder_of(CatalogGroup())
    (tier,) = ladder.tiers
    warming = Warming(tier, ladder.host.groups, 1)
    run, places = tier.begin_write(ChunkRun(HASHES, 0, 1, 0, 4), CONTEXT, None)
    warming.take(told(1, 4))  # its beginning was not there yet
    while not warming.is_done:
        warming.step()
    assert tier.take_discards() == ()
    tier.end_write(run, places, 4)
    assert held(tier, 4) == [0, 1, 2, 3]


def test_what_ranks_found_waits_for_the_chunks_it_extends() -> None:
    for done, there, forgotten in ((2, [0, 1, 2, 3], []), (0, [], [0, 1, 2, 3])):
        ladder = ladder_of(CatalogGroup())
        (tier,) = ladder.tiers
        warming = Warming(tier, ladder.host.groups, 1)
        run, places = tier.begin_write(ChunkRun(HASHES, 0, 1, 0, 2), CONTEXT, None)
        warming.take(told(0, 4))
        while not warming.is_done:
            warming.step()
        assert held(tier, 4) == []
        ladder.host.check_invariants(idle=False)
        tier.end_write(run, places, done)
        assert held(tier, 4) == there
        assert chunks_of(tier.take_discards()) == forgotten
        tier.check_invariants(idle=True)


def test_what_has_left_since_ranks_told_of_it_is_not_taken_in_again() -> None:
    ladder = ladder_of(CatalogGroup())
    (tier,) = ladder.tiers
    warming = Warming(tier, ladder.host.groups, 1)
    written(tier, 0, 3)
    warming.take(told(0, 3))
    tier.lose(ChunkRun(HASHES, 0, 1, 0, 3), 2)
    while not warming.is_done:
        warming.step()
    assert held(tier, 3) == [0, 1]


def test_a_write_that_fails_late_does_not_take_away_what_was_written_anew() -> None:
    ladder = ladder_of(CatalogGroup())
    (tier,) = ladder.tiers
    first, first_places = tier.begin_write(ChunkRun(HASHES, 0, 1, 0, 1), CONTEXT, None)
    behind, behind_places = tier.begin_write(ChunkRun(HASHES, 0, 1, 1, 3), CONTEXT, None)
    tier.end_write(first, first_places, 0)  # and with it what extends it, whose copy goes on
    assert chunks_of(tier.take_discards()) == [0]
    written(tier, 0, 3)
    tier.end_write(behind, behind_places, 2)
    assert tier.take_discards() == ()
    assert held(tier, 3) == [0, 1, 2]


def test_a_chunk_of_a_window_in_a_lower_tier_keeps_nothing_in_host_memory() -> None:
    catalog = Catalog((CatalogGroup(), CatalogGroup(window=2)), (LRUPolicy(), LRUPolicy()))
    catalog.insert(0, 0, HASHES, 0, np.arange(3, dtype=np.int32), 1)
    catalog.insert(1, 1, HASHES, 4, np.zeros(1, dtype=np.int32), 1)
    assert catalog.evict(0, 3, 100).count == 3
    catalog.check_invariants()
