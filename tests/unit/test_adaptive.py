"""The adaptive policy: by the suite that is shipped, against its oracle, and what is its alone."""

import random
from collections.abc import Sequence

import pytest
from fakes import FakeRequest, FakeStep

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import HopResult, OffloadingWorkerMetadata, PoolReport, ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.base import Refusal
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.policies import AdaptivePolicy, EvictionPolicy
from kvtide.policies.adaptive import LEAST_REMEMBERED
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig
from kvtide.testing import NaiveLRU, NaivePolicy, PolicyTests
from kvtide.testing.ladder_days import LadderDay
from kvtide.testing.naive_adaptive import NaiveAdaptive
from kvtide.testing.workloads import chained_hashes


class TestUntoldIsLRU(PolicyTests):
    """Whoever never says that a request has come gets LRU."""

    seeds = range(12)

    def make_policy(self) -> EvictionPolicy:
        return AdaptivePolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveLRU()


class Asked:
    """A host tier that is asked one prompt after the other, as the oracle is."""

    def __init__(self, capacity: int, seed: int = 1) -> None:
        self.policy = AdaptivePolicy(seed)
        self.manager = CPUOffloadingManager(self.policy, frees_ahead=False)
        self.manager.grow(capacity)
        self.visits = 0

    def request(self, hashes: list[bytes], now_s: float) -> tuple[int, list[bytes], int]:
        self.visits += 1
        ctx = ReqContext(str(self.visits), None, self.visits)
        run = ChunkRun(hashes, 0, 1, 0, len(hashes))
        hits = self.manager.lookup(run, ctx).ready_count
        self.manager.visited(run, ctx, now_s)
        self.manager.touch(run, ctx)
        output = self.manager.prepare_store(run, ctx)
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, output.store_spec, ctx, success=True)
        self.manager.keep_room()
        return hits, [key[:-4] for key in output.evicted_keys], len(output.keys_to_store)


def prompts(seed: int, count: int) -> list[tuple[float, list[bytes]]]:
    """Sessions that go on after a while, shared beginnings, and much that is seen once."""
    chance, now_s, sessions, found = random.Random(seed), 0.0, [], []
    for number in range(count):
        now_s += chance.expovariate(0.5)
        if sessions and chance.random() < 0.6:
            tokens = chance.choice(sessions[-12:])
            if chance.random() < 0.7:
                tokens += [number * 10 + at for at in range(chance.randint(1, 3))]
        else:
            tokens = [chance.randint(0, 3)] * chance.randint(0, 4) + [10 * number + 1] * chance.randint(1, 4)
            sessions.append(tokens)
        found.append((now_s, chained_hashes(tokens[:14])))
    return found


@pytest.mark.parametrize(("seed", "capacity"), [(1, 1), (2, 5), (3, 12), (4, 30), (5, 60), (6, 17)])
def test_hits_victims_and_what_is_stored_agree_with_the_oracle(seed: int, capacity: int) -> None:
    host, oracle = Asked(capacity), NaiveAdaptive(capacity)
    for now_s, hashes in prompts(seed, 330):
        assert host.request(hashes, now_s) == oracle.request(hashes, now_s)
        assert host.policy.ranks_by_recency == oracle.recency
    host.manager.check_invariants(idle=True)


def test_a_day_repeats() -> None:
    days = prompts(9, 500)
    hosts = [Asked(25, seed=3), Asked(25, seed=3)]
    first, second = ([host.request(hashes, now_s) for now_s, hashes in days] for host in hosts)
    assert first == second


def test_what_is_asked_for_once_is_soon_not_stored_and_what_comes_back_stays() -> None:
    host, hot, cold = Asked(20), [chained_hashes([tenant] * 4) for tenant in range(4)], 0
    for number in range(1500):
        now_s = 3.0 * number
        host.request(hot[number % 4], now_s)
        hits, _, stored = host.request(chained_hashes([10_000 + number] * 8), now_s + 1)
        assert not hits
        cold += stored if number >= 300 else 0
    assert cold < 1200 * 8 * 0.2, "of what nobody asks for again little is written"
    late = [host.request(hashes, 5000.0 + at)[0] for at, hashes in enumerate(hot)]
    assert late == [4, 4, 4, 4]


def test_a_request_that_is_told_twice_counts_once_and_the_clock_never_goes_back() -> None:
    policy = AdaptivePolicy()
    policy.resize(8)
    keys = chained_hashes([1, 2, 3])
    policy.visited(1, 50.0, keys, ())
    policy.visited(1, 60.0, keys, ())
    policy.visited(2, 10.0, keys, ())
    policy.visited(3, float("nan"), keys, ())
    policy.visited(4, float("-inf"), keys, ())
    policy.visited(5, float("inf"), keys, ())
    policy.visited(6, 70.0, [], ())
    policy.inserted(1, 3, 7, 0)
    policy.touched(1, 7)
    policy.offer(1)
    assert policy.victim() is not None
    for visit in range(8, 200):
        policy.visited(visit, 1e9, keys, ((1, 3),))
        policy.touched(1, visit)
    assert policy.victim() is not None


