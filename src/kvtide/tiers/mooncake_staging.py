"""Which stretches of the staging buffer are in use.

Knows offsets; does not know memory, records or calls. Not for several threads at once.
"""

from bisect import insort

PAGE_BYTES = 4096
"""Stretches begin and end at multiples of this."""


def rounded(byte_count: int) -> int:
    """What a stretch of so many bytes takes."""
    return -(-byte_count // PAGE_BYTES) * PAGE_BYTES


class Staging:
    """Stretches, the first that fits.

    Args:
        byte_count: Of the buffer.
    """

    def __init__(self, byte_count: int) -> None:
        self.byte_count = byte_count // PAGE_BYTES * PAGE_BYTES
        self._taken: list[tuple[int, int]] = []  # start and end, ascending

    def take(self, byte_count: int) -> int | None:
        """Take a stretch; its offset, or None when none is long enough at present."""
        wanted, start = rounded(byte_count), 0
        for taken_start, taken_end in [*self._taken, (self.byte_count, self.byte_count)]:
            if taken_start - start >= wanted:
                if wanted:
                    insort(self._taken, (start, start + wanted))
                return start
            start = taken_end
        return None

    def give_back(self, start: int, byte_count: int) -> None:
        """Let a stretch be taken again."""
        if byte_count:
            self._taken.remove((start, start + rounded(byte_count)))
