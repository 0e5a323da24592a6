"""A trace through the host tier alone: what its production books would hit with so many slots.

One request at a time and no engine in front: every prompt is looked up, used and stored at once. So the only
thing that decides is who leaves and who is let in. Time to first token, lower tiers and requests that
overlap are asked of the whole path.
"""

from collections.abc import Callable, Mapping

from kvtide.manager.alone import ask
from kvtide.manager.base import OffloadingManager
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.reuse import ReuseFilter
from kvtide.policies.base import EvictionPolicy
from kvtide.policies.lru import LRUPolicy
from kvtide.policies.named import POLICIES
from kvtide.sim.accesses import Accesses
from kvtide.sim.outcome import Outcome

SECOND_SIGHT = "second_sight"
FILTER_ENTRIES = 65_536
"""Blocks whose offers second sight counts: the default of the setting ``store_filter_entries``."""


def replay(
    accesses: Accesses, manager: OffloadingManager, passed: Callable[[int], object] = lambda _: None
) -> Outcome:
    """Ask a manager for every prompt of a trace.

    Args:
        accesses: The trace.
        manager: Has its slots, and nothing in them.
        passed: Told how many requests have gone by since it was told last.
    """
    passed(accesses.request_count - accesses.asking_count)
    hits = stored = evicted = 0
    for visit, (arrival_s, hashes) in enumerate(accesses.prompts(), start=1):
        found = ask(manager, hashes, visit, arrival_s)
        hits += found.hit_count
        stored += found.stored_count
        evicted += found.evicted_count
        passed(1)
    return Outcome(accesses.access_count, hits, stored, evicted)


def managers() -> Mapping[str, Callable[[], CPUOffloadingManager]]:
    """Give what can be replayed, by name: every policy, and second sight, which is LRU with admission."""
    return {name: _with_policy(factory) for name, factory in POLICIES.items()} | {
        SECOND_SIGHT: lambda: CPUOffloadingManager(
            LRUPolicy(), ReuseFilter(2, FILTER_ENTRIES), frees_ahead=False
        )
    }


def manager_of(name: str, capacity: int) -> CPUOffloadingManager:
    """Build an empty manager with so many slots, none of which is kept free.

    Raises:
        KeyError: Nobody is called that.
    """
    manager = managers()[name]()
    manager.grow(capacity)
    return manager


def _with_policy(factory: Callable[[], EvictionPolicy]) -> Callable[[], CPUOffloadingManager]:
    return lambda: CPUOffloadingManager(factory(), frees_ahead=False)
