"""Which single call was the slowest, when the same work was done more than once.

A call that is slow by itself is slow in every pass, at the same place in the order of calls; what a neighbour
did is not. Only the garbage collector may come elsewhere in another pass. Pure; knows lists of slow calls,
not what was called.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.frame.registry import Sample, UnfitError
from benchmarks.scheduler.vocabulary import CALLS, SLOW_US

LIMIT_MS = 5.0


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slowest call.

    Attributes:
        ms: Of it, in the pass in which it took least.
        text: Which it was.
    """

    ms: float
    text: str


def slowest(samples: Sequence[Sample], of: str, arm: str) -> Slowest:
    """Find the slowest call of one piece of work.

    Args:
        samples: Any; one of each pass is needed with ``row`` ``CALLS``.
        of: Which work.
        arm: Whose calls.

    Raises:
        UnfitError: There is no such sample, or nothing was called.
    """
    passes = [one for one in samples if one["row"] == CALLS and (one["of"], one["arm"]) == (of, arm)]
    if not passes or not all(one["calls"] for one in passes):
        raise UnfitError(f"{of}, {arm}: no calls were counted")
    best = Slowest(*_longest_of_quick(passes))
    for call in passes[0]["slow"]:
        ms = min((_ms(call), *(_same(one["slow"], call) for one in passes[1:])))
        if ms > best.ms:
            best = Slowest(ms, _told(call))
    return best


def _longest_of_quick(passes: Sequence[Sample]) -> tuple[float, str]:
    """Name the longest call of those kinds that had no slow one in some pass."""
    found = (0.0, "none")
    for name in passes[0]["kinds"]:
        longest_us = min(one["kinds"][name]["longest_us"] for one in passes)
        if longest_us < SLOW_US:
            found = max(found, (longest_us / 1e3, f"{name}, {longest_us / 1e3:.2f} ms"))
    return found


def _same(slow: Sequence[Sequence[Any]], call: Sequence[Any]) -> float:
    """Say how long a call took in another pass; 0 when it was not slow there."""
    if _collects(call):
        return max((_ms(one) for one in slow if _collects(one)), default=0.0)
    return max((_ms(one) for one in slow if one[0] == call[0]), default=0.0)


def _collects(call: Sequence[Any]) -> bool:
    """Say whether most of a call was the garbage collector."""
    return call[5] > call[3] / 2


def _ms(call: Sequence[Any]) -> float:
    return min(call[3], call[4]) / 1e3


def _told(call: Sequence[Any]) -> str:
    place, name, phase, cpu_us, wall_us, collector_us = call
    return (
        f"{name} while {phase}, {cpu_us / 1e3:.2f} ms of processor time ({wall_us / 1e3:.2f} ms wall),"
        f" {collector_us / 1e3:.2f} ms of it the garbage collector, call {place:,}"
    )
