"""What is each policy's alone: the rule of its paper in a handful of chunks."""

from typing import TypeVar

import pytest
from test_catalog import walk

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.catalog import CatalogGroup
from kvtide.policies import EvictionPolicy, GDSFPolicy, LFUPolicy, LRUPolicy, S3FIFOPolicy, SievePolicy
from kvtide.policies.greedy_dual import GreedyDual
from kvtide.policies.lru import ALL
from kvtide.testing import ComparedHost, NaiveGDSF, NaiveLFU, NaivePolicy, NaiveS3FIFO, NaiveSieve
from kvtide.testing.workloads import chained_hashes

Policy = TypeVar("Policy", bound=EvictionPolicy)


class Asked(ComparedHost):
    """Both tiers, asked for short prompts by one request after another."""

    def __init__(self, policy: EvictionPolicy, oracle: NaivePolicy, capacity: int) -> None:
        super().__init__(policy, oracle)
        self.policy = policy
        self._visits = 0
        self.grow(capacity)

    def ask(self, *tokens: int, visit: int = 0) -> list[str]:
        """Use a prompt, store what is missing; say what left for it."""
        before, hashes = len(self.evicted), chained_hashes(tokens)
        self._names = getattr(self, "_names", {}) | {
            hashes[index]: ".".join(map(str, tokens[: index + 1])) for index in range(len(tokens))
        }
        self._visits = max(self._visits + (not visit), visit)
        visit = visit or self._visits
        storing = self.store(ChunkRun(hashes, 0, 1, 0, len(hashes)), ReqContext(str(visit), None, visit))
        if storing is not None:
            self.end_store(storing)
        self.check()
        return [self._names[chunk] for chunk in self.evicted[before:]]

    def ask_each(self, *tokens: int) -> list[str]:
        return [name for token in tokens for name in self.ask(token)]


def s3fifo(capacity: int) -> Asked:
    return Asked(S3FIFOPolicy(), NaiveS3FIFO(), capacity)


def sizes(host: Asked) -> tuple[int, int, int]:
    assert isinstance(host.policy, S3FIFOPolicy)
    return host.policy.sizes


# -- S3-FIFO ----------------------------------------------------------------------------------------


def test_what_is_never_asked_for_again_leaves_from_s_and_its_name_is_kept() -> None:
    host = s3fifo(20)
    assert host.ask_each(*range(25)) == ["0", "1", "2", "3", "4"]
    assert sizes(host) == (20, 0, 5)


def test_a_name_that_is_asked_for_again_comes_back_into_m() -> None:
    host = s3fifo(20)
    host.ask_each(*range(22))
    assert host.ask(1) == ["2"]
    assert sizes(host) == (19, 1, 2), "1 has left G, and 2 has come into it"


def test_two_uses_bring_a_chunk_to_m_one_does_not() -> None:
    host = s3fifo(20)
    host.ask_each(*range(20), 0, 0, 1)
    assert host.ask(50) == ["1"]
    assert sizes(host) == (19, 1, 1)


def test_a_request_that_comes_back_to_a_prefix_has_used_it_once() -> None:
    host = s3fifo(20)
    host.ask_each(*range(20))
    for _ in range(5):
        host.ask(0, visit=100)
    assert host.ask(50) == ["0"]


def test_names_are_kept_of_as_many_as_m_has_room_for() -> None:
    host = s3fifo(20)
    host.ask_each(*range(100))
    assert sizes(host) == (20, 0, 18)


def test_a_scan_leaves_m_alone() -> None:
    host = s3fifo(20)
    host.ask_each(*range(10), *range(10), *range(10))
    left = host.ask_each(*range(100, 300))
    assert not set(left) & {str(token) for token in range(10)}
    assert sizes(host)[:2] == (10, 10)


def test_in_m_a_use_is_paid_with_another_round() -> None:
    host = s3fifo(10)
    host.ask_each(*range(10), *range(10), *range(10))
    host.ask(50)  # all have gone to M, from where the first one leaves
    host.ask_each(1, 3)
    assert host.ask_each(60) == ["50"], "S is full with one"
    assert sizes(host)[:2] == (1, 9)
    assert host.ask_each(1, 1, 1, 1) == []
    host.evict(7)
    assert sizes(host)[:2] == (0, 3)
    assert [token for token in range(10) if host.lookup(run(token), ReqContext("x")).ready_count] == [1, 3, 9]


def test_what_comes_to_m_while_a_victim_is_looked_for_is_looked_at_too() -> None:
    policy = S3FIFOPolicy()
    policy.resize(100)
    policy.inserted(1, 1, visit=1, depth=0)
    for visit in (2, 3, 4):
        policy.touched(1, visit)
    policy.offer(1)
    assert policy.victim() == (1, 1)
    assert policy.sizes == (0, 1, 0)


