"""What ranks found in a tier, put back into the books: whole prompts, whatever else they tell, bit by bit."""

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from fakes import chained_hashes

from kvtide.jobs import InventoryPiece, PartFate, ReqContext, TierReport
from kvtide.keys import ChunkRun, OffloadKey, make_offload_key
from kvtide.manager import warming as warming_module
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder, PreparedWrite
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.manager.warming import Warming
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy

CTX = ReqContext("r")
FULL, WINDOW, COARSE = CatalogGroup(), CatalogGroup(1, window=2), CatalogGroup(4)
NO_PARENT = bytes(32)

Record = tuple[int, bytes, bytes, int, int]
"""Group, hash, hash of the parent, chunk index, and when it was written."""


def names_of(*tokens: int) -> list[bytes]:
    return chained_hashes(tokens, 1)


def records(
    names: Sequence[bytes], group: int = 0, stride: int = 1, written_at_s: int = 1000
) -> list[Record]:
    ends = names[stride - 1 :: stride]
    parents = [NO_PARENT, *ends]
    return [(group, name, parents[index], index, written_at_s) for index, name in enumerate(ends)]


def piece(
    told: Iterable[Record],
    last: bool = False,
    groups: int = 1,
    shards: int = 1,
    generation: int = 0,
) -> InventoryPiece:
    listed = list(told)
    return InventoryPiece(
        1,
        generation,
        (shards,) * groups,
        np.array([one[0] for one in listed], dtype=np.uint16).tobytes(),
        np.array([one[3] for one in listed], dtype=np.uint32).tobytes(),
        np.array([one[4] for one in listed], dtype=np.uint64).tobytes(),
        b"".join(one[1] for one in listed),
        b"".join(one[2] for one in listed),
        32,
        last,
    )


class Warm:
    """A tier that tells, with its books and host memory above it."""

    def __init__(self, groups: Sequence[CatalogGroup] = (FULL,), ranks: int = 1) -> None:
        self.groups, self.ranks = groups, ranks
        self.metrics = MetricsDelta()
        self.host = CPUOffloadingManager(LRUPolicy(), None, self.metrics, False, groups, [LRUPolicy()])
        self.host.grow(64)
        plan = TierPlan("disk", Demotion.AT_ONCE, 1000, True)
        self.tier = LowerTier(1, plan, self.host.catalog, groups, ranks, self.metrics)
        self.ladder = Ladder(self.host, [self.tier])
        report = TierReport(True, True, 1 << 20, (1,) * len(groups))
        self.ladder.note_reports({(rank, 1): report for rank in range(ranks)})
        self.warming = Warming(self.tier, groups, ranks)

    def tell(self, told: Iterable[Record], last: bool = False, shards: int = 0, generation: int = 0) -> None:
        told_now = piece(told, last, len(self.groups), shards or self.ranks, generation)
        self.warming.take(told_now)

    def finish(self, limit: int = 1000) -> set[OffloadKey]:
        """Go on to the end; say what is to be forgotten."""
        for _ in range(limit):
            self.warming.step()
            self.host.check_invariants(idle=False)
            self.ladder.check_invariants(idle=False)
            if self.warming.is_done:
                return self.forgotten()
        raise AssertionError("it does not end")

    def forgotten(self) -> set[OffloadKey]:
        told = [key for discard in self.ladder.take_discards() for key in discard.keys]
        assert len(told) == len(set(told)), "said twice"
        return set(told)

    def below(self, names: Sequence[bytes], group: int = 0) -> int:
        stop = len(names) // self.groups[group].stride
        return self.host.catalog.resident(group, names, 0, stop, 1)

    def store(self, names: Sequence[bytes]) -> PreparedWrite:
        output = self.host.prepare_store(ChunkRun(names, 0, 1, 0, len(names)), CTX)
        stored = output.keys_to_store
        (write,) = self.ladder.writes_behind(stored, output.store_spec.slots, CTX, None)
        self.host.complete_store(stored, output.store_spec, CTX, True)
        return write


def keys(names: Iterable[bytes], group: int = 0) -> set[OffloadKey]:
    return {make_offload_key(name, group) for name in names}


def test_prompts_are_put_together_from_records_in_any_order_and_what_was_used_last_leaves_last() -> None:
    warm = Warm()
    trunk, branch, other = names_of(1, 2, 3, 4), names_of(1, 2, 9, 9, 9), names_of(7, 8)
    told = [*records(trunk, written_at_s=3000), *records(branch, written_at_s=2000)[2:]]
    told += records(other, written_at_s=1000)
    random.Random(1).shuffle(told)
    warm.tell(told[:4])
    warm.tell(told[4:], last=True)
    assert warm.finish() == set()
    assert [warm.below(names) for names in (trunk, branch, other)] == [4, 5, 2]
    assert warm.metrics.data["tier_found_chunks|disk"] == 9
    gone = warm.host.catalog.evict(1, 3, 10)
    assert [name for _, name in gone.names] == [b"".join(other), branch[-1]]


