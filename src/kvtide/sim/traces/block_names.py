"""Numbers of blocks, as traces have them, and block hashes, as everything else wants them."""

from collections.abc import Iterable, Sequence

KEPT = 1 << 20
"""Names that are kept, so that equal blocks share one object: some 100 MiB."""


class BlockNames(dict[int, bytes]):
    """Block hashes by number: 12 bytes each, a space of numbers and the number in it.

    Args:
        space: Numbers of different spaces never name the same block.
    """

    def __init__(self, space: int) -> None:
        super().__init__()
        self._space = space.to_bytes(4, "big")

    def __missing__(self, number: int) -> bytes:
        name = self[number] = self._space + number.to_bytes(8, "big")
        return name

    def of(self, numbers: Iterable[int]) -> list[bytes]:
        """Name blocks."""
        if len(self) > KEPT:
            self.clear()
        return list(map(self.__getitem__, numbers))


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