def test_more_than_three_uses_are_not_told_apart() -> None:
    policy = holding(S3FIFOPolicy(), 10, {1: 1, 2: 1})
    for visit in (3, 4):
        policy.touched(1, visit)
        policy.touched(2, visit)
    assert policy.victim() == (1, 1)
    assert policy.sizes == (0, 2, 0)
    for visit in range(10, 30):
        policy.touched(1, visit)
    for visit in range(30, 33):
        policy.touched(2, visit)
    assert policy.victim() == (1, 1)


def test_who_had_to_stay_in_s_goes_to_m_with_the_use_that_is_enough() -> None:
    policy = holding(S3FIFOPolicy(), 10, {1: 1, 2: 1})
    policy.withdraw(1)
    assert policy.victim() == (2, 1)
    policy.touched(1, visit=10)
    assert policy.sizes == (2, 0, 0)
    policy.touched(1, visit=11)
    assert policy.sizes == (1, 1, 0)


def test_who_had_to_stay_in_m_and_is_used_has_another_round() -> None:
    policy = holding(S3FIFOPolicy(), 10, {1: 1, 2: 1, 3: 1})
    for visit in (10, 11):
        policy.touched(1, visit)
        policy.touched(2, visit)
    assert policy.victim() == (3, 1)
    policy.removed(3)
    policy.withdraw(1)
    assert policy.victim() == (2, 1)
    policy.touched(1, visit=12)
    policy.offer(1)
    assert policy.victim() == (2, 1)


def test_s_gives_until_it_is_as_small_as_it_should_be() -> None:
    policy = holding(S3FIFOPolicy(), 20, {1: 1, 2: 3})
    policy.touched(1, visit=10)
    policy.touched(1, visit=11)
    assert policy.victim() == (2, 2)
    policy.shrunk(2, 2)
    assert policy.victim() == (1, 1), "S has one, and should have two"


def test_where_m_had_nothing_s_gives_no_more_than_it_has_to() -> None:
    policy = holding(S3FIFOPolicy(), 100, {1: 1, 2: 5})
    policy.touched(1, visit=10)
    policy.touched(1, visit=11)
    assert policy.victim() == (2, 1), "on the way 1 came to M"
    policy.shrunk(2, 1)
    assert policy.victim() == (1, 1)


@pytest.mark.parametrize("make", [S3FIFOPolicy, SievePolicy, LFUPolicy, GDSFPolicy])
def test_an_older_request_that_comes_back_is_no_new_use(make) -> None:
    policy = holding(make(), 10, {8: 1, 9: 1})
    for visit in (3, 4, 5):
        policy.touched(8, visit)
        policy.touched(9, visit)
    assert policy.victim() in {(8, 1), (8, ALL)}
    assert policy.joins(8, visit=8)


# -- SIEVE ------------------------------------------------------------------------------------------


def test_who_was_used_stays_in_place_and_the_hand_goes_on() -> None:
    """Worked out by hand from algorithm 1: the hand stops where it evicted, and a hit moves nobody."""
    host = Asked(SievePolicy(), NaiveSieve(), 7)
    host.ask_each(1, 2, 3, 4, 5, 6, 7)
    host.ask_each(1, 2, 7)
    assert host.ask(8) == ["3"]
    assert host.ask(9) == ["4"]
    host.ask(2)
    assert host.ask_each(10, 11) == ["5", "6"]
    assert host.ask(12) == ["8"], "7 was used"
    assert host.ask_each(13, 14, 15, 16) == ["9", "10", "11", "12"]
    assert host.ask_each(17, 18, 19, 20) == ["13", "14", "15", "16"], "the hand has not come round"


def test_the_hand_comes_round_when_nothing_new_is_left() -> None:
    host = Asked(SievePolicy(), NaiveSieve(), 3)
    host.ask_each(1, 2, 3, 1, 2, 3)
    assert host.ask(4) == ["1"], "all were used, none since"
    host.ask(4)
    assert host.ask_each(5, 6) == ["2", "3"]


def test_what_had_to_stay_when_the_hand_came_leaves_as_soon_as_it_may() -> None:
    host = Asked(SievePolicy(), NaiveSieve(), 4)
    host.ask(1)
    host.ask(2)
    host.ask(1, 5)  # extends 1, and has used it
    host.ask(3)
    assert host.ask_each(6, 7) == ["2", "1.5"]
    assert host.ask(8) == ["3"], "1 was used when the hand came"


