"""What stands at the moment, as numbers for metrics. Knows books to be read; changes nothing in them."""

from collections.abc import Collection

from kvtide.jobs import Direction, PoolReport
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.scheduler.open_jobs import OpenJobs


class Gauges:
    """Sets the gauges that have changed since they were last set."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], int] = {}

    def set(
        self,
        metrics: MetricsDelta,
        manager: CPUOffloadingManager,
        jobs: OpenJobs,
        pools: Collection[PoolReport],
        slot_bytes: int,
    ) -> None:
        """Say how things stand.

        Args:
            metrics: Where to set.
            manager: Of host memory.
            jobs: Open ones.
            pools: What the ranks have reported.
            slot_bytes: Of one slot, all ranks together.
        """
        budget_slots = min((pool.slot_count for pool in pools), default=0)
        stores = sum(status.job.direction is Direction.STORE for status in jobs)
        gauges = {
            ("pool_budget_bytes", ""): budget_slots * slot_bytes,
            ("pool_capacity_bytes", ""): manager.capacity * slot_bytes,
            ("pool_used_bytes", ""): manager.used_count * slot_bytes,
            ("pool_pinned_bytes", ""): manager.pinned_count * slot_bytes,
            ("open_store_bytes", ""): jobs.store_chunk_count * slot_bytes,
            ("open_jobs", Direction.STORE.value): stores,
            ("open_jobs", Direction.LOAD.value): len(jobs) - stores,
        }
        for (name, label), value in gauges.items():
            if self._last.get((name, label)) != value:
                metrics.set(name, value, label)
        self._last = gauges
