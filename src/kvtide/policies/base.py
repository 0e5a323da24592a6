"""What an eviction policy is told and what it is asked.

A policy ranks chunks by the ids its owner gives them. It never learns what a chunk holds, and it sees
only chunks that may leave: the owner offers a chunk when nothing extends it and nobody reads it, and
withdraws it as soon as that changes. So evicting never scans past pins, and a chunk cannot leave
before the chunks that extend it.
"""

from collections.abc import Iterable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Who leaves. Pure: no clock, no randomness, no I/O."""

    def touched(self, chunk_ids: Iterable[int]) -> None:
        """Note that a prefix was used, or inserted: all of it, in prefix order."""

    def offer(self, chunk_id: int) -> None:
        """Take in a chunk that may leave from now on. Offering it again has no effect."""

    def withdraw(self, chunk_id: int) -> None:
        """Take out a chunk that must stay. Withdrawing one that was not offered has no effect."""

    def forget(self, chunk_id: int) -> None:
        """Drop all that is known of an id that has left; it may come back for another chunk."""

    def victim(self) -> int | None:
        """Name the offered chunk that should leave first; it stays offered. None when there is none."""
