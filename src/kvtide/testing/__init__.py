"""Shipped for authors of parts: doubles that inject faults or decide when things happen, and a suite."""

from kvtide.testing.compared_host import ComparedHost
from kvtide.testing.held import HeldDevice
from kvtide.testing.naive_host import NaiveHost
from kvtide.testing.naive_policies import NaiveARC, NaiveLRU, NaivePolicy
from kvtide.testing.policies import PolicyTests
from kvtide.testing.workloads import RandomDay

__all__ = [
    "ComparedHost",
    "HeldDevice",
    "NaiveARC",
    "NaiveHost",
    "NaiveLRU",
    "NaivePolicy",
    "PolicyTests",
    "RandomDay",
]
