"""Books of a tier that many servers share: hints come, grow old, are refuted, and nobody is told to forget.

Names are chunks of one token each; a byte a chunk.
"""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from test_ladder import DONE, FAILED, FULL, GONE, WINDOW, Books, path

from kvtide.jobs import TierReport
from kvtide.keys import ChunkRun
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.manager.lower import TICKETS, Demotion, TierPlan
from kvtide.manager.shared import CONFIRMED_FOR_S, SharedTierBooks
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy

VISIT = 7


class SharedBooks(Books):
    """Host memory of 32 slots over one shared tier."""

    def __init__(
        self, groups: Sequence[CatalogGroup] = (FULL,), names: int = 1000, in_service: bool = True
    ) -> None:
        self.metrics = MetricsDelta()
        self.host = CPUOffloadingManager(LRUPolicy(), None, self.metrics, True, groups, [LRUPolicy()])
        self.host.grow(32)
        plan = TierPlan("store", Demotion.AT_ONCE, 1000, False, True)
        self.tier = SharedTierBooks(1, plan, self.host.catalog, groups, 1, self.metrics, True)
        self.ladder = Ladder(self.host, [self.tier])
        self.report = TierReport(in_service, in_service, names, (1,) * len(groups))
        self.ladder.note_reports({(0, 1): self.report})

    def hear(self, run: ChunkRun, *present: bool) -> bool:
        changed = self.tier.note_presence(run, present or (True,) * len(run), VISIT)
        self.check()
        assert self.forgotten() == [], "others may want it"
        return changed

    def count(self, name: str) -> float:
        return self.metrics.data.get(f"{name}|store", 0)

    def there(self, run: ChunkRun) -> list[bool]:
        """For each chunk whether the books have it."""
        return [self.below(run.between(at, at + 1)) == 1 for at in range(run.start, run.stop)]


# -- what it says is believed, for a while -----------------------------------------------------------------


def test_what_it_says_is_there_can_be_brought_back_and_is_no_longer_in_doubt() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4)
    assert books.tier.first_doubtful(run) == 0, "of an unknown prompt all is in doubt"
    assert books.hear(run, True, True, False, False)
    assert (books.below(run), books.tier.first_doubtful(run), books.tier.used_bytes) == (2, 2, 2)
    (source,) = books.ladder.sources(run)
    assert (source.tier, source.run.start, source.run.stop) == (1, 0, 2)
    assert books.count("tier_found_chunks") == 2


def test_what_is_said_twice_changes_nothing_for_readers() -> None:
    books, run = SharedBooks(), path(1, 2, 3)
    assert books.hear(run)
    assert not books.hear(run)
    assert not books.hear(path(9), False), "nor does what was never thought to be there"
    assert books.tier.used_bytes == 3


@pytest.mark.parametrize(("passed_s", "doubtful"), [(0, 3), (CONFIRMED_FOR_S, 3), (CONFIRMED_FOR_S + 1, 0)])
def test_what_was_confirmed_is_in_doubt_again_after_a_while(passed_s: int, doubtful: int) -> None:
    books, run = SharedBooks(), path(1, 2, 3)
    books.tier.now_s = 100
    books.hear(run)
    books.tier.now_s += passed_s
    assert books.tier.first_doubtful(run) == doubtful
    assert books.below(run) == 3, "doubt is no loss"


def test_confirmed_anew_it_is_sure_for_as_long_again() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4)
    books.hear(run)
    books.tier.now_s = CONFIRMED_FOR_S - 1
    assert not books.hear(run.between(0, 2)), "it was there before"
    books.tier.now_s = CONFIRMED_FOR_S + 1
    assert books.tier.first_doubtful(run) == 2
    books.tier.now_s = 2 * CONFIRMED_FOR_S
    assert books.tier.first_doubtful(run) == 0


def test_what_follows_the_first_in_doubt_does_not_hide_it() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4)
    books.hear(run)
    books.tier.now_s = CONFIRMED_FOR_S + 1
    books.hear(run.between(2, 4))
    assert books.tier.first_doubtful(run) == 0
    assert books.tier.first_doubtful(run.between(2, 4)) == 4


def test_a_run_that_begins_later_counts_from_the_beginning_of_the_prompt() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4, 5)
    books.hear(run.between(0, 3))
    assert books.tier.first_doubtful(run.between(1, 5)) == 3
    assert books.tier.first_doubtful(run.between(4, 5)) == 4


def test_years_later_there_is_a_place_for_the_time() -> None:
    books, run = SharedBooks(), path(1)
    books.tier.now_s = 10 * 365 * 86400
    books.hear(run)
    assert TICKETS + books.tier.now_s <= np.iinfo(np.int32).max
    assert books.tier.first_doubtful(run) == 1


# -- what was refuted ---------------------------------------------------------------------------------------


