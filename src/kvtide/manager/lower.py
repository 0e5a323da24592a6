"""The books of one tier below host memory: what it holds, what is being written, how much more it may hold.

What leaves it is decided here and told to the ranks as keys to forget. Knows bytes as numbers, and what the
ranks report; does not know slots of host memory, requests or media.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvtide.events import ChunkContent, OffloadingEvent
from kvtide.jobs import Ids, ReqContext, TierReport, ids
from kvtide.keys import ChunkRun, Medium, OffloadKey, PackedKeys
from kvtide.manager.arrivals import Arrivals
from kvtide.manager.catalog import Catalog, CatalogGroup, Evicted
from kvtide.manager.discards import Discards
from kvtide.manager.pending import PendingStore
from kvtide.manager.room import ROOM_WANTED, Arriving, Newcomer, judged_as, make_room
from kvtide.metrics import MetricsDelta

RUNS_PER_STEP = 256
"""Runs that leave the tier in one step at most: about a millisecond."""

MOST_RESERVED = 1 << 22
"""Chunks for which the catalog has a place from the start; beyond that it grows, which copies it."""

TICKETS = 1 << 30
"""Writes are known by numbers that come again after so many chunks."""


class Demotion(Enum):
    """When a chunk is written on to a tier; values are what settings say."""

    AT_ONCE = "at_once"
    SECOND_SIGHT = "second_sight"
    ON_EVICTION = "on_eviction"


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What is asked of a tier, as the books see it.

    Attributes:
        name: In metrics and logs.
        demotion: When chunks are written on to it.
        queue_bytes: Of writes that may be open at once.
        reports_inventory: Whether it tells, when opened, what it holds from an earlier life.
        is_shared: Others write to it, it evicts by its own rules, and has to be asked what it holds.
    """

    name: str
    demotion: Demotion
    queue_bytes: int
    reports_inventory: bool
    is_shared: bool = False


