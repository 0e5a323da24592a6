"""Which record is in which slot, of so many that they must not be objects.

A dictionary of bytes and numbers is passed over by the garbage collector; a hundred thousand objects in it
would stop the whole process for a tenth of a second, again and again.
"""

from collections.abc import Iterator, MutableMapping

from kvtide.keys import OffloadKey
from kvtide.tiers.slabs import Place

_CLASS_BITS = 16


class DiskEntries(MutableMapping[OffloadKey, Place]):
    """Slots by key."""

    def __init__(self) -> None:
        self._codes: dict[OffloadKey, int] = {}
        self._sizes: list[int] = []  # payload bytes of each class of slots
        self._classes: dict[int, int] = {}

    def __getitem__(self, key: OffloadKey) -> Place:
        return self._place(self._codes[key])

    def __setitem__(self, key: OffloadKey, place: Place) -> None:
        number = self._classes.get(place.payload_bytes)
        if number is None:
            number = self._classes[place.payload_bytes] = len(self._sizes)
            self._sizes.append(place.payload_bytes)
        self._codes[key] = place.slot << _CLASS_BITS | number

    def __delitem__(self, key: OffloadKey) -> None:
        del self._codes[key]

    def __contains__(self, key: object) -> bool:
        return key in self._codes

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._codes)

    def __len__(self) -> int:
        return len(self._codes)

    def take(self, count: int) -> list[Place]:
        """Take out some, in no order."""
        return [self._place(self._codes.popitem()[1]) for _ in range(min(count, len(self._codes)))]

    def _place(self, code: int) -> Place:
        return Place(self._sizes[code & ((1 << _CLASS_BITS) - 1)], code >> _CLASS_BITS)