def test_nothing_is_listed_before_every_rank_has_told_all() -> None:
    warm = Warm(ranks=2)
    names = names_of(1, 2, 3)
    warm.tell(records(names), last=True)
    assert not warm.warming.step()
    warm.tell(records(names)[:2])
    assert not warm.warming.step()
    assert warm.below(names) == 0
    warm.tell([], last=True)
    assert warm.finish() == keys(names[2:]), "not every rank has it"
    assert warm.below(names) == 2


def test_what_more_ranks_can_read_than_must_counts_once() -> None:
    warm = Warm(ranks=3)
    names = names_of(1, 2)
    for _ in range(3):
        warm.tell(records(names), last=True, shards=2)
    assert warm.finish() == set()
    assert warm.below(names) == 2


def test_behind_a_gap_nothing_is_of_use() -> None:
    warm = Warm()
    names = names_of(*range(8))
    told = records(names)
    warm.tell(told[:3] + told[4:], last=True)
    assert warm.finish() == keys(names[4:])
    assert warm.below(names) == 3


@pytest.mark.parametrize("index", [0, 2, 4, 2**32 - 1])
def test_a_record_that_stands_where_it_cannot_is_none(index: int) -> None:
    warm = Warm()
    names = names_of(1, 2, 3, 4, 5)
    told = records(names)
    group, name, parent, _, written_at_s = told[3]
    told[3] = (group, name, parent, index, written_at_s)
    warm.tell(told, last=True)
    assert keys(names[3:]) <= warm.finish()
    assert warm.below(names) <= 3


def test_circles_end() -> None:
    warm = Warm()
    a, b, c, leaf = (bytes([value]) * 32 for value in (1, 2, 3, 4))
    circle = [(0, a, c, 2**32 - 2, 5), (0, b, a, 2**32 - 1, 5), (0, c, b, 2**32 - 3, 5)]
    warm.tell([*circle, (0, leaf, c, 2**32 - 1, 5), (0, bytes([5]) * 32, bytes([5]) * 32, 1, 5)], last=True)
    assert warm.finish() == keys((a, b, c, leaf, bytes([5]) * 32))


def test_groups_beside_the_finest_are_put_back_along_its_prompts() -> None:
    warm = Warm((FULL, WINDOW, COARSE))
    names = names_of(*range(12))
    window = [one for one in records(names, 1) if one[3] in (4, 5, 10, 11)]
    coarse = records(names, 2, stride=4)
    stray = records(names_of(50, 51), 1)
    warm.tell([*coarse, *window, *stray], last=False)
    warm.tell(records(names), last=True)
    assert warm.finish() == keys(names_of(50, 51), 1)
    assert (warm.below(names), warm.below(names, 2)) == (12, 3)
    slots = warm.host.catalog.slots(1, 1, names, 0, 12)
    assert np.flatnonzero(slots >= 0).tolist() == [4, 5, 10, 11]
    assert warm.host.catalog.restore_point(names, 12, (1,)) == 12


def test_a_coarse_group_with_a_gap_is_of_use_up_to_there() -> None:
    warm = Warm((FULL, COARSE))
    names = names_of(*range(12))
    coarse = records(names, 1, stride=4)
    warm.tell([*records(names), coarse[0], coarse[2]], last=True)
    assert warm.finish() == keys([names[11]], 1)
    assert (warm.below(names), warm.below(names, 1)) == (12, 1)


def test_what_is_written_meanwhile_is_not_forgotten() -> None:
    warm = Warm()
    names = names_of(1, 2, 3, 4)
    told = records(names)
    warm.tell([told[0], told[2]], last=False)
    write = warm.store(names)
    warm.tell([told[3]], last=True)
    warm.ladder.end_write(write, [PartFate.DONE] * 4)
    assert warm.finish() == set()
    assert warm.below(names) == 4


def test_what_is_forgotten_meanwhile_is_not_listed_whatever_ranks_have_told() -> None:
    warm = Warm()
    names, other = names_of(1, 2, 3, 4), names_of(9, 10)
    warm.tell([*records(names), *records(other)], last=False)
    write = warm.store(names[:2])
    warm.ladder.end_write(write, [PartFate.DONE, PartFate.FAILED])
    assert warm.forgotten() == keys(names[1:2])
    warm.tell([], last=True)
    assert warm.finish() == keys(names[2:])
    assert (warm.below(names), warm.below(other)) == (1, 2)


def test_behind_a_window_what_is_forgotten_meanwhile_leaves_what_is_beside_it() -> None:
    warm = Warm((FULL, WINDOW))
    names = names_of(*range(6))
    warm.tell([*records(names), *records(names, 1)], last=False)
    gone = [PartFate.FAILED, PartFate.FAILED, PartFate.GONE, *[PartFate.FAILED] * 3]
    warm.ladder.lose(1, ChunkRun(names, 1, 1, 0, 6), gone)
    warm.tell([], last=True)
    assert warm.finish() == keys(names[2:3], 1)
    slots = warm.host.catalog.slots(1, 1, names, 0, 6)
    assert np.flatnonzero(slots >= 0).tolist() == [0, 1, 3, 4, 5]


