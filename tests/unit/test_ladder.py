"""Host memory and a tier below it: the books of both, case by case, and any day against a naive model."""

from collections.abc import Sequence

import pytest
from fakes import chained_hashes

from kvtide.events import OffloadingEvent
from kvtide.jobs import PartFate, ReqContext, TierReport
from kvtide.keys import ChunkRun, Medium, OffloadKey
from kvtide.manager import ladder as ladder_module
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import HOST, CPUOffloadingManager
from kvtide.manager.ladder import Ladder, PreparedWrite
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.metrics import MetricsDelta
from kvtide.policies import EvictionPolicy, LRUPolicy
from kvtide.testing.ladder_days import LadderDay

CTX = ReqContext("r")
FULL, WINDOW = CatalogGroup(), CatalogGroup(1, window=3)
DONE, FAILED, GONE = PartFate.DONE, PartFate.FAILED, PartFate.GONE


def path(*tokens: int, start: int = 0, group: int = 0) -> ChunkRun:
    return ChunkRun(chained_hashes(tokens, 1), group, 1, start, len(tokens))


class Books:
    """Host memory of 32 slots over one tier, a byte a chunk."""

    def __init__(
        self,
        groups: Sequence[CatalogGroup] = (FULL,),
        demotion: Demotion = Demotion.AT_ONCE,
        capacity: int = 100,
        queue: int = 100,
        slots: int = 32,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.metrics = MetricsDelta()
        below = LRUPolicy() if policy is None else policy
        self.host = CPUOffloadingManager(LRUPolicy(), None, self.metrics, True, groups, [below])
        self.host.grow(slots)
        plan = TierPlan("disk", demotion, queue, True)
        self.tier = LowerTier(1, plan, self.host.catalog, groups, 1, self.metrics, True)
        self.ladder = Ladder(self.host, [self.tier])
        self.ladder.note_reports({(0, 1): TierReport(True, True, capacity, (1,) * len(groups))})

    def store(self, run: ChunkRun, ctx: ReqContext = CTX) -> list[PreparedWrite]:
        """Store in host memory; say what is to be written on."""
        output = self.host.prepare_store(run, ctx)
        stored = output.keys_to_store
        writes = self.ladder.writes_behind(stored, output.store_spec.slots, ctx, None) if stored else []
        self.host.complete_store(stored, output.store_spec, ctx, True)
        return writes

    def end(self, write: PreparedWrite, *fates: PartFate) -> None:
        self.ladder.end_write(write, fates or (DONE,) * len(write.run))
        self.check()

    def write(self, run: ChunkRun) -> None:
        for write in self.store(run):
            self.end(write)

    def below(self, run: ChunkRun) -> int:
        return self.host.catalog.resident(run.group_index, run.block_hashes, run.start, run.stop, 1)

    def forgotten(self) -> list[OffloadKey]:
        return [key for discard in self.ladder.take_discards() for key in discard.keys]

    def check(self) -> None:
        self.host.check_invariants(idle=False)
        self.ladder.check_invariants(idle=False)


def test_any_day_agrees_with_a_naive_model_after_every_call() -> None:
    seen = 0
    for seed in range(5000, 5060):
        try:
            day = LadderDay(seed)
            day.run(300)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        seen += day.seen["promote"] + day.seen["demote"] + day.seen["written behind"]
    assert seen > 100, "days on which nothing happens say nothing"


# -- down ----------------------------------------------------------------------------------------------


def test_a_chunk_is_below_when_all_ranks_have_it_and_its_slot_is_held_until_then() -> None:
    books = Books()
    (write,) = books.store(path(1, 2, 3))
    assert (books.host.pinned_count, books.tier.open_bytes, books.below(path(1, 2, 3))) == (3, 3, 0)
    books.end(write, DONE, DONE, FAILED)
    assert (books.host.pinned_count, books.tier.open_bytes, books.below(path(1, 2, 3))) == (0, 0, 2)
    assert books.forgotten() == [path(1, 2, 3)[2]], "a rank may have it"
    assert books.tier.used_bytes == 2


def test_what_continues_the_middle_of_a_write_needs_no_more_of_it_than_has_come() -> None:
    books = Books()
    (first,) = books.store(path(1, 2, 3, 4))
    (second,) = books.store(path(1, 2, 9))
    (third,) = books.store(path(1, 2, 3, 4, 5))
    assert second.run.start == 2
    books.end(second)
    books.end(third)
    assert books.below(path(1, 2, 9)) == 0
    books.end(first, DONE, DONE, DONE, FAILED)
    assert (books.below(path(1, 2, 9)), books.below(path(1, 2, 3, 4, 5))) == (3, 3)
    assert books.forgotten() == [path(1, 2, 3, 4)[3], path(1, 2, 3, 4, 5)[4]]


def test_what_was_given_up_and_written_anew_is_not_forgotten_when_the_old_write_ends() -> None:
    books = Books()
    (first,) = books.store(path(1, 2))
    (second,) = books.store(path(1, 2, 3))
    books.end(first, FAILED, FAILED)
    assert books.forgotten() == [path(1)[0], path(1, 2)[1]]
    anew = books.ladder.catch_up(path(1, 2, 3), Demotion.AT_ONCE, CTX)
    assert [(write.run.start, write.run.stop) for write in anew] == [(0, 3)]
    books.end(anew[0])
    books.end(second)
    assert books.forgotten() == []
    assert books.below(path(1, 2, 3)) == 3


def test_the_names_of_a_write_are_those_it_began_with() -> None:
    books = Books()
    hashes = chained_hashes((1, 2, 3, 4), 1)
    names = list(ChunkRun(tuple(hashes), 0, 1, 0, 4))
    (write,) = books.store(ChunkRun(hashes, 0, 1, 0, 4))
    del hashes[2:]  # the engine has taken back two tokens
    books.end(write, DONE, DONE, DONE, FAILED)
    assert books.forgotten() == names[3:]
    assert books.below(path(1, 2, 3, 4)) == 3


def test_behind_a_window_a_prefix_that_is_ready_to_its_end_is_written() -> None:
    books = Books((FULL, WINDOW), Demotion.SECOND_SIGHT)
    books.store(path(1, 2, 3, 4))
    books.store(path(1, 2, 3, 4, start=2, group=1))
    writes = books.ladder.catch_up(path(1, 2, 3, 4, start=1, group=1), Demotion.SECOND_SIGHT, CTX)
    assert [(write.run.start, write.run.stop) for write in writes] == [(2, 4)]
    books.check()


def test_behind_a_window_no_chunk_is_on_its_way_twice() -> None:
    books = Books((FULL, WINDOW))
    later = books.host.prepare_store(path(1, 2, 3, 4, start=2, group=1), CTX)
    earlier = books.host.prepare_store(path(1, 2, 3, 4, group=1), CTX)
    stored = earlier.keys_to_store
    assert (stored.start, stored.stop) == (0, 2)
    for output in (later, earlier):
        books.host.complete_store(output.keys_to_store, output.store_spec, CTX, True)
    books.check()
    assert books.host.used_count == 4


def test_what_was_lost_is_written_anew_and_what_is_on_its_way_behind_it_is_not() -> None:
    books = Books()
    books.write(path(1, 2, 3, 4))
    (behind,) = books.store(path(1, 2, 3, 4, 5, 6))
    books.ladder.lose(1, path(1, 2, 3, 4), (DONE, DONE, DONE, GONE))
    assert books.forgotten() == [path(1, 2, 3, 4)[3]]
    assert books.ladder.may_lack(Demotion.AT_ONCE)
    anew = books.ladder.catch_up(path(1, 2, 3, 4, 5, 6), Demotion.AT_ONCE, CTX)
    assert [(write.run.start, write.run.stop) for write in anew] == [(3, 4)]
    books.end(behind)
    books.end(anew[0])
    assert books.below(path(1, 2, 3, 4, 5, 6)) == 6
    assert books.tier.used_bytes == 6


def test_a_queue_that_is_full_skips_what_does_not_fit_and_it_follows_when_it_is_asked_for() -> None:
    books = Books(queue=3)
    (write,) = books.store(path(1, 2, 3, 4, 5))
    assert (len(write.run), books.tier.open_bytes) == (3, 3)
    assert books.metrics.data["tier_skipped_chunks|disk,queue_full"] == 2
    books.end(write)
    (rest,) = books.ladder.catch_up(path(1, 2, 3, 4, 5), Demotion.AT_ONCE, CTX)
    assert (rest.run.start, rest.run.stop) == (3, 5)
    books.end(rest)


def test_a_tier_that_is_full_lets_the_least_used_go_and_tells_the_ranks_and_who_listens() -> None:
    books = Books(capacity=4)
    books.write(path(1, 2))
    books.write(path(7, 8))
    books.ladder.take_events()
    books.write(path(9))
    assert books.forgotten() == [path(1, 2)[1]]
    removed, stored = books.ladder.take_events()
    assert (removed.removed, list(removed.keys), removed.medium) == (True, [path(1, 2)[1]], Medium.STORAGE)
    assert (stored.removed, list(stored.keys)) == (False, [path(9)[0]])
    assert books.tier.used_bytes == 4


def test_what_leaves_host_memory_next_is_written_first_and_stays_until_it_is() -> None:
    books = Books(demotion=Demotion.ON_EVICTION, slots=10)
    for name in range(10):
        assert books.store(path(name)) == []
    (write,) = books.ladder.save_victims()
    assert write.run[0] == path(0)[0]
    assert tuple(books.host.prepare_store(path(50), CTX).evicted_keys) == (path(1)[0],), "0 has to stay"
    books.end(write)
    assert tuple(books.host.prepare_store(path(51), CTX).evicted_keys) == (path(0)[0],)
    assert books.below(path(0)) == 1
    books.check()


def test_what_leaves_next_is_looked_at_within_bounds(monkeypatch) -> None:
    monkeypatch.setattr(ladder_module, "POSITIONS_PER_STEP", 6)
    books = Books(demotion=Demotion.ON_EVICTION, slots=30)
    for name in range(6):
        books.store(path(name, 1, 2, 3, 4))
    monkeypatch.setattr(ladder_module, "SAVED_AHEAD", 1)
    first = books.ladder.save_victims()
    assert [write.run[0] for write in first] == [path(0)[0], path(1)[0]]
    for write in first:
        books.end(write)
    books.host.residency_epoch += 1
    again = books.ladder.save_victims()
    assert [write.run[0] for write in again] == [path(2)[0], path(3)[0]], "what is saved costs nothing"


@pytest.mark.parametrize("limit", [4, 1 << 16])
def test_an_adapters_prompts_stay_out_however_many_there_are(limit: int, monkeypatch) -> None:
    monkeypatch.setattr(ladder_module, "PRIVATE_PROMPTS", limit)
    books = Books(demotion=Demotion.ON_EVICTION, slots=20)
    for name in range(20):
        run = path(name)
        if name % 2:
            books.ladder.keep_out(run)
        books.store(run)
    monkeypatch.setattr(ladder_module, "SAVED_AHEAD", 1)
    written = {key for write in books.ladder.save_victims() for key in write.run}
    assert written == {path(name)[0] for name in range(0, 20, 2)}


# -- up ------------------------------------------------------------------------------------------------


def test_nothing_is_brought_from_where_the_first_missing_chunk_is_not() -> None:
    books = Books((FULL, CatalogGroup()))
    books.write(path(1, 2, 3))
    assert books.ladder.sources(path(1, 2, 3, group=1)) == []
    books.host._evict(100)
    (source,) = books.ladder.sources(path(1, 2, 3))
    assert (source.tier, source.run.start, source.run.stop) == (1, 0, 3)
    assert books.ladder.restore_point(path(1, 2, 3)) == 0, "of the other group there is nothing"


def test_a_tier_out_of_service_is_no_source_and_takes_nothing() -> None:
    books = Books()
    books.write(path(1, 2, 3))
    books.host._evict(100)
    books.ladder.note_reports({(0, 1): TierReport(False, False, 100, (1,))})
    assert books.ladder.sources(path(1, 2, 3)) == []
    assert books.store(path(7)) == []
    books.ladder.note_reports({(0, 1): TierReport(True, False, 100, (1,))})
    assert len(books.ladder.sources(path(1, 2, 3))) == 1
    assert books.store(path(7, 8)) == []


# -- all of it -----------------------------------------------------------------------------------------


def followed(events: Sequence[OffloadingEvent]) -> set[OffloadKey]:
    known: set[OffloadKey] = set()
    for event in events:
        known = known - set(event.keys) if event.removed else known | set(event.keys)
    return known


def test_a_reset_tells_what_can_be_fetched_no_more_and_void_writes_leave_nothing() -> None:
    books = Books()
    books.write(path(1, 2))
    (open_write,) = books.store(path(1, 2, 3))
    books.ladder.tell_removed()
    books.host.reset()
    books.ladder.reset()
    assert followed(books.ladder.take_events()) == set()
    assert books.host.pinned_count == 1
    books.end(open_write)
    assert books.below(path(1, 2, 3)) == 0
    assert (books.host.pinned_count, books.host.used_count, books.tier.used_bytes) == (0, 0, 0)
    assert path(1, 2, 3)[2] in books.forgotten(), (
        "where a reset keeps what is below, it would stay for nobody"
    )
    assert books.host.catalog.all_slots(HOST) == []
