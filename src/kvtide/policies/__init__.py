"""Eviction policies, one file per algorithm."""

from kvtide.policies.base import EvictionPolicy
from kvtide.policies.lru import LRUPolicy

__all__ = ["EvictionPolicy", "LRUPolicy"]