def test_what_had_to_stay_and_is_used_meanwhile_survives_this_round() -> None:
    policy = holding(SievePolicy(), 10, {1: 1, 2: 1, 3: 1})
    policy.withdraw(1)
    assert policy.victim() == (2, ALL)
    policy.touched(1, visit=10)
    policy.offer(1)
    order = []
    while (named := policy.victim()) is not None:
        order.append(named[0])
        policy.removed(named[0])
    assert order == [2, 3, 1]


# -- LFU and GDSF -----------------------------------------------------------------------------------


def test_who_is_used_more_often_outlives_who_was_used_later_for_a_while() -> None:
    host = Asked(LFUPolicy(), NaiveLFU(), 3)
    host.ask_each(1, 1, 1, 1, 1)
    left = host.ask_each(*range(10, 30))
    assert left.index("1") == 8, (
        "five uses, against a floor that rises by one each time the other two have left"
    )


def test_without_newcomers_the_least_used_leaves_first() -> None:
    host = Asked(LFUPolicy(), NaiveLFU(), 4)
    host.ask_each(1, 2, 3, 4, 1, 2, 4, 4, 1, 1)
    host.evict(4)
    assert [host._names[chunk] for chunk in host.evicted] == ["3", "2", "4", "1"]


def test_of_two_that_are_used_as_often_the_one_that_costs_less_leaves() -> None:
    host = Asked(GDSFPolicy(), NaiveGDSF(), 6)
    host.ask(1, 1, 1, 1)
    host.ask(2)
    assert host.ask(3, 3) == ["2"]
    assert host.ask(4) == ["3.3"], "and a long prompt goes when the floor is as high"


def test_what_is_left_of_a_prompt_is_worth_less_than_the_whole() -> None:
    policy = holding(GDSFPolicy(), 10, {1: 5, 2: 4})
    policy.withdraw(2)
    assert policy.victim() == (1, ALL)
    policy.shrunk(1, 2)
    policy.offer(2)
    assert policy.victim() == (1, ALL)


@pytest.mark.parametrize("policy", [LFUPolicy(), GDSFPolicy()])
def test_what_may_leave_and_may_not_in_turns_takes_no_memory(policy: GreedyDual) -> None:
    for number in range(1, 6):
        policy.inserted(number, 1000, visit=number, depth=0)
    for round_number in range(1000):
        for number in range(1, 6):
            policy.offer(number)
            policy.touched(number, visit=round_number)
            policy.withdraw(number)
            policy.offer(number)
            if number < 5 and round_number < 900:
                policy.shrunk(number, 1)
    assert len(policy._heap) < 100


# -- all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [S3FIFOPolicy, SievePolicy, LFUPolicy, GDSFPolicy])
def test_no_search_looks_at_more_than_it_may(make, monkeypatch) -> None:
    for limit in ("recency.SCAN_LIMIT", "s3fifo.SCAN_LIMIT", "sieve.SCAN_LIMIT", "greedy_dual.RAISE_LIMIT"):
        monkeypatch.setattr(f"kvtide.policies.{limit}", 3)
    policy = make()
    policy.resize(100)
    for number in range(1, 12):
        policy.inserted(number, 1, visit=number, depth=0)
        policy.offer(number)
        for visit in (20, 21):
            policy.touched(number, visit)
        if number < 11:
            policy.withdraw(number)
    answers = [policy.victim()]
    while answers[-1] is None and len(answers) < 20:
        answers.append(policy.victim())
    assert answers[-1] is not None, "not now is not never"
    assert answers[-1][0] == 11
    assert 3 < len(answers) < 10


PAIRS = [
    (S3FIFOPolicy,),
    (S3FIFOPolicy, None),
    (SievePolicy, S3FIFOPolicy),
    (GDSFPolicy, LFUPolicy),
    (LRUPolicy, SievePolicy),
]
KINDS = [(CatalogGroup(),), (CatalogGroup(), CatalogGroup(window=2))]


@pytest.mark.parametrize("groups", KINDS, ids=str)
@pytest.mark.parametrize("tiers", PAIRS, ids=str)
def test_any_order_of_calls_in_several_tiers_agrees_with_dicts(groups, tiers) -> None:
    for seed in range(5, 7):
        for losses in (0, 0.15) if len(tiers) > 1 else (0,):
            walk(seed, groups, [None if policy is None else policy() for policy in tiers], losses=losses)


def holding(policy: Policy, capacity: int, counts: dict[int, int]) -> Policy:
    """Fill a policy with runs of so many chunks, each of a visit of its own number."""
    policy.resize(capacity)
    for number, count in counts.items():
        policy.inserted(number, count, visit=number, depth=0)
        policy.touched(number, visit=number)
        policy.offer(number)
    return policy


def run(*tokens: int) -> ChunkRun:
    hashes = chained_hashes(tokens)
    return ChunkRun(hashes, 0, 1, 0, len(hashes))
