"""Bad records: the first one ends the reading, or all are counted and left out, as asked.

Knows how a fault is worded. Does not know formats.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from kvtide.errors import TraceError

OnError = Literal["stop", "skip"]

KEPT = 20
"""Faults of one file whose words are kept; all are counted."""

_SHOWN = 40
"""Characters of a bad value that are shown."""


class Faults:
    """What is wrong with the records of one file.

    Args:
        path: Of the file.
        on_error: ``stop`` raises the first fault, ``skip`` counts them.

    Attributes:
        count: Records that were left out.
        first: The first of them, as they would have been raised.
    """

    def __init__(self, path: Path, on_error: OnError) -> None:
        self.path = path
        self._on_error = on_error
        self.count = 0
        self.first: list[TraceError] = []

    def note(self, where: str, fault: str) -> None:
        """Take note of a bad record, which is left out.

        Raises:
            TraceError: As asked.
        """
        error = TraceError(str(self.path), where, fault)
        if self._on_error == "stop":
            raise error
        self.count += 1
        if len(self.first) < KEPT:
            self.first.append(error)


def line_of(number: int) -> str:
    """Name a line."""
    return f"line {number}"


def worded(error: ValidationError) -> str:
    """Say in one line what is wrong with a record."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "json_invalid":
        words = first["msg"].removeprefix("Invalid JSON: ")
        return "no JSON: " + re.sub(r" at line 1 column (\d+)$", r" at byte \1", words)
    if first["type"] == "missing":
        return f"{place}: is missing"
    if first["type"] == "value_error":
        return f"{place or 'the record'}: {first['msg'].removeprefix('Value error, ')}"
    words = first["msg"].removeprefix("Input ")
    return f"{place or 'the record'}: {shown(first['input'])} {words}"


def shown(value: object) -> str:
    """Write a bad value so that it fits into a line, however large it is."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a number with more than 40 digits"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
