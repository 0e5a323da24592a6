"""Which way each piece of a copy goes, and in which portions it is submitted.

Works on the columns of a plan alone; submits nothing. Large pieces go by the copy engine, small ones by a
kernel: a piece costs the engine a fixed time, which below some size is longer than its bytes take.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from kvtide.transfer.plans import CopyPlan

PORTION_BYTES = 64 << 20
"""About what is submitted at once, and so how soon a copy notices that it was cancelled."""

PORTION_PIECES = 4096
"""Pieces of a portion at most: rows of the table that a kernel reads."""

FEW_PIECES = 8
"""So few small pieces go by the engine: launching a kernel costs more than they do."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What is submitted at once.

    Attributes:
        engine: Pieces for the copy engine.
        kernel: Pieces for the kernel, at most ``PORTION_PIECES``.
        wide: Every source, target and size of the kernel's pieces is a multiple of 16.
    """

    engine: CopyPlan
    kernel: CopyPlan
    wide: bool

    @property
    def byte_count(self) -> int:
        """Bytes of all pieces."""
        return self.engine.byte_count + self.kernel.byte_count


def _taken(plan: CopyPlan, which: np.ndarray | slice) -> CopyPlan:
    return CopyPlan(plan.source[which], plan.target[which], plan.size[which])


def cut_at(plan: CopyPlan, host: np.ndarray, bounds: np.ndarray) -> CopyPlan:
    """Cut pieces where one registration of host memory ends and the next begins.

    The runtime refuses a copy that lies in two of them.

    Args:
        plan: No piece is empty.
        host: Its column of host addresses, ``plan.source`` or ``plan.target``.
        bounds: ``int64[n]``, ascending: where registrations begin and end.
    """
    first = np.searchsorted(bounds, host, side="right")
    parts = np.searchsorted(bounds, host + plan.size, side="left") - first + 1
    if not len(parts) or int(parts.max()) == 1:
        return plan
    piece = np.repeat(np.arange(len(parts)), parts)
    nth = np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
    bound = first[piece] + nth
    last = len(bounds) - 1
    begin = np.where(nth == 0, 0, bounds[np.clip(bound - 1, 0, last)] - host[piece])
    end = np.where(nth == parts[piece] - 1, plan.size[piece], bounds[np.clip(bound, 0, last)] - host[piece])
    return CopyPlan(plan.source[piece] + begin, plan.target[piece] + begin, end - begin)


def portions_of(plan: CopyPlan, engine_from_bytes: int) -> list[Portion]:
    """Split a copy into portions, in order.

    Args:
        plan: Pieces; empty ones are left out.
        engine_from_bytes: Smaller pieces go by the kernel, others by the engine.
    """
    if not plan.size.all():
        plan = _taken(plan, plan.size > 0)
    if not len(plan.size):
        return []
    by_bytes = (np.cumsum(plan.size) - plan.size) // PORTION_BYTES
    by_count = np.arange(len(plan.size)) // PORTION_PIECES
    new = (np.diff(by_bytes, prepend=by_bytes[0]) != 0) | (np.diff(by_count, prepend=0) != 0)
    edges = [0, *np.flatnonzero(new).tolist(), len(plan.size)]
    return [
        _portion(_taken(plan, slice(begin, end)), engine_from_bytes)
        for begin, end in itertools.pairwise(edges)
        if begin < end
    ]


def _portion(plan: CopyPlan, engine_from_bytes: int) -> Portion:
    small = plan.size < engine_from_bytes
    if int(small.sum()) < FEW_PIECES:
        small = np.zeros_like(small)
    kernel = _taken(plan, small)
    odd = int(np.bitwise_or.reduce(kernel.source | kernel.target | kernel.size, initial=0)) & 15
    return Portion(_taken(plan, ~small), kernel, odd == 0)
