"""Numbers of blocks, as traces have them, and block hashes, as everything else wants them."""

from collections.abc import Sequence
from typing import Protocol

import xxhash

KEPT = 1 << 20
"""Names that are kept, so that equal blocks share one object: some 100 MiB."""


class BlockNames(Protocol):
    """Makes block hashes of numbers."""

    def of(self, numbers: Sequence[int], step: int) -> list[bytes]:
        """Name the blocks of a prompt, each ``step`` of them as one."""


class NumberedNames(dict[int, bytes]):
    """Of numbers that stand for a block and all before it: 12 bytes, a space of numbers and the number in it.

    Args:
        space: Numbers of different spaces never name the same block.
    """

    def __init__(self, space: int) -> None:
        super().__init__()
        self._space = space.to_bytes(4, "big")

    def __missing__(self, number: int) -> bytes:
        name = self[number] = self._space + number.to_bytes(8, "big")
        return name

    def of(self, numbers: Sequence[int], step: int = 1) -> list[bytes]:
        """Name the blocks of a prompt; the last of several names them all."""
        if len(self) > KEPT:
            self.clear()
        return list(map(self.__getitem__, numbers[step - 1 :: step]))


class ChainedNames:
    """Of numbers of which nobody says whether they stand for what is before a block, too: 16 bytes.

    Each name is a hash of the number and the name before it; of numbers that were chained, nothing is lost.

    Args:
        space: See ``NumberedNames``.
    """

    def __init__(self, space: int) -> None:
        self._space = space.to_bytes(4, "big")

    def of(self, numbers: Sequence[int], step: int = 1) -> list[bytes]:
        """Name the blocks of a prompt; the last of several names them all."""
        names: list[bytes] = []
        above = self._space
        for number in numbers:
            above = xxhash.xxh3_128_digest(above + number.to_bytes(8, "big"))
            names.append(above)
        return names[step - 1 :: step]


def twice(names: Sequence[bytes]) -> int | None:
    """Find a block that a prompt has a second time: then hashes are not chained. None for none."""
    if len(set(names)) == len(names):
        return None
    seen: set[bytes] = set()
    for index, name in enumerate(names):
        if name in seen:
            return index
        seen.add(name)
    return None
