"""What every eviction policy has to do: a suite to subclass.

    class TestMine(PolicyTests):
        def make_policy(self):
            return MyPolicy()

        def make_oracle(self):
            return NaiveMine()

The oracle is the algorithm chunk by chunk (``NaivePolicy``). Both are driven through the production host tier
and its naive model: each answer, each victim and the order of victims have to agree.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.policies import EvictionPolicy
from kvtide.testing.compared_host import ComparedHost
from kvtide.testing.naive_policies import NaivePolicy
from kvtide.testing.workloads import RandomDay, chained_hashes

A, B, C, D = 1, 2, 3, 4
CAPACITY = 100


class PolicyTests:
    """The contract, sentence by sentence, and random days.

    Attributes:
        seeds: Of the random days.
        steps: What happens in one of them.
    """

    seeds: range = range(60)
    steps: int = 80

    def make_policy(self) -> EvictionPolicy:
        """Make the policy under test."""
        raise NotImplementedError

    def make_oracle(self) -> NaivePolicy:
        """Make what it is held against."""
        raise NotImplementedError

    # -- the policy alone -----------------------------------------------------------------------

    def _policy(self, *runs: int, count: int = 3) -> EvictionPolicy:
        """Make one that holds these runs, the least recently used first, each of a visit of its own."""
        policy = self.make_policy()
        policy.resize(CAPACITY)
        for run in runs:
            _insert(policy, run, count)
        return policy

    def test_where_nothing_is_there_is_no_victim(self) -> None:
        assert _named(self._policy()) is None

    def test_where_nobody_may_leave_there_is_no_victim(self) -> None:
        policy = self._policy(A, B)
        policy.withdraw(A)
        policy.withdraw(B)
        assert _named(policy) is None

    def test_a_victim_is_named_until_it_has_left(self) -> None:
        policy = self._policy(A, B)
        assert [_named(policy), _named(policy)] == [A, A]
        policy.shrunk(A, 1)
        assert _named(policy) == A, "it stays where it is"
        _leave(policy, A)
        assert _named(policy) == B

    def test_a_run_that_must_stay_is_no_victim_and_comes_back_with_its_recency(self) -> None:
        policy = self._policy(A, B, C)
        policy.withdraw(A)
        assert _named(policy) == B
        policy.offer(A)
        assert _named(policy) == A
        policy.withdraw(A)
        policy.withdraw(B)
        assert _named(policy) == C
        policy.offer(B)
        assert _named(policy) == B
        policy.offer(A)
        assert _named(policy) == A

    def test_offered_or_withdrawn_twice_is_once(self) -> None:
        policy = self._policy(A, B)
        policy.offer(A)
        policy.withdraw(A)
        policy.withdraw(A)
        assert _named(policy) == B
        policy.offer(A)
        policy.offer(A)
        assert _named(policy) == A
        policy.withdraw(A)
        assert _named(policy) == B

    def test_a_use_refreshes_also_while_a_run_must_stay(self) -> None:
        policy = self._policy(A, B, C)
        policy.touched(A, visit=A)
        assert _named(policy) == B
        policy.withdraw(B)
        assert _named(policy) == C
        policy.touched(B, visit=B)
        policy.offer(B)
        assert _order(policy) == [C, A, B]

    def test_a_run_that_was_passed_over_and_used_since_counts_from_that_use(self) -> None:
        policy = self._policy(A, B, C)
        policy.withdraw(A)
        assert _named(policy) == B
        policy.offer(A)
        policy.touched(A, visit=A)
        for run in (A, B, C):
            policy.withdraw(run)
        assert _named(policy) is None
        policy.offer(A)
        policy.offer(B)
        assert _order(policy) == [B, A]

    def test_a_number_that_comes_back_is_another_run(self) -> None:
        policy = self._policy(A, B)
        policy.touched(A, visit=7)
        policy.withdraw(B)
        policy.removed(A)
        assert _named(policy) is None
        policy.inserted(A, 3, visit=8, depth=0)
        policy.touched(A, visit=8)
        assert _named(policy) is None, "nobody offered this one"
        policy.offer(A)
        policy.offer(B)
        assert _order(policy) == [B, A], "it begins with its own first use"

    def test_a_number_that_comes_back_is_not_the_one_that_had_to_stay(self) -> None:
        policy = self._policy(A, B)
        policy.withdraw(A)
        assert _named(policy) == B, "A was passed over"
        policy.removed(A)
        _insert(policy, A, 3)
        assert _order(policy) == [B, A]

    def test_a_split_keeps_the_history_on_both_parts(self) -> None:
        policy = self._policy(A, B)
        policy.split(A, head=C, head_count=1)
        assert _named(policy) == A, "the end leaves first, and still before what was used later"
        policy.removed(A)
        assert _named(policy) == B, "the head was not offered"
        policy.offer(C)
        assert _order(policy) == [C, B]

    def test_a_split_of_a_run_that_was_passed_over_keeps_the_history_on_both_parts(self) -> None:
        policy = self._policy(A, B, C)
        policy.withdraw(A)
        policy.withdraw(B)
        assert _named(policy) == C
        policy.split(A, head=D, head_count=2)
        policy.offer(B)
        policy.offer(D)
        policy.offer(A)
        order = _order(policy)
        assert sorted(order[:2]) == [A, D]
        assert order[2:] == [B, C]

    def test_the_part_of_a_split_that_is_used_alone_is_the_more_recent(self) -> None:
        policy = self._policy(A, B)
        policy.split(A, head=C, head_count=1)
        policy.offer(C)
        policy.touched(C, visit=A)
        assert _order(policy) == [A, B, C]

    def test_chunks_that_join_a_run_leave_with_it(self) -> None:
        policy = self._policy(A, B)
        if policy.joins(A, visit=A):
            policy.grown(A, 2)
            policy.touched(A, visit=A)
            assert _order(policy) == [B, A]

    def test_clear_forgets_every_run(self) -> None:
        policy = self._policy(A, B)
        policy.withdraw(A)
        assert _named(policy) == B
        policy.clear()
        assert _named(policy) is None
        assert policy.forgotten() is None
        _insert(policy, B, 1)
        _insert(policy, A, 1)
        assert _order(policy) == [B, A]

    def test_many_that_must_stay_cost_time_and_not_a_victim(self) -> None:
        policy = self._policy(*range(1, 10_001), count=1)
        policy.resize(20_000)
        for run in range(1, 10_000):
            policy.withdraw(run)
        asked = 1
        while _named(policy) is None:
            asked += 1
            assert asked <= 100, "not now is not never"
        assert _named(policy) == 10_000
        for run in (9000, 17, 5000):
            policy.offer(run)
        assert _order(policy) == [17, 5000, 9000, 10_000]

    # -- in the host tier -----------------------------------------------------------------------

    def _host(self, capacity: int) -> ComparedHost:
        host = ComparedHost(self.make_policy(), self.make_oracle())
        host.grow(capacity)
        return host

    def test_what_extends_a_chunk_leaves_before_it(self) -> None:
        host = self._host(6)
        _store(host, [1, 2, 3], visit=1)
        _store(host, [1, 2, 4, 5], visit=2)
        host.evict(100)
        leaving = [*host.evicted]
        for tokens in ([1, 2, 3], [1, 2, 4, 5]):
            path = chained_hashes(tokens)
            assert [chunk for chunk in leaving if chunk in path] == path[::-1]

    def test_everything_can_leave_and_come_back(self) -> None:
        host = self._host(4)
        for visit in range(1, 30):
            _store(host, [visit % 3, *range(visit % 4)], visit)
            host.evict(visit % 5)
        host.evict(100)
        assert host.manager.used_count == 0
        _store(host, [9, 9, 9, 9], visit=100)
        assert host.manager.used_count == 4

    def test_what_is_read_stays_and_leaves_afterwards(self) -> None:
        host = self._host(4)
        _store(host, [1, 2], visit=1)
        loading = host.load(_run([1, 2]), ReqContext("reader"))
        _store(host, [3, 4], visit=2)
        host.evict(100)
        assert host.manager.used_count == 2
        host.end_load(loading, ReqContext("reader"))
        host.evict(100)
        assert host.manager.used_count == 0

    def test_after_a_reset_nothing_is_remembered(self) -> None:
        host = self._host(4)
        for visit in range(1, 20):
            _store(host, [visit % 5, visit % 2], visit)
        host.reset()
        for visit in range(20, 40):
            _store(host, [visit % 5, visit % 2], visit)

    def test_a_growing_pool_keeps_what_was_learnt(self) -> None:
        host = self._host(1)
        for visit in range(1, 60):
            _store(host, [visit * visit % 7, visit % 3, visit % 2][: 1 + visit % 3], visit)
            host.grow(1 + visit // 5)

    def test_a_loop_a_little_larger_than_the_pool(self) -> None:
        host = self._host(9)
        for visit in range(1, 60):
            _store(host, [visit % 10], visit)

    def test_a_shared_prompt_among_many_that_are_seen_once(self) -> None:
        host = self._host(12)
        for visit in range(1, 80):
            _store(host, [0, 0, 0, 0, visit, visit][: 6 if visit % 3 else 4], visit)

    def test_a_branch_at_every_chunk(self) -> None:
        host = self._host(40)
        for round_number in range(1, 4):
            for depth in range(1, 16):
                _store(host, [0] * depth + [round_number], visit=100 * round_number + depth)
        host.evict(17)
        _store(host, [0] * 16, visit=1000)

    def test_large_pieces_leave_as_single_chunks_would(self) -> None:
        host = self._host(64)
        for visit in range(1, 40):
            _store(host, [visit % 9] * (1 + visit % 17), visit)
            host.evict((0, 1, 11, 30)[visit % 4])

    def test_any_day_agrees_with_the_oracle(self) -> None:
        for seed in self.seeds:
            with _said(f"seed {seed}"):
                host = ComparedHost(self.make_policy(), self.make_oracle(), threshold=1 + (seed % 7 == 0))
                RandomDay(seed, host).run(self.steps)

    def test_any_long_day_in_a_small_pool_agrees_with_the_oracle(self) -> None:
        for seed in self.seeds[::10]:
            with _said(f"seed {seed}"):
                host = ComparedHost(self.make_policy(), self.make_oracle())
                RandomDay(seed, host, capacity=6 + seed % 20).run(8 * self.steps)


def _insert(policy: EvictionPolicy, run: int, count: int) -> None:
    policy.inserted(run, count, visit=run, depth=0)
    policy.touched(run, visit=run)
    policy.offer(run)


def _named(policy: EvictionPolicy) -> int | None:
    named = policy.victim()
    assert named is None or named[1] >= 1, f"{named}: no chunk at all"
    return None if named is None else named[0]


def _leave(policy: EvictionPolicy, run: int) -> None:
    """Let all of a run go, and its name as well."""
    if not policy.remembers or policy.remember(run):
        policy.removed(run)


def _order(policy: EvictionPolicy) -> list[int]:
    """In which order the runs would leave."""
    order: list[int] = []
    while (run := _named(policy)) is not None:
        policy.removed(run)
        order.append(run)
    return order


def _run(tokens: list[int]) -> ChunkRun:
    return ChunkRun(chained_hashes(tokens), 0, 1, 0, len(tokens))


def _store(host: ComparedHost, tokens: list[int], visit: int) -> None:
    storing = host.store(_run(tokens), ReqContext(f"request {visit}", None, visit))
    if storing is not None:
        host.end_store(storing)
    host.check()


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Say which round it was, whatever goes wrong in it."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise
