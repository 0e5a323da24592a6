"""What the adviser is told of requests, and how large the tiers are whose ghosts it keeps.

Once when a request comes and once when it ends, a few lines and no look at any book: all else is done where
nobody waits for it. Knows requests and tiers; does not know what a ghost is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvtide.advising import Adviser, Arrival, GhostPlan, GhostTier, Growth, HashView, Paces
from kvtide.manager.lower import LowerTier
from kvtide.metrics import HOST, MetricsDelta
from kvtide.scheduler.engine import EngineRequest
from kvtide.scheduler.pace import LoadPace, RecomputePace
from kvtide.scheduler.state import RequestOffloadState, SchedulerOffloadConfig

PLAN_EVERY = 64
"""Requests after which it is looked whether a tier has another size."""

CHANGED = 0.25
"""Of its size, by how much a tier has to change for ghosts to begin anew."""


class Advice:
    """Between the scheduler half and an adviser.

    Args:
        config: Geometry and limits.
        adviser: Who is told.
        tiers: What ghosts are kept of, host memory first; their sizes are filled in here.
        lower: Tiers below host memory, all of them.
        pace: How fast the engine computes.
        metrics: Where answers go.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        adviser: Adviser,
        tiers: Sequence[GhostTier],
        lower: Sequence[LowerTier],
        pace: RecomputePace,
        metrics: MetricsDelta,
    ) -> None:
        self._geometry = config.geometry
        self._prompt_only = config.offload_prompt_only
        self._adviser = adviser
        self._tiers = tuple(tiers)
        self._lower = {tier.plan.name: tier for tier in lower}
        self._pace = pace
        self._load_pace = LoadPace()
        self._metrics = metrics
        self._weights = _weights(config)
        self._slot_count = self._arrivals = 0
        self._planned: dict[str, int] = {}
        self._told: dict[int, int] = {}  # chunks of the prompts that have come, by visit

    def note_slots(self, slot_count: int) -> None:
        """Take note of the slots that host memory will have."""
        self._slot_count = slot_count

    def arrived(self, state: RequestOffloadState, now_s: float) -> None:
        """Tell of a request that has come; of one that reads no cache nothing is told."""
        request, visit = state.request, state.context.visit
        if not self._adviser.is_on or visit in self._told or request.skip_reading_prefix_cache:
            return
        if self._arrivals % PLAN_EVERY == 0 or not self._planned:
            self._plan()
        self._arrivals += 1
        count = self._geometry.finest.hashed_chunks(len(request.block_hashes))
        self._told[visit] = count
        arrival = Arrival(visit, now_s, request.num_prompt_tokens, b"", self._paces())
        self._adviser.arrived(arrival, self._hashes(request, 0, count))

    def finished(self, state: RequestOffloadState, request: EngineRequest) -> None:
        """Tell what a request has grown by when it ends."""
        count = self._told.pop(state.context.visit, None)
        if count is None or not self._adviser.is_on:
            return
        kept = count
        if not self._prompt_only:
            finest = self._geometry.finest
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            kept = min(finest.hashed_chunks(len(request.block_hashes)), finest.full_chunks(computed))
        visit = state.context.visit
        self._adviser.grown(Growth(visit, b""), self._hashes(request, count, max(count, kept)))

    def loaded(self, token_count: int, seconds: float) -> None:
        """Note that so many tokens were brought back from host memory."""
        self._load_pace.loaded(token_count, seconds)

    def take(self) -> None:
        """Add what has been answered to what was counted."""
        for answer in self._adviser.take():
            self._metrics.merge(dict(answer))

    def forget(self) -> None:
        """Note that every tier was emptied."""
        self._adviser.forget()

    def close(self) -> None:
        """End."""
        self._adviser.close()

    # -- inside ---------------------------------------------------------------------------------

    def _hashes(self, request: EngineRequest, start: int, stop: int) -> HashView:
        finest = self._geometry.finest
        step, ahead = finest.hashes_per_chunk, finest.lookahead_hashes
        first, last = (start + 1) * step - 1 + ahead, stop * step + ahead
        return HashView(request.block_hashes, first, last, step, stop - start)

    def _paces(self) -> Paces:
        per_chunk = sum(self._weights)
        tokens = self._geometry.finest.tokens_per_chunk
        read_s = tuple(self._lower[tier.name].chunk_read_s * per_chunk / tokens for tier in self._tiers[1:])
        return Paces(self._pace.seconds_for(1) or 0.0, self._load_pace.seconds_for(1) or 0.0, read_s)

    def _plan(self) -> None:
        """Say what ghosts are kept of, if that is not what was said last, about."""
        sizes = {name: count for name, count in self._sizes() if count > 0}
        if HOST not in sizes or _alike(sizes, self._planned):
            return
        self._planned = sizes
        tiers = tuple(
            replace(tier, chunk_count=sizes[tier.name]) for tier in self._tiers if tier.name in sizes
        )
        self._adviser.planned(GhostPlan(self._geometry.finest.tokens_per_chunk, tiers))

    def _sizes(self) -> Iterator[tuple[str, int]]:
        yield HOST, int(self._slot_count / sum(self._weights))
        for name in (tier.name for tier in self._tiers[1:]):
            lower = self._lower[name]
            chunk_bytes = sum(map(float.__mul__, self._weights, map(float, lower.record_bytes)))
            yield name, int(lower.capacity_bytes / chunk_bytes) if chunk_bytes else 0


def _alike(sizes: Mapping[str, int], planned: Mapping[str, int]) -> bool:
    return sizes.keys() == planned.keys() and all(
        abs(count - planned[name]) <= CHANGED * planned[name] for name, count in sizes.items()
    )


def _weights(config: SchedulerOffloadConfig) -> list[float]:
    """Say how many chunks of each group there are to one of the finest.

    Behind a window all chunks are written unless restore points are further apart; then what there is at
    these is little beside a group that looks back, and counts as nothing.
    """
    groups, finest = config.geometry.groups, config.geometry.finest
    counts_all = not config.restore_interval_tokens or not any(group.looks_back for group in groups)
    return [
        finest.tokens_per_chunk / group.tokens_per_chunk if counts_all or group.looks_back else 0.0
        for group in groups
    ]
