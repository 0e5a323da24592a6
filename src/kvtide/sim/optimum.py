"""The best that any policy can do on a trace: Belady's rule for prefixes, and a cache without bounds.

At the end of every request a cache may keep any of what it held and of what the prompt brought. The most hits
come from keeping what is used again soonest (L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5, 1966; with bypass: what is used last is not even stored).
A use of a block is a use of all before it, so a block is never used later than one it continues; with ties
to the deeper block, what is kept is closed under prefixes and every block of it can be hit.

That makes the books small. At any time the blocks whose next use is request r lie in a row in r's prompt, and
those of them that are kept are its first ones: a number per future request is all that has to be known, and
what r hits is that number. Knows no manager: it is what managers are measured with.
"""

from heapq import heappop, heappush

import numpy as np

from kvtide.sim.accesses import Accesses
from kvtide.sim.outcome import Outcome


class NextUses:
    """Where each block of each prompt is used again; worked out once for all capacities.

    Attributes:
        runs: Per request, neighbouring blocks that share their next use: ``(request, first, one past the
            last)``, from the beginning of the prompt; what is never used again is left out.
        access_count: Full blocks of all prompts.
    """

    def __init__(self, accesses: Accesses) -> None:
        owner = np.repeat(np.arange(accesses.request_count), np.diff(accesses.starts))
        order = np.argsort(accesses.blocks, kind="stable")
        again = accesses.blocks[order[1:]] == accesses.blocks[order[:-1]]
        next_use = np.full(accesses.access_count, -1, dtype=np.int64)
        next_use[order[:-1][again]] = owner[order[1:][again]]
        self.access_count = accesses.access_count
        self.runs: list[list[tuple[int, int, int]]] = [[] for _ in range(accesses.request_count)]
        # A run ends where the next use changes, and where the prompt does.
        ends = np.flatnonzero((np.diff(next_use) != 0) | (np.diff(owner) != 0)) + 1
        bounds = np.concatenate(([0], ends, [accesses.access_count]))
        firsts = bounds[:-1][next_use[bounds[:-1]] >= 0] if accesses.access_count else bounds[:0]
        lasts = bounds[np.searchsorted(bounds, firsts, side="right")]
        begins = accesses.starts[owner[firsts]]
        for request, user, first, last in zip(
            owner[firsts].tolist(),
            next_use[firsts].tolist(),
            (firsts - begins).tolist(),
            (lasts - begins).tolist(),
            strict=True,
        ):
            self.runs[request].append((user, first, last))


def optimum(uses: NextUses, capacity: int) -> Outcome:
    """Count the hits of Belady's rule.

    Args:
        uses: Of a trace.
        capacity: Blocks there is room for between two requests.
    """
    kept: dict[int, int] = {}  # future request -> how many of its blocks are kept for it
    latest: list[int] = []  # heap of the negatives of its keys, the most distant first; and of past ones
    total = hits = stored = 0
    for request, runs in enumerate(uses.runs):
        found = kept.pop(request, 0)
        hits += found
        total -= found
        for user, first, last in runs:
            if user not in kept:
                kept[user] = 0
                heappush(latest, -user)
            kept[user] += last - first
            total += last - first
        while total > capacity:
            user = -latest[0]
            gone = min(kept[user], total - capacity)
            kept[user] -= gone
            total -= gone
            if not kept[user]:
                del kept[user]
                heappop(latest)
        # Where a run was not found as a whole, all that is kept for its user came with this request.
        stored += sum(
            max(0, first + kept.get(user, 0) - max(first, found))
            for user, first, last in runs
            if last > found
        )
    return Outcome(uses.access_count, hits, stored, stored - total)


def unbounded(accesses: Accesses) -> Outcome:
    """Count the hits of a cache that keeps everything."""
    unique = accesses.unique_count
    return Outcome(accesses.access_count, accesses.access_count - unique, unique, 0)
