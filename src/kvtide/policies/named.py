"""Policies by the names that settings and replays use."""

from collections.abc import Callable, Mapping

from kvtide.policies.adaptive import AdaptivePolicy
from kvtide.policies.arc import ARCPolicy
from kvtide.policies.base import EvictionPolicy
from kvtide.policies.gdsf import GDSFPolicy
from kvtide.policies.lfu import LFUPolicy
from kvtide.policies.lru import LRUPolicy
from kvtide.policies.s3fifo import S3FIFOPolicy
from kvtide.policies.sieve import SievePolicy

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LRUPolicy,
    "arc": ARCPolicy,
    "s3fifo": S3FIFOPolicy,
    "sieve": SievePolicy,
    "lfu": LFUPolicy,
    "gdsf": GDSFPolicy,
    "adaptive": AdaptivePolicy,
}
