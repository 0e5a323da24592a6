"""Eviction policies, one file per algorithm."""

from kvtide.policies.adaptive import AdaptivePolicy
from kvtide.policies.arc import ARCPolicy
from kvtide.policies.base import EvictionPolicy, LearningPolicy
from kvtide.policies.lru import LRUPolicy

__all__ = ["ARCPolicy", "AdaptivePolicy", "EvictionPolicy", "LRUPolicy", "LearningPolicy"]