def test_what_a_rank_has_not_got_after_all_is_not_listed_whatever_it_has_told() -> None:
    warm = Warm()
    names = names_of(1, 2, 3)
    warm.tell(records(names), last=False)
    warm.ladder.lose(1, ChunkRun(names, 0, 1, 0, 3), [PartFate.FAILED, PartFate.GONE, PartFate.FAILED])
    warm.tell([], last=True)
    assert warm.finish() == keys(names[1:])
    assert warm.below(names) == 1


@pytest.mark.parametrize("done", [2, 1])
def test_what_extends_a_write_that_is_under_way_waits_for_it(done: int) -> None:
    warm = Warm()
    names = names_of(1, 2, 3, 4)
    write = warm.store(names[:2])
    warm.tell(records(names), last=True)
    assert warm.finish() == set()
    assert warm.below(names) == 0
    assert warm.tier.used_bytes == 4
    warm.ladder.end_write(write, [PartFate.DONE] * done + [PartFate.FAILED] * (2 - done))
    whole = done == 2
    assert warm.below(names) == (4 if whole else 1)
    assert warm.forgotten() == (set() if whole else keys(names[1:]))
    assert warm.tier.used_bytes == (4 if whole else 1)


def test_what_has_left_between_two_steps_takes_with_it_what_extends_it(monkeypatch) -> None:
    monkeypatch.setattr(warming_module, "WORK_PER_STEP", 100)
    warm = Warm()
    names = names_of(*range(1000))
    warm.tell(records(names), last=True)
    while not 0 < warm.below(names) < 600:
        warm.warming.step()
    there = warm.below(names)
    warm.tier._evict(20)
    left = warm.forgotten()
    assert left == keys(names[there - 20 : there])
    assert warm.finish() == keys(names[there:])
    assert warm.below(names) == there - 20


def test_a_reset_begins_anew_and_pieces_of_before_it_mean_nothing() -> None:
    warm = Warm()
    names, other = names_of(1, 2, 3), names_of(7, 8)
    warm.tell(records(names), last=True)
    for _ in range(2):
        warm.host.reset()
        warm.ladder.reset()
        warm.warming.begin(warm.host.generation)
        warm.tell(records(names), last=True, generation=warm.host.generation - 1)
    warm.tell(records(other), last=True, generation=2)
    assert warm.finish() == set()
    assert (warm.below(names), warm.below(other)) == (0, 2)
    warm.host.reset()
    warm.ladder.reset()
    warm.warming.begin(3, expected=False)
    assert warm.warming.is_done


def test_a_step_is_bounded_whatever_is_told() -> None:
    warm = Warm((FULL, WINDOW), ranks=1)
    long = names_of(*range(6000))
    short = [names_of(10_000 + name, 1) for name in range(500)]
    orphans = records(names_of(*range(20_000, 23_000)))[1:]
    warm.tell(
        [*records(long), *records(long, 1), *orphans, *(one for names in short for one in records(names))]
    )
    warm.tell([], last=True)
    steps = most = 0
    before = warm.warming.found_count
    while not warm.warming.is_done:
        warm.warming.step()
        forgotten = len(warm.forgotten())
        most = max(most, warm.warming.found_count - before + forgotten // 2)
        before, steps = warm.warming.found_count, steps + 1
    assert before == 6000 * 2 + 1000
    assert most <= warming_module.WORK_PER_STEP * 1.5
    assert steps > before / warming_module.WORK_PER_STEP


def test_any_inventory_is_what_a_naive_reader_makes_of_it() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        ranks = chance.choice((1, 2, 3))
        warm = Warm(ranks=ranks)
        every: dict[bytes, Record] = {}
        for _ in range(chance.randint(1, 8)):
            tokens = [chance.randrange(2) for _ in range(chance.randint(1, 9))]
            for one in records(names_of(*tokens), written_at_s=chance.randrange(1, 10**6)):
                every[one[1]] = one
        held = [
            [one for one in every.values() if chance.random() < chance.choice((0.8, 0.97, 1.0))]
            for _ in range(ranks)
        ]
        for told in held:
            chance.shuffle(told)
            cut = chance.randint(0, len(told))
            warm.tell(told[:cut])
            warm.tell(told[cut:], last=True)
        common = set.intersection(*({one[1] for one in told} for told in held))
        whole: set[bytes] = set()
        for name in sorted(common, key=lambda one: every[one][3]):
            if every[name][2] == NO_PARENT or every[name][2] in whole:
                whole.add(name)
        told_by_any = {one[1] for told in held for one in told}
        forgotten = warm.finish()
        listed = {
            names[at : at + 32] for _, names in warm.host.catalog.names(1) for at in range(0, len(names), 32)
        }
        assert listed == whole, f"seed {seed}"
        assert forgotten == keys(told_by_any - whole), f"seed {seed}"