def test_what_it_says_is_absent_is_lost_and_what_extends_it_waits() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4)
    books.hear(run)
    books.ladder.take_events()
    assert books.hear(run, True, False, True, True)
    assert books.there(run) == [True, False, True, True]
    assert (books.tier.used_bytes, books.count("tier_lost_chunks")) == (3, 1)
    (event,) = books.ladder.take_events()
    assert (event.removed, list(event.keys)) == (True, [run[1]])
    (source,) = books.ladder.sources(run)
    assert (source.run.start, source.run.stop) == (0, 1)
    assert books.hear(run.between(1, 2)), "it is there again after all"
    assert books.below(run) == 4


def test_what_comes_after_one_that_is_missing_is_not_entered() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4)
    assert books.hear(run, True, False, True, True)
    assert books.there(run) == [True, False, False, False]
    assert not books.hear(run.between(2, 4)), "nor where its parent is not known"
    assert books.hear(run.between(1, 4))
    assert books.below(run) == 4


def test_known_and_new_in_turns_are_each_taken_as_they_are() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4, 5, 6)
    books.hear(run)
    books.hear(run, True, False, True, False, True, True)
    books.tier.now_s = CONFIRMED_FOR_S + 1
    assert books.hear(run, False, True, True, True, False, True)
    assert books.there(run) == [False, False, True, False, False, True], "1 and 3 extend what is missing"
    assert books.hear(run)
    assert books.there(run) == [True] * 6
    assert books.tier.first_doubtful(run) == 6


def test_a_read_that_finds_nothing_strikes_it_out_and_nobody_is_told_to_forget() -> None:
    books, run = SharedBooks(), path(1, 2, 3)
    books.hear(run)
    books.ladder.lose(1, run, (DONE, GONE, GONE))
    assert (books.below(run), books.tier.used_bytes, books.forgotten()) == (1, 1, [])
    assert books.tier.first_doubtful(run) == 1


# -- what we write ourselves ---------------------------------------------------------------------------------


def test_what_we_have_written_is_in_doubt_until_it_is_confirmed() -> None:
    books, run = SharedBooks(), path(1, 2, 3)
    books.write(run)
    assert (books.below(run), books.tier.first_doubtful(run)) == (3, 0)
    assert not books.hear(run)
    assert books.tier.first_doubtful(run) == 3
    assert books.tier.used_bytes == 3


def test_what_it_has_is_not_written() -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4)
    books.hear(run, True, True, False, False)
    (write,) = books.store(run)
    assert (write.run.start, write.run.stop) == (2, 4)
    books.end(write)
    assert books.below(run) == 4


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("fate", [DONE, FAILED])
def test_what_is_being_written_stays_as_it_is_whatever_it_says_meanwhile(present: bool, fate: int) -> None:
    books, run = SharedBooks(), path(1, 2, 3)
    (write,) = books.store(run)
    assert books.tier.first_doubtful(run) == 0
    assert not books.hear(run, *(present,) * 3)
    assert (books.below(run), books.tier.used_bytes, books.tier.open_bytes) == (0, 3, 3)
    books.end(write, *(fate,) * 3)
    assert books.forgotten() == [], "a write that failed may be kept, or another's may be there"
    assert (books.below(run), books.tier.used_bytes) == ((3, 3) if fate is DONE else (0, 0))
    assert books.tier.open_bytes == 0


@pytest.mark.parametrize("fate", [DONE, FAILED])
def test_what_it_has_behind_a_write_waits_for_that_and_goes_with_it(fate: int) -> None:
    books, run = SharedBooks(), path(1, 2, 3, 4)
    (write,) = books.store(run.between(0, 2))
    books.hear(run)
    assert (books.below(run), books.tier.used_bytes) == (0, 4)
    books.end(write, fate, fate)
    assert (books.below(run), books.tier.used_bytes) == ((4, 4) if fate is DONE else (0, 0))
    assert books.forgotten() == []


def test_a_part_of_a_write_that_failed_is_forgotten_here_alone() -> None:
    books, run = SharedBooks(), path(1, 2, 3)
    (write,) = books.store(run)
    books.end(write, DONE, FAILED, DONE)
    assert (books.below(run), books.tier.used_bytes, books.forgotten()) == (1, 1, [])


# -- groups, limits, resets ---------------------------------------------------------------------------------


def test_behind_a_window_chunks_need_none_before_them() -> None:
    books, run = SharedBooks((FULL, WINDOW)), path(1, 2, 3, 4, 5, group=1)
    assert books.hear(run, False, False, True, True, True)
    assert books.there(run) == [False, False, True, True, True]
    assert books.tier.first_doubtful(run) == 0
    assert books.tier.first_doubtful(run.between(2, 5)) == 5
    books.hear(path(1, 2, 3, 4, 5))
    assert books.ladder.restore_point(path(1, 2, 3, 4, 5)) == 5
    books.hear(run.between(3, 4), False)
    assert books.ladder.restore_point(path(1, 2, 3, 4, 5)) == 0, "the window of 3 and more lacks its middle"


