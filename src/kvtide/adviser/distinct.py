"""How many different chunks there were, about, in memory that does not grow with them.

HyperLogLog with linear counting for small numbers (Flajolet, Fusy, Gandouet and Meunier, AofA 2007). The
standard error is below 0.25 % at any number: 1.04 / sqrt(2^18), and less where registers are still empty.
"""

import numpy as np

BITS = 18
REGISTERS = 1 << BITS
_RANKS = 64 - BITS


class DistinctCount:
    """Counts different fingerprints."""

    def __init__(self) -> None:
        self._registers = np.zeros(REGISTERS, dtype=np.uint8)

    def add(self, chunks: bytes) -> None:
        """Take in fingerprints, one after another; they are hashes, and spread evenly as they are."""
        words = np.frombuffer(chunks, dtype=np.uint64)
        rest = words >> np.uint64(BITS)
        lowest = rest & (~rest + np.uint64(1))
        # The lowest bit that is set, counted from one: log2 of a power of two is exact.
        ranks = np.full(len(words), _RANKS + 1, dtype=np.uint8)
        known = lowest > 0
        ranks[known] = np.log2(lowest[known].astype(np.float64)).astype(np.uint8) + 1
        np.maximum.at(self._registers, (words & np.uint64(REGISTERS - 1)).astype(np.int64), ranks)

    def estimate(self) -> float:
        """Say how many there were."""
        counts = np.bincount(self._registers, minlength=_RANKS + 2)
        harmonic = float((counts * 0.5 ** np.arange(len(counts))).sum())
        raw = 0.7213 / (1 + 1.079 / REGISTERS) * REGISTERS * REGISTERS / harmonic
        empty = int(counts[0])
        return REGISTERS * float(np.log(REGISTERS / empty)) if raw <= 2.5 * REGISTERS and empty else raw
