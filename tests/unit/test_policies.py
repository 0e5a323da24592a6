"""Both policies, by the suite that is shipped; and what is ARC's alone."""

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.policies import ARCPolicy, EvictionPolicy, LRUPolicy
from kvtide.testing import ComparedHost, NaiveARC, NaiveLRU, NaivePolicy, PolicyTests, RandomDay
from kvtide.testing.workloads import chained_hashes


class TestLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return LRUPolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveLRU()


class TestARC(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return ARCPolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveARC()


class WatchedARC(ComparedHost):
    """Both tiers with ARC, whose lists and target are compared as well."""

    def __init__(self, capacity: int) -> None:
        self.policy, self.oracle = ARCPolicy(), NaiveARC()
        super().__init__(self.policy, self.oracle)
        self.targets: set[int] = set()
        self.visits: list[int] = []
        if capacity:
            self.grow(capacity)

    def ask(self, *tokens: int, visit: int = 0) -> list[bytes]:
        """Use a prompt, store what is missing; say which hashes left for it."""
        before = len(self.evicted)
        hashes = chained_hashes(tokens)
        visit = visit or 1 + max(self.visits, default=0)
        self.visits.append(visit)
        storing = self.store(ChunkRun(hashes, 0, 1, 0, len(hashes)), ReqContext(str(visit), None, visit))
        if storing is not None:
            self.end_store(storing)
        self.check()
        return self.evicted[before:]

    def check(self) -> None:
        super().check()
        t1, t2, b1, b2 = (
            len(one) for one in (self.oracle.t1, self.oracle.t2, self.oracle.b1, self.oracle.b2)
        )
        assert self.policy.sizes == (t1, t2, b1, b2)
        assert self.policy.target == self.oracle.p
        assert 0 <= self.policy.target <= self.oracle.c
        assert t1 + t2 <= self.oracle.c
        assert t1 + b1 <= self.oracle.c, "the names of B1 and T1 are as many as there is room for"
        assert t1 + t2 + b1 + b2 <= 2 * self.oracle.c
        self.targets.add(self.policy.target)


def name_of(*tokens: int) -> bytes:
    return chained_hashes(tokens)[-1]


def test_a_second_visit_makes_a_chunk_frequent_and_the_same_visit_does_not() -> None:
    host = WatchedARC(8)
    host.ask(1, 2, visit=1)
    host.ask(1, 2, visit=1)
    host.ask(1, 2, 3, visit=1)
    assert host.policy.sizes == (3, 0, 0, 0)
    host.ask(1, 2, visit=2)
    assert host.policy.sizes == (1, 2, 0, 0), "and only what was used again"
    host.ask(1, 2, 3, visit=1)
    assert host.policy.sizes == (1, 2, 0, 0), "nobody else has used the third"


def test_what_was_used_again_outlives_a_scan() -> None:
    host = WatchedARC(4)
    host.ask(1)
    host.ask(1)
    left = [chunk for token in range(10, 30) for chunk in host.ask(token)]
    assert name_of(1) not in left
    assert host.policy.sizes[:2] == (3, 1)


def test_a_name_that_is_asked_for_again_comes_back_as_frequent() -> None:
    host = WatchedARC(3)
    for token in (9, 9, 1, 2):
        host.ask(token)
    assert host.ask(3) == [name_of(1)]
    assert host.policy.sizes == (2, 1, 1, 0)
    assert host.ask(1) == [name_of(2)], "|T1| = 2 > p = 1"
    assert (host.policy.sizes, host.policy.target) == ((1, 2, 1, 0), 1)


def test_a_ghost_that_came_back_into_t1_would_cost_another_chunk() -> None:
    """Where vLLM's variant differs: it would put 1 into T1 again, |T1| = 2 > p, and 3 would leave for 4."""
    host = WatchedARC(3)
    for token in (9, 9, 1, 2, 3, 1):
        host.ask(token)
    assert (host.oracle.t1, host.oracle.t2) == ([name_of(3)], [name_of(9), name_of(1)])
    assert host.ask(4) == [name_of(9)], "|T1| = p = 1: T2 gives"


def test_p_grows_with_names_of_b1_and_shrinks_with_names_of_b2_within_its_bounds() -> None:
    host = WatchedARC(4)
    targets = []
    for token in (9, 9, 1, 2, 3, 4, 1, 2, 5, 6, 3):
        host.ask(token)
        targets.append(host.policy.target)
    assert targets == [0, 0, 0, 0, 0, 0, 1, 2, 2, 2, 4], "the last one by |B2| / |B1| = 2"
    tokens = {name_of(token): token for token in range(10)}
    while host.oracle.b2 and host.policy.target:
        host.ask(tokens[host.oracle.b2[-1]])
        targets.append(host.policy.target)
    assert targets[11:] == sorted(targets[11:], reverse=True)
    assert targets[-1] < 4


def test_lists_and_target_agree_after_every_step_of_any_day() -> None:
    reached: set[int] = set()
    for seed in range(1000, 1080):
        host = WatchedARC(0)
        try:
            RandomDay(seed, host).run(120)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        reached |= host.targets
    assert len(reached) > 5, "p has moved"


def test_a_name_that_is_offered_again_and_again_moves_p_once() -> None:
    host = WatchedARC(4)
    for token in (9, 9, 1, 2, 3, 4):
        host.ask(token)
    assert host.oracle.b1 == [name_of(1)]
    hashes, ctx = chained_hashes([1]), ReqContext("x", None, 50)
    for _ in range(3):
        assert host.store(ChunkRun(hashes, 0, 1, 0, 1), ctx, limit=1)
        host.end_store(host.storing[0], success=False)
        host.check()
    assert host.policy.target == 1


def test_what_is_passed_over_for_long_is_found_by_asking_again(monkeypatch) -> None:
    monkeypatch.setattr("kvtide.policies.recency.SCAN_LIMIT", 3)
    policy = LRUPolicy()
    for run in range(1, 12):
        policy.inserted(run, 1, visit=run, depth=0)
        policy.touched(run, visit=run)
    policy.offer(11)
    policy.offer(10)
    assert [policy.victim() for _ in range(3)] == [None, None, None]
    found = policy.victim()
    assert found is not None
    assert found[0] == 10
    policy.offer(4)
    found = policy.victim()
    assert found is not None
    assert found[0] == 4, "passed over, and still the one used longest ago"
