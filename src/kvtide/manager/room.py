"""Room for what comes: who leaves for it, and how much of it is worth that.

Knows positions, and places in whatever unit a tier counts them; does not know how a tier lets chunks go.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvtide.jobs import OffloadPolicy, ReqContext
from kvtide.manager.catalog import Catalog

ROOM_WANTED = 40
"""One place in so many is freed ahead, when four fifths of that are left. A full tier hands out crumbs."""

NOBODY = -1
"""No visit: whoever has it is compared with nobody."""

Newcomer = tuple[int, int]
"""The visit and the position that others are compared with before they leave."""


class Arriving(NamedTuple):
    """Neighbouring chunks that want to come into a tier.

    Attributes:
        tier: Its index in the catalog.
        visit: What they are compared with others by: see ``judged_as``.
        begin: First position.
        stride: Positions of a chunk.
        cost: What one of them takes: a slot, or bytes.
    """

    tier: int
    visit: int
    begin: int
    stride: int
    cost: int = 1


def judged_as(ctx: ReqContext) -> int:
    """Name the visit that a request's chunks are judged by: who wants all of a request may have it."""
    return ctx.visit if ctx.policy is OffloadPolicy.CHUNK_LEVEL else NOBODY


def make_room(
    catalog: Catalog,
    arriving: Arriving,
    count: int,
    spare: int,
    evict: Callable[[int, Newcomer | None], int],
) -> int:
    """Let others go for chunks that come, as long as these are worth more.

    Args:
        catalog: Which chunk is where.
        arriving: The first of the chunks.
        count: How many they are.
        spare: Places that are free, less those that are free only because others were evicted ahead: for
            them, too, somebody has left.
        evict: Lets chunks go until there are so many places, unless they are worth more than the newcomer;
            says how many places it has freed.

    Returns:
        How many of the chunks are worth a place, whether there is one or not.
    """
    tier, visit, begin, stride, cost = arriving
    if not catalog.refuses(tier):
        evict(count * cost, None)
        return count
    while count:
        spare = max(0, spare)
        worth = catalog.worth(tier, visit, begin, begin + count * stride, spare // cost * stride)
        count = (worth - begin) // stride
        freed = evict(count * cost, catalog.newcomer(tier, visit, begin, worth))
        if not freed:
            break
        spare += freed
    return count
