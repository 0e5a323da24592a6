"""The adaptive policy: by the suite that is shipped, and by what a request tells it."""

from kvtide.policies import AdaptivePolicy, EvictionPolicy
from kvtide.testing import NaiveLRU, NaivePolicy, PolicyTests


class TestUntoldIsLRU(PolicyTests):
    def make_policy(self) -> EvictionPolicy:
        return AdaptivePolicy()

    def make_oracle(self) -> NaivePolicy:
        return NaiveLRU()
