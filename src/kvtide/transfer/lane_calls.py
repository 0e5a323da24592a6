"""One call of a tier, as a lane's thread makes it, and what its end says.

Tiers are written by others too: nothing that one raises goes further than here. Knows calls and errors; does
not know when a call is due or what its end is good for.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtide.errors import CorruptRecordError, TierError
from kvtide.keys import OffloadKey
from kvtide.tiers.base import PrivateTier, Tier
from kvtide.transfer.lane import MISS, PartFate
from kvtide.transfer.lane_jobs import WaitingPart

logger = logging.getLogger(__name__)


class Kind(Enum):
    """What is called."""

    GENERATION = auto()
    DISCARD = auto()
    READ = auto()
    WRITE = auto()
    SIZES = auto()
    """Nothing but how full it is, which is asked after other calls too."""


@dataclass(slots=True)
class Call:
    """One call that is under way.

    Attributes:
        kind: Of what.
        began_s: By the lane's clock.
        waiting: What is read or written.
        keys: What is discarded.
        trusted: Of a generation.
        late: It has not returned in time.
    """

    kind: Kind
    began_s: float
    waiting: WaitingPart | None = None
    keys: Sequence[OffloadKey] = ()
    trusted: bool = False
    late: bool = False


def made(tier: Tier, call: Call, name: str, deadline_s: float) -> tuple[PartFate, str | None]:
    """Make a call; raises nothing.

    Returns:
        How it ended, and a name for the trouble if there was any.
    """
    try:
        if call.kind is Kind.GENERATION:
            tier.begin_generation(call.trusted)
        elif call.kind is Kind.DISCARD:
            tier.discard(call.keys)
        elif call.waiting is not None:
            part = call.waiting.part
            if call.kind is Kind.WRITE:
                tier.write(part.name, part.payload, deadline_s)
            elif not tier.read_into(part.name.key, part.payload, deadline_s):
                return PartFate.GONE, MISS
    except CorruptRecordError as error:
        logger.debug("%s: %s", name, error)
        return PartFate.GONE, type(error).__name__
    except TierError as error:
        logger.debug("%s: %s", name, error)
        return PartFate.FAILED, type(error).__name__
    except Exception:  # the thread and the other chunks go on
        logger.exception("%s: a call failed in a way that no tier may", name)
        return PartFate.FAILED, "Exception"
    return PartFate.DONE, None


def sizes_of(tier: Tier, name: str) -> tuple[int, int] | None:
    """Ask a tier for its capacity and what of it is taken, in bytes; None when it cannot say."""
    if not isinstance(tier, PrivateTier):
        return None
    try:
        return tier.capacity_bytes, tier.used_bytes
    except Exception:  # as above
        logger.exception("%s: it cannot say how full it is", name)
        return None
