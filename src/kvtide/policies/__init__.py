"""Eviction policies, one file per algorithm."""

from kvtide.policies.adaptive import AdaptivePolicy
from kvtide.policies.arc import ARCPolicy
from kvtide.policies.base import EvictionPolicy, LearningPolicy
from kvtide.policies.gdsf import GDSFPolicy
from kvtide.policies.lfu import LFUPolicy
from kvtide.policies.lru import LRUPolicy
from kvtide.policies.s3fifo import S3FIFOPolicy
from kvtide.policies.sieve import SievePolicy

__all__ = [
    "ARCPolicy",
    "AdaptivePolicy",
    "EvictionPolicy",
    "GDSFPolicy",
    "LFUPolicy",
    "LRUPolicy",
    "LearningPolicy",
    "S3FIFOPolicy",
    "SievePolicy",
]