def test_a_group_of_longer_chunks_is_told_by_its_own() -> None:
    books = SharedBooks((FULL, CatalogGroup(2)))
    fine = path(1, 2, 3, 4, 5)
    coarse = ChunkRun(fine.block_hashes, 1, 2, 0, 2)
    assert books.hear(coarse, True, False)
    assert books.there(coarse) == [True, False]
    assert (books.tier.first_doubtful(coarse), books.tier.first_doubtful(fine)) == (1, 0)
    books.hear(fine)
    assert books.ladder.restore_point(fine) == 2
    books.hear(coarse)
    assert books.ladder.restore_point(fine) == 4


def test_more_names_than_the_limit_are_forgotten_again_and_nothing_is_discarded() -> None:
    books = SharedBooks(names=8)
    for name in range(6):
        books.hear(path(name, 1, 2))
    assert books.tier.used_bytes == 18
    books.ladder.keep_room()
    books.check()
    assert books.tier.used_bytes <= 8
    assert books.below(path(5, 1, 2)) == 3, "the last heard of is the last to go"
    assert books.below(path(0, 1, 2)) == 0
    assert books.forgotten() == []


def test_a_prompt_of_more_chunks_than_the_limit_keeps_its_beginning() -> None:
    books, run = SharedBooks(names=8), path(*range(20))
    books.hear(run)
    books.ladder.keep_room()
    books.check()
    assert 0 < books.below(run) == books.tier.used_bytes <= 8


def test_at_the_limit_what_is_written_takes_the_place_of_names() -> None:
    books = SharedBooks(names=4)
    books.hear(path(1, 2, 3, 4))
    books.write(path(7, 8))
    assert books.below(path(7, 8)) == 2
    assert books.tier.used_bytes <= 4
    assert books.forgotten() == []


def test_after_a_reset_nothing_is_known_and_a_new_answer_is_taken() -> None:
    books, run = SharedBooks(), path(1, 2, 3)
    books.hear(run)
    books.host.reset()
    books.ladder.reset()
    assert (books.below(run), books.tier.used_bytes, books.tier.first_doubtful(run)) == (0, 0, 0)
    assert books.hear(run)
    assert books.below(run) == 3


def test_out_of_service_it_is_no_source_and_what_it_says_is_kept_for_later() -> None:
    books, run = SharedBooks(in_service=False), path(1, 2, 3)
    books.hear(run)
    assert books.ladder.sources(run) == []
    assert books.ladder.restore_point(run) == 0
    books.ladder.note_reports({(0, 1): TierReport(True, True, 1000, (1,))})
    assert books.ladder.restore_point(run) == 3


# -- any day ------------------------------------------------------------------------------------------------


class Naive:
    """What the books should know of prompts of full attention, chunk by chunk."""

    def __init__(self) -> None:
        self.stamps: dict[bytes, int | None] = {}  # when a chunk was confirmed, None for a write of ours

    def hear(self, run: ChunkRun, present: Sequence[bool], now_s: int) -> bool:
        names, changed = run.between(0, run.stop).hashes(), False
        known = [name in self.stamps for name in names]
        for at, there in enumerate(present, run.start):
            if known[at] and not there:
                del self.stamps[names[at]]
                changed = True
            elif known[at]:
                self.stamps[names[at]] = now_s
        for at, there in enumerate(present, run.start):
            if there and not known[at] and all(name in self.stamps for name in names[:at]):
                self.stamps[names[at]] = now_s
                changed = True
        return changed

    def first_doubtful(self, run: ChunkRun, now_s: int) -> int:
        for at, name in enumerate(run.hashes(), run.start):
            stamp = self.stamps.get(name)
            if stamp is None or stamp < now_s - CONFIRMED_FOR_S:
                return at
        return run.stop


@pytest.mark.parametrize("seed", range(12))
def test_any_day_agrees_with_a_naive_model(seed: int) -> None:
    chance, books, naive = random.Random(seed), SharedBooks(), Naive()
    books.tier.now_s = chance.choice((0, 5000))
    heard = 0
    for _ in range(150):
        books.tier.now_s += chance.choice((0, 0, 1, 12, 40))
        run = path(*(chance.randrange(2) for _ in range(chance.randint(1, 9))))
        start = chance.randint(0, run.stop - 1)
        part = run.between(start, chance.randint(start + 1, run.stop))
        if chance.random() < 0.2:
            for write in books.store(run):
                books.end(write)
                naive.stamps.update(dict.fromkeys(write.run.hashes()))
        else:
            present = tuple(chance.random() < 0.8 for _ in range(len(part)))
            changed = naive.hear(part, present, books.tier.now_s)
            assert books.hear(part, *present) == changed, f"seed {seed}"
            heard += changed
        assert books.tier.first_doubtful(part) == naive.first_doubtful(part, books.tier.now_s), f"seed {seed}"
        assert books.there(run) == [name in naive.stamps for name in run.hashes()], f"seed {seed}"
        assert books.tier.used_bytes == len(naive.stamps)
    assert heard > 20, "a day on which nothing is heard says nothing"
