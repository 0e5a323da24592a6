"""Policies by the names that settings and replays use."""

from collections.abc import Callable, Mapping

from kvtide.policies.adaptive import AdaptivePolicy
from kvtide.policies.arc import ARCPolicy
from kvtide.policies.base import EvictionPolicy
from kvtide.policies.lru import LRUPolicy

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LRUPolicy,
    "arc": ARCPolicy,
    "adaptive": AdaptivePolicy,
}
