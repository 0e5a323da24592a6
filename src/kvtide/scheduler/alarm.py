"""Whether what is kept is ever read: a cache that is only written costs and gives nothing.

Knows admissions and what host memory holds; does not know why nothing was hit.
"""

import logging

from kvtide.geometry import KVGeometry
from kvtide.manager.base import OffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.scheduler.lookup import readable_tokens
from kvtide.scheduler.state import RequestOffloadState

logger = logging.getLogger(__name__)

MISSES = 16
"""Requests that asked again for what host memory held and got nothing, before anybody got anything."""


class WriteOnlyAlarm:
    """Raised once at most, and never after a first hit: from then on it costs nothing.

    A prompt that is new is no reason: only what is ready in host memory, in a group that needs all of a
    prefix, and was computed again, counts.

    Args:
        geometry: Groups, blocks and chunks.
        manager: Which chunk is where.
        metrics: Where to count.
    """

    def __init__(self, geometry: KVGeometry, manager: OffloadingManager, metrics: MetricsDelta) -> None:
        self._geometry = geometry
        self._manager = manager
        self._metrics = metrics
        self._group = next((group for group in geometry.groups if group.looks_back), None)
        self._misses = 0
        self._missed_tokens = 0
        self._is_over = self._group is None

    def note_admission(self, state: RequestOffloadState, loaded_tokens: int) -> None:
        """Look at a request that is admitted with so many tokens to be loaded."""
        if self._is_over:
            return
        if loaded_tokens:
            self._is_over = True
            return
        missed_tokens = self._missed(state)
        if missed_tokens < self._geometry.restore_interval:
            return
        self._misses += 1
        self._missed_tokens += missed_tokens
        if self._misses >= MISSES:
            self._is_over = True
            self._metrics.add("write_only_alarms", 1)
            logger.warning(
                "host memory is written and never read: %d requests asked again for %d tokens that it holds,"
                " and nothing was brought back since the start; please report it",
                self._misses,
                self._missed_tokens,
            )

    def _missed(self, state: RequestOffloadState) -> int:
        """Count the tokens that this request could have got and computes."""
        request, group = state.request, self._group
        if group is None or state.load_failed or request.skip_reading_prefix_cache:
            return 0
        limit = readable_tokens(state, self._geometry, state.local_tokens)
        first, stop = state.local_tokens // group.tokens_per_chunk, limit // group.tokens_per_chunk
        if first >= stop:
            return 0
        ready = self._manager.lookup(group.run(request.block_hashes, first, stop), state.context).ready_count
        return (first + ready) * group.tokens_per_chunk - state.local_tokens
