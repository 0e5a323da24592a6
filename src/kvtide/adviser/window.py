"""What was asked for and hit lately, and how sure that is.

A window over the last requests, in blocks that leave as a whole. Within it everything is kept by bucket of
sessions: requests of one session resemble each other, so that only whole sessions can be left out to see how
much an estimate depends on who came (the delete-one-group jackknife; Tukey 1958; Shao and Tu, *The Jackknife
and Bootstrap*, 1995, section 2.3). Knows numbers; does not know caches.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKETS = 32
"""Groups of sessions."""

BLOCK_REQUESTS = 1000
BLOCKS = 10
"""Of the window: the last nine to ten thousand requests."""

LEAST_REQUESTS = 1000
"""Below which nothing is said."""

WAITS = 4096
"""Requests whose time to first token is remembered."""


class Window:
    """Of one tier.

    Args:
        sizes: Ghosts of the tier.
        reference: Index of the one that gains are counted from.
    """

    def __init__(self, sizes: int, reference: int) -> None:
        self._reference = reference
        self._blocks: deque[NDArray[np.int64]] = deque(maxlen=BLOCKS)
        self._sizes = sizes
        self._begin()
        self._waits_s = np.full((WAITS, sizes), np.nan)
        self._wait_count = 0

    def _begin(self) -> None:
        # By bucket: tokens hit by each ghost, then tokens asked for.
        self._blocks.append(np.zeros((BUCKETS, self._sizes + 1), dtype=np.int64))
        self._filled = 0

    @property
    def request_count(self) -> int:
        """Requests in the window."""
        return (len(self._blocks) - 1) * BLOCK_REQUESTS + self._filled

    @property
    def is_telling(self) -> bool:
        """Whether these are enough to say anything."""
        return self.request_count >= LEAST_REQUESTS

    def add(self, bucket: int, queried: int, hits: Sequence[int]) -> None:
        """Count a request.

        Args:
            bucket: Of its session, below ``BUCKETS``.
            queried: Tokens it asked for.
            hits: Of them, those that each ghost had.
        """
        if self._filled == BLOCK_REQUESTS:
            self._begin()
        row = self._blocks[-1][bucket]
        row[:-1] += np.asarray(hits, dtype=np.int64)
        row[-1] += queried
        self._filled += 1

    def add_waits(self, seconds: Sequence[float]) -> None:
        """Note a request's time to first token with each ghost."""
        self._waits_s[self._wait_count % WAITS] = seconds
        self._wait_count += 1

    def points(self) -> NDArray[np.float64]:
        """Say how many of 100 tokens each ghost had: ``float64[sizes]``; 0 where nothing was asked for."""
        total = self._by_bucket().sum(axis=0)
        return np.asarray(100.0 * total[:-1] / max(1, total[-1]))

    def gains(self) -> NDArray[np.float64]:
        """Say how many points more than the reference each ghost had: ``float64[sizes]``."""
        points = self.points()
        return np.asarray(points - points[self._reference])

    def errors(self) -> NDArray[np.float64]:
        """Give the standard error of each gain, in points: ``float64[sizes]``; NaN of a single bucket."""
        by_bucket = self._by_bucket()
        by_bucket = by_bucket[by_bucket[:, -1] > 0]
        count = len(by_bucket)
        if count < 2:
            return np.full(self._sizes, np.nan)
        others = by_bucket.sum(axis=0) - by_bucket
        points = 100.0 * others[:, :-1] / others[:, -1:]
        gains = points - points[:, [self._reference]]
        spread = ((gains - gains.mean(axis=0)) ** 2).sum(axis=0)
        return np.asarray(np.sqrt((count - 1) / count * spread))

    def waits_s(self) -> NDArray[np.float64] | None:
        """Give the median time to first token with each ghost: ``float64[sizes]``.

        None when fewer requests than enough came with a pace.
        """
        if self._wait_count < LEAST_REQUESTS:
            return None
        return np.asarray(np.median(self._waits_s[: min(self._wait_count, WAITS)], axis=0))

    def _by_bucket(self) -> NDArray[np.int64]:
        return np.asarray(np.sum(self._blocks, axis=0))
