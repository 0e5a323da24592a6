"""The ghosts of one tier: production managers of several sizes, all asked for the same requests.

Where they would hold more than they may, they take a sample of the sessions and are as much smaller: the
fewer sessions share the smaller cache as all of them share the whole one (SHARDS does so for blocks:
Waldspurger et al., FAST 2015). What most sessions share is in the sample as a whole, so room for it is not
made smaller. Knows fingerprints; does not know requests beyond their numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.adviser.distinct import DistinctCount
from kvtide.adviser.window import Window
from kvtide.advising import FINGERPRINT_BYTES, GhostTier
from kvtide.manager.alone import ask, keep
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.reuse import ReuseFilter
from kvtide.metrics import GHOST_TIMES as TIMES
from kvtide.policies.named import POLICIES

REFERENCE = TIMES.index("1")

TRUNK_SHARE = 4
"""Of a ghost, one part in so many at most is taken to be filled by what most sessions share."""

LEAST_HITS = 0.05
"""Of what a sample asks for, that a cache that keeps everything has to hit for it to be corrected."""

_HASHES = 1 << 64


@dataclass(frozen=True, slots=True)
class Asked:
    """What all requests have asked for, in or out of a sample.

    Attributes:
        queried_chunks: With repetitions.
        distinct_chunks: Without, about.
    """

    queried_chunks: int
    distinct_chunks: float


class TierGhosts:
    """One manager for each size.

    Args:
        tier: Whose ghosts.
        host_chunks: Of host memory.
        most_chunks: That all of them may hold together; infinite for no bound.

    Attributes:
        name: Of the tier.
        share: Of the sessions, what is seen.
        window: What was hit lately.
    """

    def __init__(self, tier: GhostTier, host_chunks: int, most_chunks: float) -> None:
        self._tier = tier
        self.name = tier.name
        self._sizes = sizes_of(tier, host_chunks)
        self.share = min(1.0, most_chunks / sum(self._sizes))
        self._below = int(self.share * _HASHES)
        self._trunk_count = 0
        self.window = Window(len(TIMES), REFERENCE)
        self._queried_chunks = 0
        self._distinct = DistinctCount() if self.share < 1.0 else None
        self._hit_tokens: NDArray[np.float64] = np.zeros(len(TIMES))
        self._told_tokens: NDArray[np.float64] = np.zeros(len(TIMES))
        self.clear()

    def clear(self) -> None:
        """Empty every ghost; what was counted stays."""
        tier = self._tier
        entries = max(1, int(tier.filter_entries * self.share))
        self._managers = [
            CPUOffloadingManager(
                POLICIES[tier.policy](), ReuseFilter(tier.store_threshold, entries), frees_ahead=False
            )
            for _ in TIMES
        ]
        self._grow()

    def note_trunk(self, chunk_count: int) -> None:
        """Make room for what most sessions share."""
        if chunk_count > self._trunk_count and self.share < 1.0:
            self._trunk_count = chunk_count
            self._grow()

    @property
    def chunk_counts(self) -> list[int]:
        """Chunks that each ghost holds."""
        return [manager.used_count for manager in self._managers]

    @property
    def capacities(self) -> list[int]:
        """Chunks that each ghost may hold."""
        return [manager.capacity for manager in self._managers]

    def takes(self, session: int) -> bool:
        """Whether a session is in the sample, given 64 bits that stand for it."""
        return session < self._below

    def ask(self, chunks: Sequence[bytes], visit: int, now_s: float) -> list[int]:
        """Say how many chunks each ghost has of a prompt; then they keep of it what is worth it."""
        return [ask(manager, chunks, visit, now_s).hit_count for manager in self._managers]

    def keep(self, chunks: Sequence[bytes], visit: int) -> None:
        """Store what a request has grown by."""
        for manager in self._managers:
            keep(manager, chunks, visit)

    def count(self, bucket: int, chunks: bytes, queried_tokens: int, hit_tokens: Sequence[int]) -> None:
        """Take note of a request that was asked for."""
        self._queried_chunks += len(chunks) // FINGERPRINT_BYTES
        if self._distinct is not None:
            self._distinct.add(chunks)
        self._hit_tokens += hit_tokens
        self.window.add(bucket, queried_tokens, hit_tokens)

    def take_hit_tokens(self, everybody: Asked) -> NDArray[np.float64]:
        """Say how many tokens each ghost had since this was last asked, scaled up to all requests."""
        news = self._hit_tokens - self._told_tokens
        self._told_tokens = self._hit_tokens.copy()
        if not self._queried_chunks:
            return news
        return news * (everybody.queried_chunks / self._queried_chunks) * self.correction(everybody)

    def correction(self, everybody: Asked) -> float:
        """Say by how much the sample is less lucky than all requests are.

        A cache that keeps everything misses every chunk once and hits it ever after. What it would hit is
        known of all requests and of the sample, and goes with what smaller caches hit: a ratio estimator
        (Cochran, *Sampling Techniques*, 1977, chapter 6). 1 without a sample, and where next to nothing is
        to be hit.
        """
        if self._distinct is None or not self._queried_chunks:
            return 1.0
        mine = 1.0 - self._distinct.estimate() / self._queried_chunks
        theirs = 1.0 - everybody.distinct_chunks / everybody.queried_chunks
        return theirs / mine if mine >= LEAST_HITS and theirs >= LEAST_HITS else 1.0

    def _grow(self) -> None:
        for manager, size in zip(self._managers, self._sizes, strict=True):
            shared = min(self._trunk_count, size // TRUNK_SHARE) * (1.0 - self.share)
            manager.grow(max(1, int(size * self.share + shared)))


def sizes_of(tier: GhostTier, host_chunks: int) -> list[int]:
    """Say how many chunks ghosts of a tier have to hold to stand for it, unsampled."""
    beside = host_chunks if tier.extends_host else 0
    return [max(1, int(float(times) * tier.chunk_count)) + beside for times in TIMES]


def shared_out(wanted: Sequence[int], most_chunks: int) -> list[float]:
    """Divide what may be held among tiers: who wants less than an equal part leaves the rest to the others.

    Args:
        wanted: Chunks that the ghosts of each tier would hold unsampled.
        most_chunks: That all of them may hold.
    """
    parts = [0.0] * len(wanted)
    left = float(most_chunks)
    by_size = sorted(range(len(wanted)), key=wanted.__getitem__)
    for done, index in enumerate(by_size):
        parts[index] = min(float(wanted[index]), left / (len(wanted) - done))
        left -= parts[index]
    return parts
