"""The policies of the literature, by the suite that is shipped."""

from typing import get_args

from kvtide.config import POLICY_NAMES
from kvtide.policies import EvictionPolicy, GDSFPolicy, LFUPolicy, S3FIFOPolicy, SievePolicy
from kvtide.policies.lru import ALL
from kvtide.policies.named import POLICIES
from kvtide.testing import NaiveGDSF, NaiveLFU, NaivePolicy, NaiveS3FIFO, NaiveSieve, PolicyTests


class TestS3FIFO(PolicyTests):
    seeds = range(20)

    def make_policy(self) -> EvictionPolicy:
        return S3FIFOPolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveS3FIFO()


class TestSieve(PolicyTests):
    seeds = range(20)

    def make_policy(self) -> EvictionPolicy:
        return SievePolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveSieve()


class TestLFU(PolicyTests):
    seeds = range(20)

    def make_policy(self) -> EvictionPolicy:
        return LFUPolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveLFU()


class TestGDSF(PolicyTests):
    seeds = range(20)

    def make_policy(self) -> EvictionPolicy:
        return GDSFPolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveGDSF()

    def test_the_part_of_a_split_that_is_used_alone_is_the_more_recent(self) -> None:
        """Not here: it is the cheaper part, too, and leaves before what was used earlier and lies deeper."""
        policy = self._policy(1, 2)
        policy.split(1, head=3, head_count=1)
        policy.touched(3, visit=1)
        policy.removed(1)
        policy.offer(3)
        assert policy.victim() == (3, ALL)


def test_every_policy_has_a_name_in_the_settings_and_every_name_a_policy() -> None:
    assert list(get_args(POLICY_NAMES)) == list(POLICIES)
