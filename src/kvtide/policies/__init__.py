"""Eviction policies, one file per algorithm."""

from kvtide.policies.arc import ARCPolicy
from kvtide.policies.base import EvictionPolicy
from kvtide.policies.lru import LRUPolicy

__all__ = ["ARCPolicy", "EvictionPolicy", "LRUPolicy"]
