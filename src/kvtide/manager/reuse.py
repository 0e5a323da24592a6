"""Admission: whether a chunk is asked for often enough to be worth storing.

Counts how many different requests have offered a chunk, in a bounded table. Works before any tier.
"""

from collections import OrderedDict
from collections.abc import Sequence


class ReuseFilter:
    """Admits a chunk once ``threshold`` different requests have offered it.

    Args:
        threshold: 1 admits at first sight and keeps no table.
        entries: Chunks that are remembered; the one offered longest ago is forgotten first.
    """

    def __init__(self, threshold: int, entries: int) -> None:
        self._threshold = threshold
        self._entries = entries
        self._offers: OrderedDict[bytes, frozenset[str]] = OrderedDict()

    def admitted(self, hashes: Sequence[bytes], request_id: str) -> int:
        """Count one offer of each chunk by this request.

        Returns:
            How many leading chunks are admitted: a chunk without its parent could not be read.
        """
        if self._threshold <= 1:
            return len(hashes)
        admitted, prefix = 0, True
        for block_hash in hashes:
            offers = self._offers.pop(block_hash, frozenset())
            if len(offers) < self._threshold:
                offers = offers | {request_id}
            self._offers[block_hash] = offers
            prefix = prefix and len(offers) >= self._threshold
            admitted += prefix
        while len(self._offers) > self._entries:
            self._offers.popitem(last=False)
        return admitted

    def __len__(self) -> int:
        return len(self._offers)
