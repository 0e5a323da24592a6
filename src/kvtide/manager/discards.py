"""What the ranks of a tier are to forget, and on what somebody has decided while they tell what they hold.

Knows keys. Does not know which chunk is there: whoever keeps the tier's books says what has left it.
"""

from collections.abc import Iterable, Sequence

from kvtide.keys import ChunkRun, OffloadKey


class Discards:
    """Keys to forget, in the order in which they left."""

    def __init__(self) -> None:
        self._keys: list[OffloadKey] = []
        self._decided: set[OffloadKey] | None = None  # since ranks began to tell of an earlier life

    def __len__(self) -> int:
        """Count the keys that nobody was told of yet."""
        return len(self._keys)

    def watch(self, wanted: bool) -> None:
        """Begin, or end, to remember decisions; what was remembered before is forgotten."""
        self._decided = set() if wanted else None

    @property
    def is_watching(self) -> bool:
        """Whether decisions are remembered."""
        return self._decided is not None

    def decide(self, keys: Iterable[OffloadKey]) -> None:
        """Note that something was decided on chunks: what ranks tell of them is of before."""
        if self._decided is not None:
            self._decided.update(keys)

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Have ranks forget chunks, which is a decision."""
        self._keys += keys
        self.decide(keys)

    def undecided(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Leave out chunks on which somebody has decided."""
        return [key for key in keys if key not in self._decided] if self._decided else keys

    def first_decided(self, run: ChunkRun, start: int, stop: int) -> int:
        """Find the first of chunks ``[start, stop)`` on which somebody has decided; ``stop`` for none."""
        if self._decided:
            for at in range(start, stop):
                if run.between(at, at + 1)[0] in self._decided:
                    return at
        return stop

    def take(self) -> tuple[OffloadKey, ...]:
        """Hand out the keys."""
        keys, self._keys = tuple(self._keys), []
        return keys

    def clear(self) -> None:
        """Have ranks forget nothing of what they were not told yet; decisions stay."""
        self._keys = []