class LowerTier:
    """One tier below host memory.

    Args:
        index: In the catalog, from 1.
        plan: What is asked of it.
        catalog: Which chunk is where.
        groups: The KV cache groups.
        rank_count: Ranks that report.
        metrics: Where to count.
        with_events: Whether anyone listens.

    Attributes:
        serves: Every rank can read from it.
        takes_writes: Every rank can write to it.
        chunk_read_s: Seconds in which it has brought one more chunk lately; 0 when nobody knows.
        events: What became ready or left.
    """

    def __init__(
        self,
        index: int,
        plan: TierPlan,
        catalog: Catalog,
        groups: Sequence[CatalogGroup],
        rank_count: int,
        metrics: MetricsDelta,
        with_events: bool = False,
    ) -> None:
        self.index = index
        self.plan = plan
        self._catalog = catalog
        self._looks_back = [group.window is None for group in groups]
        self._strides = [group.stride for group in groups]
        self._metrics = metrics
        self._with_events = with_events
        self._rank_count = rank_count
        self._reports: dict[int, TierReport] = {}
        self._arrivals = Arrivals(index, catalog, groups, self._now_ready, self._now_free)
        self._counts = [0] * len(groups)  # chunks there or on their way
        self._record_bytes = (0,) * len(groups)
        self._capacity_bytes = 0
        self._ticket = 0
        self._open_bytes = 0
        self._runs_left = RUNS_PER_STEP
        self._discards = Discards()
        self.serves = self.takes_writes = False
        self.chunk_read_s = 0.0
        self.events: list[OffloadingEvent] = []

    # -- what the ranks say ---------------------------------------------------------------------

    def note_report(self, rank: int, report: TierReport) -> None:
        """Take in what a rank says of it."""
        self._reports[rank] = report
        if len(self._reports) < self._rank_count:
            return
        reports = self._reports.values()
        self.serves = all(one.serves for one in reports)
        self.chunk_read_s = max(one.chunk_read_s for one in reports)
        self.takes_writes = all(one.takes_writes for one in reports)
        self._capacity_bytes = min(one.capacity_bytes for one in reports)
        self._record_bytes = tuple(map(max, zip(*(one.record_bytes for one in reports), strict=True)))
        self._catalog.mask(self.index, self.serves)
        policy, largest = self._catalog.policy(self.index), max(self._record_bytes, default=0)
        if policy is not None and largest:
            policy.resize(self._capacity_bytes // largest)
            self._catalog.reserve(min(self._capacity_bytes // largest, MOST_RESERVED))

    @property
    def is_open(self) -> bool:
        """Whether every rank has reported."""
        return len(self._reports) == self._rank_count

    @property
    def capacity_bytes(self) -> int:
        """What each rank can hold."""
        return self._capacity_bytes

    @property
    def record_bytes(self) -> Sequence[int]:
        """What a chunk of each group takes on a rank."""
        return self._record_bytes

    @property
    def used_bytes(self) -> int:
        """What each rank holds, or is about to."""
        return sum(map(int.__mul__, self._counts, self._record_bytes))

    @property
    def open_bytes(self) -> int:
        """Of writes that are under way."""
        return self._open_bytes

    # -- writing --------------------------------------------------------------------------------

    def lacking(self, run: ChunkRun) -> tuple[int, int]:
        """Find the first chunks in a row, one past the last, that it has not got and is not getting.

        Args:
            run: Of a group without a window, from the beginning of the prompt.
        """
        start, stop, _ = self._arrivals.absent(run)
        return start, stop

    def begin_write(
        self, run: ChunkRun, ctx: ReqContext, content: ChunkContent | None
    ) -> tuple[ChunkRun, Ids]:
        """Take room for chunks that are about to be written; others leave for them.

        Args:
            run: Chunks that it lacks; their parent is there or on its way.
            ctx: Who used them.
            content: For the event.

        Returns:
            The leading chunks that are worth it and there is room for, possibly none; a number for each.
        """
        cost = self._record_bytes[run.group_index]
        most = len(run)
        if cost:
            most = min(most, max(0, self.plan.queue_bytes - self._open_bytes) // cost)
            self._note_skipped(len(run) - most, "queue_full")
        whole = len(run)
        run = run.between(run.start, run.start + most)
        pin = self._pin_above(run)
        worth = self._make_room(run, ctx)
        self._note_skipped(len(run) - worth, "bypassed")
        room = min(worth, self._room_for(run.group_index))
        self._note_skipped(worth - room, "full")
        run = run.between(run.start, run.start + room)
        if not run:
            self._catalog.unpin(pin)
            return run, ids(())
        # The engine may take back the end of a prompt; its names are needed until the write has ended.
        run, places = run.frozen(), self._numbers(len(run))
        self._discards.decide(run)
        parent = self._parent_of(run)
        if parent is not None:
            self._catalog.unpin(pin)
        if content is not None:
            content = content.part(whole, 0, len(run))
        store = PendingStore(
            run, places, ctx.visit, parent, None if parent is not None else pin, content=content
        )
        self._arrivals.pending.add(store)
        self._counts[run.group_index] += len(run)
        self._open_bytes += cost * len(run)
        return run, places

    def end_write(self, run: ChunkRun, places: Ids, done_count: int) -> None:
        """Note how a write ended: its first ``done_count`` chunks can be read back; the rest is forgotten."""
        self._open_bytes -= self._record_bytes[run.group_index] * len(run)
        self._arrivals.complete(run, places, done_count)

    # -- losing ---------------------------------------------------------------------------------

    def lose(self, run: ChunkRun, chunk_index: int) -> None:
        """Note that a chunk is not there, whatever the books say."""
        keys, _, _ = self._arrivals.positions(run)
        chunk = run.between(chunk_index, chunk_index + 1)
        if self._catalog.lose(self.index, run.group_index, keys, chunk_index):
            self._counts[run.group_index] -= 1
            self._metrics.add("tier_lost_chunks", 1, self.plan.name)
            self._discard(chunk)
            if self._with_events:
                self.events.append(OffloadingEvent(tuple(chunk), Medium.STORAGE, removed=True))
        elif self._discards.is_watching and self._lacking_of(chunk):
            self._discard(chunk)  # whatever ranks tell of it still

    def note_decisions(self, wanted: bool) -> None:
        """Begin, or end, to remember what is written and forgotten, while ranks tell of an earlier life."""
        self._discards.watch(wanted)

    def found(self, run: ChunkRun, visit: int) -> int:
        """Take in chunks from an earlier life, whose parent is known; what is in the books stays as it is.

        Returns:
            How many were new. What extends a chunk that has left again meanwhile is forgotten.
        """
        looks_back, count = self._looks_back[run.group_index], 0
        rest = run.between(0, run.stop) if looks_back else run
        while rest:
            start, stop, before = self._arrivals.absent(rest)
            if start == stop:
                break
            end = start if start < run.start else self._discards.first_decided(run, start, stop)
            if end > start:
                self._take_in(run.between(start, end), visit, before if looks_back else None)
                count += end - start
            if end < stop and looks_back:
                self.forget_found([run.between(at, at + 1)[0] for at in self._lacking_of(run)])
                break
            if end == run.stop:
                break
            rest = rest.between(max(stop if end == stop else end + 1, start + 1), rest.stop)
        self._metrics.add("tier_found_chunks", count, self.plan.name)
        return count

    def forget_found(self, keys: Sequence[OffloadKey]) -> None:
        """Have the ranks forget what they told of, where nobody has decided on it since."""
        self._discard(self._discards.undecided(keys))

    def take_discards(self) -> tuple[OffloadKey, ...]:
        """Hand out what the ranks are to forget."""
        return self._discards.take()

    def keep_room(self) -> None:
        """Free a little ahead of need; called once a step."""
        self._runs_left = RUNS_PER_STEP
        wanted = self.used_bytes + self._capacity_bytes // ROOM_WANTED - self._capacity_bytes
        if wanted > 0 and self.is_open:
            self._evict(wanted)

    def tell_removed(self) -> None:
        """Tell whoever listens that nothing of it can be fetched any more; before the catalog forgets."""
        if self._with_events and (names := self._catalog.names(self.index)):
            keys = PackedKeys(tuple(names), self._catalog.tree.width)
            self.events.append(OffloadingEvent(keys, Medium.STORAGE, removed=True))

    def reset(self) -> None:
        """Forget everything: the catalog has."""
        self._arrivals.forget()
        policy = self._catalog.policy(self.index)
        if policy is not None:
            policy.clear()
        pending = [0] * len(self._counts)
        for store in self._arrivals.pending:
            pending[store.run.group_index] += len(store.run)
        self._counts = pending
        self._discards.clear()
        self._catalog.mask(self.index, self.serves)

    def check_invariants(self, idle: bool) -> None:
        """Check the counts against the catalog.

        Raises:
            AssertionError: They do not agree.
        """
        ready = len(self._catalog.all_slots(self.index))
        pending = sum(len(store.run) for store in self._arrivals.pending)
        assert sum(self._counts) == ready + pending, (
            f"{self.plan.name}: {sum(self._counts)} chunks counted, {ready} there and {pending} on their way"
        )
        assert not idle or not pending, f"{self.plan.name}: {pending} chunks on their way and no job is open"

    # -- inside ---------------------------------------------------------------------------------

    def _pin_above(self, run: ChunkRun) -> int:
        """Keep what a run continues, as far as it is known."""
        keys, begin, _ = self._arrivals.positions(run)
        known = self._catalog.tree.find(keys, begin)[1]
        return self._catalog.pin(keys, known)

    def _parent_of(self, run: ChunkRun) -> PendingStore | None:
        before = run.between(0, run.start)
        if not (before and len(self._arrivals.pending) and self._looks_back[run.group_index]):
            return None
        return self._arrivals.absent(before)[2]

    def _make_room(self, run: ChunkRun, ctx: ReqContext) -> int:
        """Let others go for a run: see ``make_room``; say how many of its chunks are worth that."""
        cost, stride = self._record_bytes[run.group_index], self._strides[run.group_index]
        if not cost:
            return len(run)
        arriving = Arriving(self.index, judged_as(ctx), run.start * stride, stride, cost)
        spare_bytes = self._capacity_bytes - self._capacity_bytes // ROOM_WANTED - self.used_bytes
        return make_room(self._catalog, arriving, len(run), spare_bytes, self._evict_until)

    def _evict_until(self, free_bytes: int, newcomer: Newcomer | None) -> int:
        return self._evict(self.used_bytes + free_bytes - self._capacity_bytes, newcomer)

    def _room_for(self, group_index: int) -> int:
        """How many more chunks of a group there is a place for."""
        cost = self._record_bytes[group_index]
        return max(0, self._capacity_bytes - self.used_bytes) // cost if cost else MOST_RESERVED

    def _evict(self, wanted_bytes: int, newcomer: Newcomer | None = None) -> int:
        """Let chunks go; say how many bytes they had."""
        before = self.used_bytes
        if not any(self._record_bytes):
            return 0
        while self._runs_left > 0 and (left := wanted_bytes - (before - self.used_bytes)) > 0:
            wanted = -(-left // max(self._record_bytes))
            gone = self._catalog.evict(self.index, wanted, self._runs_left, newcomer)
            self._runs_left -= gone.run_count
            if not gone.count:
                break
            self._note_gone(gone)
        return before - self.used_bytes

    def _note_gone(self, gone: Evicted) -> None:
        width = self._catalog.tree.width
        for group_index, names in gone.names:
            self._counts[group_index] -= len(names) // width
        keys = PackedKeys(tuple(gone.names), width)
        self._discard(keys)
        self._metrics.add("tier_evicted_chunks", gone.count, self.plan.name)
        if self._with_events:
            self.events.append(OffloadingEvent(keys, Medium.STORAGE, removed=True))

    def _now_ready(self, store: PendingStore) -> None:
        self._metrics.add("tier_stored_chunks", len(store.run), self.plan.name)
        if self._with_events:
            self.events.append(
                OffloadingEvent(store.run, Medium.STORAGE, removed=False, content=store.content)
            )

    def _now_free(self, store: PendingStore) -> None:
        self._counts[store.run.group_index] -= len(store.run)
        # A rank may have kept what another has not, or what came too late to be of use. Where somebody else
        # has written the same since, it stays.
        self._discard([store.run.between(at, at + 1)[0] for at in self._lacking_of(store.run)])

    def _take_in(self, run: ChunkRun, visit: int, before: PendingStore | None) -> None:
        """Enter chunks that ranks have; behind a write that is under way they wait for it."""
        self._counts[run.group_index] += len(run)
        if before is not None:
            store = PendingStore(run, self._numbers(len(run)), visit, before, copied=True)
            self._arrivals.pending.add(store)
            return
        keys, _, _ = self._arrivals.positions(run)
        places = np.full(len(run), self._first_place, dtype=np.int32)
        self._catalog.insert(self.index, run.group_index, keys, run.start, places, visit)
        if self._with_events:
            self.events.append(OffloadingEvent(run, Medium.STORAGE, removed=False))

    @property
    def _first_place(self) -> int:
        """What the catalog keeps beside a chunk that was found: of a private tier, nothing of interest."""
        return 0

    def _lacking_of(self, run: ChunkRun) -> list[int]:
        """List the chunks of a run that it has not got and is not getting."""
        found: list[int] = []
        rest = run.between(0, run.stop) if self._looks_back[run.group_index] else run
        while rest:
            start, stop = self.lacking(rest)
            found += range(max(start, run.start), stop)
            if start == stop:
                break
            rest = rest.between(stop, rest.stop)
        return found

    def _discard(self, keys: Sequence[OffloadKey]) -> None:
        self._discards.add(keys)

    def _numbers(self, count: int) -> Ids:
        """Number chunks that are on their way."""
        first = self._ticket
        self._ticket = (first + count) % TICKETS
        return ids(range(first, first + count))

    def _note_skipped(self, count: int, reason: str) -> None:
        if count:
            self._metrics.add("tier_skipped_chunks", count, f"{self.plan.name},{reason}")
