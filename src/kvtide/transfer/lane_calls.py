"""One call of a tier, as a lane's thread makes it, and what its end says.

Tiers are written by others too: nothing that one raises goes further than here. Knows calls and errors; does
not know when a call is due or what its end is good for.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtide.errors import CorruptRecordError, NodeUnavailableError, TierError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import PrivateTier, Tier
from kvtide.tiers.records import RecordRun
from kvtide.transfer.lane import MISS, PartFate
from kvtide.transfer.lane_jobs import WaitingPart

logger = logging.getLogger(__name__)

NODE = NodeUnavailableError.__name__


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
        waiting: What is read or written: parts of one job, in a row.
        keys: What is discarded.
        trusted: Of a generation.
        late: It has not returned in time.
    """

    kind: Kind
    began_s: float
    waiting: Sequence[WaitingPart] = ()
    keys: Sequence[OffloadKey] = ()
    trusted: bool = False
    late: bool = False

    def run(self) -> RecordRun:
        """Name what is read or written."""
        first, parts = self.waiting[0], [waiting.part for waiting in self.waiting]
        group_index = split_offload_key(first.part.name.key)[1]
        hashes = tuple(split_offload_key(part.name.key)[0] for part in parts)
        start, name = first.part.name.chunk_index - first.index, first.job.parts[0].name
        if not first.index:
            return RecordRun(group_index, start, hashes, name.parent_hash, first.job.lead)
        whole = tuple(split_offload_key(part.name.key)[0] for part in first.job.parts)
        job = RecordRun(group_index, start, whole, name.parent_hash, first.job.lead)
        return job.between(start + first.index, start + first.index + len(parts))


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended.

    Attributes:
        fate: Of the call as a whole: ``FAILED`` when the medium is in trouble.
        trouble: A name for it, if there was any.
        parts: For each part its own fate and trouble.
    """

    fate: PartFate
    trouble: str | None = None
    parts: Sequence[tuple[PartFate, str | None]] = ()

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[PartFate, str | None]]) -> "CallEnd":
        """Sum up; a call of which some went well says nothing against the medium, but that it is full."""
        failed = [trouble for fate, trouble in parts if fate is PartFate.FAILED]
        if not failed:
            return cls(PartFate.DONE, None, parts)
        full = next((trouble for trouble in failed if trouble == "TierFullError"), None)
        ours = [trouble for trouble in failed if trouble != NODE]
        if full is None and (not ours or len(failed) < len(parts)):
            return cls(PartFate.DONE, NODE if not ours else None, parts)
        return cls(PartFate.FAILED, full or ours[0], parts)


def made(tier: Tier, call: Call, name: str, deadline_s: float) -> CallEnd:
    """Make a call; raises nothing."""
    count = len(call.waiting)
    try:
        if call.kind is Kind.GENERATION:
            tier.begin_generation(call.trusted)
        elif call.kind is Kind.DISCARD:
            tier.discard(call.keys)
        elif count == 1 and run_chunks_of(tier, call.waiting[0].part.payload.nbytes, name) <= 1:
            return CallEnd.of_parts([_made_alone(tier, call, deadline_s)])
        elif count:
            return CallEnd.of_parts(_made_together(tier, call, name, deadline_s))
    except Exception as error:  # the thread and the other chunks go on
        failed = PartFate.FAILED, _named(error, name)
        return CallEnd.of_parts([failed] * count) if count else CallEnd(*failed)
    return CallEnd(PartFate.DONE)


def _made_alone(tier: Tier, call: Call, deadline_s: float) -> tuple[PartFate, str | None]:
    part = call.waiting[0].part
    try:
        if call.kind is Kind.WRITE:
            tier.write(part.name, part.payload, deadline_s)
        elif not tier.read_into(part.name.key, part.payload, deadline_s):
            return PartFate.GONE, MISS
    except CorruptRecordError as error:
        logger.debug("%s", error)
        return PartFate.GONE, type(error).__name__
    return PartFate.DONE, None


def _made_together(tier: Tier, call: Call, name: str, deadline_s: float) -> list[tuple[PartFate, str | None]]:
    payloads = [waiting.part.payload for waiting in call.waiting]
    calls = tier.write_run if call.kind is Kind.WRITE else tier.read_run
    ends: Sequence[object] = calls(call.run(), payloads, deadline_s)
    if len(ends) != len(payloads):
        raise RuntimeError(f"{len(payloads)} chunks were handed over, {len(ends)} answers came")
    parts: list[tuple[PartFate, str | None]] = []
    for end in ends:
        if isinstance(end, CorruptRecordError):
            parts.append((PartFate.GONE, _named(end, name)))
        elif isinstance(end, Exception):
            parts.append((PartFate.FAILED, _named(end, name)))
        else:
            parts.append((PartFate.DONE, None) if end else (PartFate.GONE, MISS))
    return parts


def _named(error: Exception, name: str) -> str:
    """Name an error; one that no tier may raise is told in full."""
    if isinstance(error, TierError):
        logger.debug("%s: %s", name, error)
        return type(error).__name__
    logger.error("%s: a call failed in a way that no tier may", name, exc_info=error)
    return "Exception"


def run_chunks_of(tier: Tier, payload_bytes: int, name: str) -> int:
    """Ask a tier how many neighbours it is best handed in one call; one where it cannot say."""
    try:
        return int(tier.run_chunks(payload_bytes))
    except Exception:  # as above
        logger.exception("%s: it cannot say how many chunks it wants in one call", name)
        return 1


def sizes_of(tier: Tier, name: str) -> tuple[int, int] | None:
    """Ask a tier for its capacity and what of it is taken, in bytes; None when it cannot say."""
    if not isinstance(tier, PrivateTier):
        return None
    try:
        return tier.capacity_bytes, tier.used_bytes
    except Exception:  # as above
        logger.exception("%s: it cannot say how full it is", name)
        return None
