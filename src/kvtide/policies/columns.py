"""A value per run, in flat arrays that grow ahead of need, one after another.

An array that grows is copied, a million values in a millisecond. Whoever keeps eight beside each other and
lets all grow for the same run stops the scheduler eight times as long.
"""

from array import array
from typing import TypeAlias

AHEAD = 64
"""Runs ahead of need; more than there are columns, so that each has had its turn in time."""

PIECE = 1024
"""Values that a column gets at once; the array itself takes room in larger pieces, unwritten."""

Column: TypeAlias = "array[int] | array[float]"


class Columns:
    """Arrays of one length or nearly so, indexed by the number of a run; what is new is 0."""

    def __init__(self) -> None:
        self._columns: list[Column] = []
        self._enough = 0  # runs below it need nothing

    def ints(self, typecode: str = "i") -> "array[int]":
        """Add a column of whole numbers; see ``array`` for ``typecode``."""
        column: array[int] = array(typecode)
        self._add(column)
        return column

    def floats(self) -> "array[float]":
        """Add a column of numbers in double precision."""
        column = array("d")
        self._add(column)
        return column

    def cover(self, run: int) -> None:
        """Have a place for ``run`` in every column: at most one grows where nobody has skipped numbers."""
        if run < self._enough:
            return
        while True:
            shortest = min(self._columns, key=len)
            length = len(shortest)
            if length <= run + AHEAD:
                shortest.frombytes(bytes((run + PIECE - length) * shortest.itemsize))
            if length > run:
                break
        self._enough = len(min(self._columns, key=len)) - AHEAD

    def _add(self, column: Column) -> None:
        if self._columns:
            column.frombytes(bytes(len(min(self._columns, key=len)) * column.itemsize))
        self._columns.append(column)
        self._enough = 0
