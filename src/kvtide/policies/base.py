"""What an eviction policy is told and what it is asked.

A policy ranks *runs*: neighbouring chunks of one prefix that were always used together, under the number
their owner gave them. It never learns what a chunk holds. The owner splits a run before a part of it
is used alone, so all chunks of a run have the same history; it tells which runs may leave (nothing extends
them, nobody reads them all), takes chunks off the end of the run that is named, and asks again. So
evicting never scans past pins twice, and a chunk cannot leave before the chunks that extend it.

Uses come as whole prefixes, the deepest run first: the run above is always the more recent one.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class EvictionPolicy(Protocol):
    """Who leaves. Pure: no clock, no randomness, no I/O.

    ``visit`` numbers whoever uses a run, a request: one that comes back to its own chunks, as each request
    does while it grows, has not used them twice.
    """

    def clear(self) -> None:
        """Forget every run, and all that was learnt; the capacity stays."""

    def resize(self, capacity: int) -> None:
        """Note how many chunks there is room for."""

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        """Take in a run of ``count`` chunks that have become resident; a use follows.

        Args:
            run: Its number.
            count: Chunks.
            visit: Who has stored them.
            depth: Chunks that lie before it in its prompt.
        """

    def joins(self, run: int, visit: int) -> bool:
        """Say whether chunks inserted behind ``run`` now would have its history, once it was used."""

    def grown(self, run: int, count: int) -> None:
        """Note ``count`` chunks more at the end of a run that they join."""

    def touched(self, run: int, visit: int) -> None:
        """Note a use of a whole run."""

    def split(self, run: int, head: int, head_count: int) -> None:
        """Note that the first ``head_count`` chunks of ``run`` are the run ``head`` from now on."""

    def offer(self, run: int) -> None:
        """Note that chunks at the end of a run may leave; said again, it has no effect."""

    def withdraw(self, run: int) -> None:
        """Note that all of a run must stay; said again, it has no effect."""

    def victim(self) -> tuple[int, int] | None:
        """Name the offered run whose last chunks should leave first, and how many before asking again.

        It stays where it is until it has ``shrunk`` or was ``removed``. None when there is none, or when
        finding it would take too long just now: ask again.
        """

    def shrunk(self, run: int, count: int) -> None:
        """Note that ``count`` chunks at the end of a run have left, and more of it stays."""

    def removed(self, run: int) -> None:
        """Note that the last chunks of a run have left; its number may come back for another one."""

    def remember(self, run: int) -> bool:
        """Note that a whole run has left, and say whether its name is worth keeping.

        Asked only of a policy that says so by ``remembers``. A run whose name is kept is split, offered
        (nothing at all extends it) and shrunk like any other, until it is ``removed`` or ``inserted``.
        """

    def forgotten(self) -> tuple[int, int] | None:
        """Name a remembered run and how many chunks at its end to forget now; None when all may be kept."""

    def recalled(self, run: int) -> None:
        """Note that chunks of a remembered run are being brought back."""

    @property
    def remembers(self) -> bool:
        """Whether it wants the names of chunks that have left."""


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """A policy that also learns from what is asked for and not there, and may refuse what is worth less.

    Positions count chunks of the finest group from the beginning of a prompt.
    """

    def visited(
        self, visit: int, now_s: float, keys: Sequence[bytes], runs: Sequence[tuple[int, int]]
    ) -> None:
        """Note that a request has come, before its first use of a run; told again, only the time goes on.

        Args:
            visit: Its number.
            now_s: Now; one that lies before another is taken as that.
            keys: Hashes of the whole prompt, one a position.
            runs: The resident ones on its way from the top, and the position where each ends.
        """

    def seams(self, visit: int, start: int, stop: int) -> Sequence[int]:
        """Say where between ``start`` and ``stop`` the history of what a visit would bring changes."""

    def yields(self, visit: int, position: int) -> bool:
        """Say whether a chunk that a visit would bring is worth less than all that may leave for it."""
