"""Eviction policies, one file per algorithm."""

from kvtide.policies.arc import ARCPolicy
from kvtide.policies.base import EvictionPolicy
from kvtide.policies.gdsf import GDSFPolicy
from kvtide.policies.lfu import LFUPolicy
from kvtide.policies.lru import LRUPolicy
from kvtide.policies.s3fifo import S3FIFOPolicy
from kvtide.policies.sieve import SievePolicy

__all__ = [
    "ARCPolicy",
    "EvictionPolicy",
    "GDSFPolicy",
    "LFUPolicy",
    "LRUPolicy",
    "S3FIFOPolicy",
    "SievePolicy",
]
