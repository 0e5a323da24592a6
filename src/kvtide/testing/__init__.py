"""Shipped for authors of parts: doubles that inject faults or decide when things happen, and a suite."""

from kvtide.testing.clock import VirtualClock
from kvtide.testing.compared_host import ComparedHost
from kvtide.testing.faulty import Ending, Fate, FaultPlan, FaultyDevice
from kvtide.testing.faulty_tiers import FaultyTier, HeldTier, SlowTier, TierCall
from kvtide.testing.held import HeldDevice
from kvtide.testing.ladder_days import LadderDay
from kvtide.testing.lane_faults import CallFate, LanePlan
from kvtide.testing.lazy_cuda import ForbiddenAccessError, LazyCuda
from kvtide.testing.memory_tier import MemoryTier, Records
from kvtide.testing.naive_fifo import NaiveS3FIFO, NaiveSieve
from kvtide.testing.naive_greedy import NaiveGDSF, NaiveLFU
from kvtide.testing.naive_host import NaiveHost
from kvtide.testing.naive_ladder import NaiveLadder
from kvtide.testing.naive_policies import NaiveARC, NaiveLRU, NaivePolicy
from kvtide.testing.policies import PolicyTests
from kvtide.testing.tiers import PrivateTierTests, TierTests
from kvtide.testing.virtual_lane import VirtualLane
from kvtide.testing.workloads import RandomDay

__all__ = [
    "CallFate",
    "ComparedHost",
    "Ending",
    "Fate",
    "FaultPlan",
    "FaultyDevice",
    "FaultyTier",
    "ForbiddenAccessError",
    "HeldDevice",
    "HeldTier",
    "LadderDay",
    "LanePlan",
    "LazyCuda",
    "MemoryTier",
    "NaiveARC",
    "NaiveGDSF",
    "NaiveHost",
    "NaiveLFU",
    "NaiveLRU",
    "NaiveLadder",
    "NaivePolicy",
    "NaiveS3FIFO",
    "NaiveSieve",
    "PolicyTests",
    "RandomDay",
    "Records",
    "SlowTier",
    "TierCall",
    "PrivateTierTests",
    "TierTests",
    "VirtualClock",
    "VirtualLane",
]
