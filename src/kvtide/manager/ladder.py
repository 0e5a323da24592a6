"""Host memory and the tiers below it: what is written on, what is brought back, and from where.

Every tier is closed by itself: a chunk that needs all before it is written only behind its parent, so what
leaves one tier makes nothing unreachable in another. Knows the books of every tier; does not know requests,
jobs or time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvtide.events import ChunkContent, OffloadingEvent
from kvtide.jobs import CPULoadStoreSpec, Discard, Ids, PartFate, ReqContext, TierReport, ids, leading_done
from kvtide.keys import ChunkRun
from kvtide.manager.cpu import HOST, CPUOffloadingManager
from kvtide.manager.lower import Demotion, LowerTier
from kvtide.manager.room import NOBODY

PRIVATE_PROMPTS = 1 << 16
"""Prompts that are known to stay out of tiers; beyond that, names of those host memory has forgotten go."""

SAVED_AHEAD = 8
"""What leaves host memory next is written where tiers want what is evicted: one slot in so many."""

VICTIMS_PER_STEP = 64
POSITIONS_PER_STEP = 8192
"""Of so many victims one step looks at the prompts, and at so much of them: about two milliseconds."""


ON_ITS_WAY_OUT = ReqContext("", visit=NOBODY)
"""For whom victims are written on: who used them last is not known any more."""


@dataclass(frozen=True, slots=True)
class PreparedWrite:
    """Chunks in host memory that are being written to a tier.

    Attributes:
        tier: From 1.
        run: The chunks.
        slots: Of host memory, one a chunk; nobody else gets them before the write has ended.
        places: Numbers of the chunks in the tier's books.
        pin: Of what is kept until it is written; None where it may leave meanwhile.
    """

    tier: int
    run: ChunkRun
    slots: CPULoadStoreSpec
    places: Ids = field(repr=False)
    pin: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Neighbouring chunks that are to be brought back, and the tier that has them."""

    tier: int
    run: ChunkRun


