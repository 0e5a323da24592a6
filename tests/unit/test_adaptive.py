"""The adaptive policy: by the suite that is shipped, against its oracle, and what is its alone."""

import random

import pytest

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.policies import AdaptivePolicy, EvictionPolicy
from kvtide.testing import NaiveLRU, NaivePolicy, PolicyTests
from kvtide.testing.naive_adaptive import NaiveAdaptive
from kvtide.testing.workloads import chained_hashes


class TestUntoldIsLRU(PolicyTests):
    """Whoever never says that a request has come gets LRU."""

    seeds = range(20)

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
