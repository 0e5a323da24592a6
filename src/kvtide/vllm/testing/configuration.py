"""The configurations a simulation goes through, and what a seed adds to one.

A configuration fixes what the table of all of them is about; what is left (layout, chunks, limits, budget of
a step) is drawn from the seed.
"""

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtide.manager.lower import Demotion
from kvtide.vllm.testing.draws import draw_model
from kvtide.vllm.testing.shape import EngineShape, Runner, Siblings

WITH_TIERS = 0.45
"""Share of walks with tiers below host memory."""

SORTS = {"disk": 4, "disk and memory": 1.5, "memory": 1, "disk and shared": 2, "shared": 3}
"""Of tiers, and how often; the nearest is named first."""

DEMOTIONS = tuple(demotion.value for demotion in Demotion)

RECORD_BYTES = 8192
"""What a small record takes on a disk."""

FLUSH_LIMIT_S = 0.02
"""Of the engines under test; a step may wait so long for a copy."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the table.

    Attributes:
        asynchronous: ``AsyncScheduler``.
        runner: In whose order the workers are called.
        rank_count: Ranks.
        small: Pools in which requests preempt one another and chunks leave all the time.
        policy: Who leaves the host pool.
    """

    asynchronous: bool
    runner: Runner
    rank_count: int
    small: bool
    policy: str

    @property
    def name(self) -> str:
        """Short, and accepted by ``named``."""
        kind, size = "async" if self.asynchronous else "sync", "small" if self.small else "large"
        return f"{kind}/{self.runner.value}/{self.rank_count}/{size}/{self.policy}"

    def shape(self, chance: random.Random, disk: Path | None = None, tiers: str = "") -> EngineShape:
        """Draw the rest.

        Args:
            chance: The only source of choice.
            disk: A folder for a disk tier; None for an engine without tiers below host memory.
            tiers: With such ones for certain: a part of names in ``SORTS``.
        """
        model = draw_model(chance, self.rank_count)
        layout = chance.randrange(4)
        shape = EngineShape(
            chance.choice((22, 30, 44) if self.small else (130, 200, 260)),
            model.groups,
            self.asynchronous,
            self.runner,
            self.rank_count,
            block_first=layout < 2,
            token_first=layout % 2 == 1,
            budget_tokens=chance.choice((17, 33, 64, 129) if self.small else (33, 64, 129, 256)),
            priority=chance.random() < 0.3,
            siblings=chance.choice((Siblings.NONE, Siblings.NONE, Siblings.BEFORE, Siblings.AFTER)),
            with_events=chance.random() < 0.3,
            host_pages=chance.choice((1, 1, 2, 4) if self.small else (1, 8, 32)),
            family=model.family,
            stages=model.stages,
            guesses=model.guesses,
            match_tokens=model.match_tokens,
            retention_tokens=model.retention_tokens,
            settings={
                "eviction_policy": self.policy,
                "blocks_per_chunk": chance.choice((1, 1, 2, 3)),
                "store_threshold": chance.choice((1, 1, 1, 2)),
                "offload_prompt_only": chance.random() < 0.15,
                "flush_limit_s": FLUSH_LIMIT_S,
                "defer_limit_s": chance.choice((0.0, 0.05, 0.5)),
                "transfer_deadline_s": chance.choice((0.3, 2.0)),
                "store_queue": chance.choice((4096, 1 << 20, 1 << 20)),
                "self_test": chance.random() < 0.2,
                "store_policy": chance.choice(("eager", "eager", "lazy")),
            },
        )
        if disk is None or (chance.random() > WITH_TIERS and not tiers):
            return shape
        # Little host memory, so that much of it is below, and mostly time to bring it back.
        return replace(
            shape,
            host_pages=chance.choice((1, 1, 2, 4)),
            names_limit=chance.choice((24, 200, None)),
            settings={
                **shape.settings,
                "defer_limit_s": chance.choice((0.0, 0.05, 0.5, 0.5)),
                **self._tiers(chance, disk, tiers),
            },
        )

    def _tiers(self, chance: random.Random, disk: Path, tiers: str) -> dict[str, Any]:
        """Draw tiers below host memory: mostly a disk, often another one below or instead of it."""
        sorts = {sort: weight for sort, weight in SORTS.items() if tiers in sort}
        sort = chance.choices(list(sorts), list(sorts.values()))[0]
        settings: dict[str, Any] = {
            "promotion_share": chance.choice((0.01, 0.1, 0.25, 0.9)),
            # Who was reset otherwise asks a shared tier no more.
            "reset_keeps_tiers": chance.random() < (0.5 if "shared" in sort else 0.25),
        }
        if "disk" in sort:
            records = chance.choice((6, 100, 400, 400) if self.small else (30, 400, 1000))
            settings |= {
                "disk": str(disk),
                "disk_limit": records * RECORD_BYTES * self.rank_count,
                "disk_reserve": 0,
                "disk_direct": False,
                "disk_threads": chance.choice((1, 2, 4)),
                "disk_queue": chance.choice((3 * RECORD_BYTES, 30 * RECORD_BYTES, 1 << 20, 1 << 20)),
                "disk_deadline_s": chance.choice((0.05, 0.5)),
                "disk_demotion": chance.choice(DEMOTIONS),
                "disk_eviction_policy": chance.choice(("lru", "arc")),
            }
        if "memory" in sort:
            other = {
                "class": "kvtide.testing.memory_tier.MemoryTier",
                "name": "memory",
                "limit": chance.choice((4000, 40_000, 200_000)) * self.rank_count,
                "threads": chance.choice((1, 4)),
                "queue": chance.choice((2048, 1 << 20, 1 << 20)),
                "deadline_s": chance.choice((0.05, 0.5)),
                "demotion": chance.choice(DEMOTIONS),
                "eviction_policy": chance.choice(("lru", "arc")),
            }
            settings["tiers"] = [other]
        if "shared" in sort:
            settings["tiers"] = [self._shared(chance, str(disk.with_name("store")))]
            settings["probe_wait_s"] = chance.choice((0.01, 0.05, 0.05, 0.2))
        return settings

    def _shared(self, chance: random.Random, store: str) -> dict[str, Any]:
        """Draw a tier that others use too; what it takes from one rank it has no limit for."""
        return {
            "class": "kvtide.testing.shared_memory_tier.SharedMemoryTier",
            "name": "shared",
            "threads": chance.choice((1, 4)),
            "queue": chance.choice((2048, 1 << 20, 1 << 20)),
            "deadline_s": chance.choice((0.05, 0.5)),
            "demotion": chance.choice(DEMOTIONS),
            "eviction_policy": chance.choice(("lru", "arc")),
            "options": {
                "store": store,
                "run_chunks": chance.choice((1, 2, 5, 16)),
                "limit_bytes": chance.choice((0, 0, 10_000, 60_000)) * self.rank_count,
                "evicts": chance.choice(("oldest", "random")),
                "seed": chance.randrange(1 << 30),
            },
        }


CONFIGURATIONS = tuple(
    Configuration(*values)
    for values in itertools.product(
        (False, True), tuple(Runner), (1, 2, 4), (True, False), ("lru", "arc", "adaptive")
    )
)


def named(name: str) -> Configuration:
    """Find a configuration.

    Raises:
        KeyError: There is none of this name.
    """
    return {one.name: one for one in CONFIGURATIONS}[name]