class Ladder:
    """All tiers.

    Args:
        host: Host memory, with the catalog of all.
        tiers: Below it, the nearest first.
    """

    def __init__(self, host: CPUOffloadingManager, tiers: Sequence[LowerTier]) -> None:
        self.host = host
        self.tiers = tuple(tiers)
        self._private: dict[bytes, None] = {}  # first chunks of prompts that stay out of tiers, oldest first
        self._skipped = False  # something was not written that is asked for at once
        self._saved_at = -1  # the epoch of host memory at the last look for victims

    # -- what the ranks say ---------------------------------------------------------------------

    def note_reports(self, reports: Mapping[tuple[int, int], TierReport]) -> None:
        """Take in what ranks say, by rank and tier."""
        for (rank, tier), report in reports.items():
            self.tiers[tier - 1].note_report(rank, report)
            self.host.residency_epoch += 1

    # -- down -----------------------------------------------------------------------------------

    def writes_behind(
        self, run: ChunkRun, slots: Ids, ctx: ReqContext, content: ChunkContent | None
    ) -> list[PreparedWrite]:
        """Plan that chunks which are about to be stored in host memory are written on at once.

        Args:
            run: The chunks.
            slots: Of host memory, one a chunk.
            ctx: For whom.
            content: For the event.
        """
        writes: list[PreparedWrite] = []
        for tier in self.tiers:
            if tier.plan.demotion is not Demotion.AT_ONCE:
                continue
            start, stop = self._lacking(tier, run)
            taken = 0
            # Where it lacks what they extend they follow when they are asked for again: see ``catch_up``.
            if tier.takes_writes and run.start <= start < stop:
                first, last = start - run.start, stop - run.start
                told = None if content is None else content.part(len(run), first, last)
                part = run.between(start, stop)
                taken = self._begin(writes, tier, part, slots[first:last], ctx, told)
            self._skipped = self._skipped or taken < stop - start
        return writes

    def may_lack(self, demotion: Demotion) -> bool:
        """Whether tiers of a kind may lack what is ready in host memory and asked for again."""
        if demotion is Demotion.AT_ONCE and not (self._skipped or self.host.catalog.has_holes):
            return False
        return any(tier.plan.demotion is demotion and tier.takes_writes for tier in self.tiers)

    def catch_up(self, run: ChunkRun, demotion: Demotion, ctx: ReqContext) -> list[PreparedWrite]:
        """Plan to write what is ready in host memory of a prefix, and tiers of one kind lack.

        Args:
            run: From the beginning of the prompt; of a group with a window, what a reader would need.
            demotion: Of the tiers meant.
            ctx: For whom.
        """
        writes: list[PreparedWrite] = []
        for tier in self.tiers:
            if tier.plan.demotion is demotion and tier.takes_writes:
                self._write_ready(writes, tier, run, ctx, keep=False)
        return writes

    def save_victims(self) -> list[PreparedWrite]:
        """Plan to write what would leave host memory next and is nowhere else; it stays until then."""
        writes: list[PreparedWrite] = []
        tiers = [
            tier for tier in self.tiers if tier.plan.demotion is Demotion.ON_EVICTION and tier.takes_writes
        ]
        host, catalog = self.host, self.host.catalog
        policy = catalog.policy(HOST)
        margin = host.capacity // SAVED_AHEAD
        if not tiers or policy is None or host.free_count >= margin or self._saved_at == host.residency_epoch:
            return writes
        passed: list[int] = []
        left = POSITIONS_PER_STEP
        while margin > 0 < left and len(passed) < VICTIMS_PER_STEP and (named := policy.victim()) is not None:
            node = named[0]
            margin -= catalog.held(HOST, node)
            # A tier that has a chunk has what is before it, unless some was lost.
            lacking = [tier for tier in tiers if catalog.has_holes or catalog.lacks(tier.index, HOST, node)]
            if lacking:
                keys = catalog.tree.prefix(node, catalog.held(HOST, node))
                left -= len(keys)
                for run in self._runs_along(keys) if keys[0] not in self._private else ():
                    for tier in lacking:
                        self._write_ready(writes, tier, run, ON_ITS_WAY_OUT, keep=True)
            policy.withdraw(node)
            passed.append(node)
        for node in passed:
            catalog.review(HOST, node)
        self._saved_at = host.residency_epoch
        return writes

    def end_write(self, write: PreparedWrite, fates: Sequence[int]) -> None:
        """Note what became of each chunk of a write."""
        self.host.release(write.slots.slots)
        if write.pin is not None:
            self.host.catalog.unpin(write.pin)
            self.host.room_epoch += 1
        self.tiers[write.tier - 1].end_write(write.run, write.places, leading_done(fates))
        self._skipped = self._skipped or leading_done(fates) < len(fates)

    def keep_out(self, run: ChunkRun) -> None:
        """Note a prompt whose chunks stay out of every tier below host memory."""
        if not run:
            return
        first = run.positions(self.host.groups[run.group_index].stride)[0][0]
        self._private.pop(first, None)
        self._private[first] = None
        if len(self._private) > PRIVATE_PROMPTS:
            # As long as anything of a prompt is in host memory it must be known for what it is.
            for name in list(islice(self._private, 2)):
                del self._private[name]
                if self.host.catalog.tree.find((name,), 1)[1]:
                    self._private[name] = None

    # -- up -------------------------------------------------------------------------------------

    def restore_point(self, run: ChunkRun, only: Sequence[int] | None = None) -> int:
        """Do what ``OffloadingManager.restore_point`` does, over all tiers in service, or over some."""
        stride = self.host.groups[run.group_index].stride
        keys, _, stop = run.positions(stride)
        return self.host.catalog.restore_point(keys, stop, only) // stride

    def sources(self, run: ChunkRun) -> list[Source]:
        """Say where to get the chunks of a run that are not in host memory and not on their way.

        The nearest tier that has a chunk; what no tier has is left out.
        """
        looks_back = self.host.groups[run.group_index].window is None
        found: list[Source] = []
        rest = run.between(0, run.stop) if looks_back else run
        while rest:
            start, stop = self.host.lacking(rest)
            if start == stop:
                break
            found += self._nearest(rest.between(start, stop), looks_back)
            rest = rest.between(stop, rest.stop)
            if looks_back:
                break
        return found

    def lose(self, tier: int, run: ChunkRun, fates: Sequence[int]) -> None:
        """Strike out what a tier has not got after all."""
        for at, fate in enumerate(fates):
            if fate == PartFate.GONE:
                self.tiers[tier - 1].lose(run, run.start + at)
                self.host.residency_epoch += 1

    def take_discards(self) -> tuple[Discard, ...]:
        """Hand out what the ranks are to forget."""
        found = ((tier.index, tier.take_discards()) for tier in self.tiers)
        return tuple(Discard(index, keys) for index, keys in found if keys)

    # -- the rest -------------------------------------------------------------------------------

    def keep_room(self) -> None:
        """Free a little ahead of need in every tier below host memory; called once a step."""
        for tier in self.tiers:
            tier.keep_room()

    def take_events(self) -> list[OffloadingEvent]:
        """Hand out what happened in tiers below host memory since the last call."""
        events: list[OffloadingEvent] = []
        for tier in self.tiers:
            events += tier.events
            tier.events = []
        return events

    def tell_removed(self) -> None:
        """Tell whoever listens what a reset is about to take; before the catalog forgets."""
        for tier in self.tiers:
            tier.tell_removed()

    def reset(self) -> None:
        """Forget everything: the catalog has."""
        self._private.clear()
        self._saved_at = -1
        for tier in self.tiers:
            tier.reset()

    def check_invariants(self, idle: bool) -> None:
        """Check the books of every tier below host memory; see ``OffloadingManager.check_invariants``."""
        for tier in self.tiers:
            tier.check_invariants(idle)

    # -- inside ---------------------------------------------------------------------------------

    def _lacking(self, tier: LowerTier, run: ChunkRun) -> tuple[int, int]:
        looks_back = self.host.groups[run.group_index].window is None
        return tier.lacking(run.between(0, run.stop) if looks_back else run)

    def _write_ready(
        self, writes: list[PreparedWrite], tier: LowerTier, run: ChunkRun, ctx: ReqContext, keep: bool
    ) -> None:
        """Begin to write what is ready in host memory of a run, and a tier lacks."""
        group, catalog = self.host.groups[run.group_index], self.host.catalog
        keys, _, _ = run.positions(group.stride)
        rest = run
        while rest:
            start, stop = self._lacking(tier, rest)
            if start == stop:
                return
            slots = catalog.slots(HOST, run.group_index, keys, start, stop)
            ready = slots >= 0
            count = len(slots) if ready.all() else int(ready.argmin())
            if count:
                part = rest.between(start, start + count)
                self._begin(writes, tier, part, ids(slots[:count].tolist()), ctx, None, keep)
            if group.window is None:
                return
            rest = rest.between(min(start + count + 1, rest.stop), rest.stop)

    def _begin(
        self,
        writes: list[PreparedWrite],
        tier: LowerTier,
        run: ChunkRun,
        slots: Ids,
        ctx: ReqContext,
        content: ChunkContent | None,
        keep: bool = False,
    ) -> int:
        """Begin to write neighbouring chunks; says how many there was room for."""
        written, places = tier.begin_write(run, ctx, content)
        if not written:
            return 0
        slots = slots[: len(written)]
        self.host.hold(slots)
        pin = None
        if keep:
            keys, _, stop = written.positions(self.host.groups[run.group_index].stride)
            pin = self.host.catalog.pin(keys, stop)
        spec = CPULoadStoreSpec(slots, (len(slots),))
        writes.append(PreparedWrite(tier.index, written, spec, places, pin))
        return len(written)

    def _runs_along(self, keys: Sequence[bytes]) -> Iterator[ChunkRun]:
        """See a whole prefix of the catalog as chunks of each group."""
        for index, group in enumerate(self.host.groups):
            yield ChunkRun(keys, index, group.stride, 0, len(keys) // group.stride)

    def _nearest(self, run: ChunkRun, looks_back: bool) -> list[Source]:
        """Say which tier below host memory is the nearest that has each chunk of a run."""
        keys, _, _ = run.positions(self.host.groups[run.group_index].stride)
        nearest = np.zeros(len(run), dtype=np.int32)
        for tier in reversed(self.host.catalog.serving):
            if tier != HOST:
                places = self.host.catalog.slots(tier, run.group_index, keys, run.start, run.stop)
                nearest[: len(places)][places >= 0] = tier
        if looks_back and not nearest.all():
            nearest = nearest[: int(nearest.argmin())]
        if not len(nearest):
            return []
        begins = np.flatnonzero(np.diff(nearest, prepend=-1)).tolist()
        return [
            Source(int(nearest[at]), run.between(run.start + at, run.start + end))
            for at, end in zip(begins, [*begins[1:], len(nearest)], strict=True)
            if nearest[at]
        ]