def test_what_it_remembers_is_bounded_however_many_ask() -> None:
    policy = AdaptivePolicy()
    policy.resize(50)
    for visit in range(1, 2200):
        policy.visited(visit, float(visit), chained_hashes([visit] * 3), ())
    assert policy.remembered_count <= 2 * LEAST_REMEMBERED
    for visit in range(2200, 2300):
        policy.visited(
            visit, float(visit), [bytes([visit % 256, at % 256, at // 256]) for at in range(8192)], ()
        )
    assert policy.remembered_count <= 2 * LEAST_REMEMBERED


class Capricious(AdaptivePolicy):
    """Refuses and cuts where a number says so: the books must bear it."""

    def seams(self, visit: int, start: int, stop: int) -> list[int]:
        return [at for at in range(start + 1, stop) if (visit + at) % 3 == 0]

    def joins(self, run: int, visit: int) -> bool:
        return visit % 2 == 0

    def yields(self, visit: int, position: int) -> bool:
        return self.victim() is not None and (visit * 7 + position * 5) % 4 < 2


def test_books_bear_whatever_is_refused() -> None:
    refused = set()
    for seed in range(24):
        chance = random.Random(seed)
        manager = CPUOffloadingManager(Capricious(), frees_ahead=seed % 2 == 0)
        manager.grow(chance.choice((3, 8, 20, 60)))
        storing, loading = [], []
        for visit in range(1, 90):
            ctx = ReqContext(str(visit), None, visit)
            hashes = chained_hashes([chance.randint(0, 1) for _ in range(chance.randint(1, 12))])
            run = ChunkRun(hashes, 0, 1, 0, len(hashes))
            manager.visited(run, ctx, 1.5 * visit)
            manager.touch(run, ctx)
            free = manager.free_count
            output = manager.prepare_store(run, ctx)
            assert manager.free_count == free + len(output.evicted_keys) - len(output.keys_to_store)
            refused.add(output.refusal)
            if output.keys_to_store:
                storing.append((output, ctx))
            ready = manager.lookup(run, ctx).ready_count
            if ready and chance.random() < 0.3:
                part = run.between(0, ready)
                loading.append((part, manager.prepare_load(part, ctx), ctx))
            while storing and chance.random() < 0.6:
                ended, whose = storing.pop(chance.randrange(len(storing)))
                success = chance.random() < 0.8
                manager.complete_store(ended.keys_to_store, ended.store_spec, whose, success)
            while loading and chance.random() < 0.5:
                manager.complete_load(*loading.pop())
            manager.keep_room()
            manager.check_invariants(idle=False)
    assert {Refusal.BYPASSED, Refusal.POOL_FULL, None} <= refused


def test_tiers_below_bear_whatever_is_refused(monkeypatch) -> None:
    for name in ("AdaptivePolicy", "ARCPolicy"):
        monkeypatch.setattr(f"kvtide.testing.ladder_half.{name}", Capricious)
    skipped = 0
    for seed in range(700, 712):
        day = LadderDay(seed)
        try:
            day.run(120)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        skipped += sum(count for key, count in day.scheduler.metrics().data.items() if "bypassed" in key)
    assert skipped


def test_the_scheduler_half_says_who_has_come_and_does_not_offer_again_what_was_refused() -> None:
    group = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 1, 4)
    policy, metrics = Refusing(), MetricsDelta()
    manager = CPUOffloadingManager(policy, metrics=metrics)
    scheduler = OffloadingConnectorScheduler(SchedulerOffloadConfig(KVGeometry((group,))), manager, metrics)
    pools = {0: PoolReport(4, 4, 64)}
    scheduler.update_connector_output(OffloadingWorkerMetadata(pools=pools), 0.0)
    jobs = []
    for name, now_s in (("first", 1.0), ("second", 2.0)):
        request = FakeRequest(name, [ord(name[0])] * 16)
        scheduler.on_new_request(request, now_s)
        assert scheduler.get_num_new_matched_tokens(request, 0, now_s) == (0, False)
        scheduler.update_state_after_alloc(
            request, ([*range(1 + 8 * len(jobs), 5 + 8 * len(jobs))],), 0, now_s
        )
        meta = scheduler.build_connector_meta(FakeStep({name: 16}), now_s)
        jobs.append([job.job_id for job in meta.jobs])
        results = {(job.job_id, 0): {0: HopResult.DONE} for job in meta.jobs}
        scheduler.update_connector_output(OffloadingWorkerMetadata(results=results), now_s)
        asked = policy.asked
        for step in range(5):
            scheduler.build_connector_meta(FakeStep({name: 1}), now_s + step)
        assert policy.asked == asked, "nobody asks again what was answered"
    assert [len(one) for one in jobs] == [1, 0]
    assert [visit for visit, _ in policy.told] == [1, 1, 2, 2], "on arrival, and when it is admitted"
    assert metrics.data["skipped_store_chunks|bypassed"] == 4
    scheduler.check_invariants()


class Refusing(AdaptivePolicy):
    """Finds whatever is there worth more than what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, float]] = []
        self.asked = 0

    def visited(
        self, visit: int, now_s: float, keys: Sequence[bytes], runs: Sequence[tuple[int, int]]
    ) -> None:
        self.told.append((visit, now_s))
        super().visited(visit, now_s, keys, runs)

    def yields(self, visit: int, position: int) -> bool:
        self.asked += 1
        return self.victim() is not None
