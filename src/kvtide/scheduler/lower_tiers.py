"""What the scheduler half has to do with tiers below host memory; without any there is none of it.

Hands the engine's events to those who plan: promotions for who waits, demotions of what was stored, seen
again or is about to leave, and the books that warm up after a start.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvtide.events import ChunkContent, OffloadingEvent
from kvtide.jobs import Direction, Hop, Ids, JobId, OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtide.keys import ChunkRun
from kvtide.manager.ladder import Ladder, PreparedWrite
from kvtide.manager.warming import Warming
from kvtide.metrics import MetricsDelta
from kvtide.probing import Prober
from kvtide.scheduler.below import BelowJobs, Promotion
from kvtide.scheduler.demotions import Demotions
from kvtide.scheduler.holds import BlockHolds
from kvtide.scheduler.open_jobs import OpenJobs
from kvtide.scheduler.pace import RecomputePace
from kvtide.scheduler.probes import Probes
from kvtide.scheduler.promotions import Promotions
from kvtide.scheduler.state import RequestOffloadState, SchedulerOffloadConfig

WARM_UP_LIMIT_S = 30.0
"""So long an idle engine goes on stepping for what its tiers tell of an earlier life."""


class LowerTiers:
    """The ladder's part of the scheduler half.

    Args:
        config: Geometry and limits.
        ladder: Which chunk is where.
        jobs: Gives numbers to jobs.
        holds: Knows the engine's pool.
        metrics: Where to count.
        pace: How fast the engine computes.
        prober: Asks shared tiers; None without any.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        ladder: Ladder,
        jobs: OpenJobs,
        holds: BlockHolds,
        metrics: MetricsDelta,
        pace: RecomputePace,
        prober: Prober | None = None,
    ) -> None:
        self._ladder = ladder
        self._keeps = config.reset_keeps_tiers
        self._metrics = metrics
        led = frozenset(tier.index for tier in ladder.tiers if tier.plan.is_shared)
        self._below = BelowJobs(jobs, config.rank_count, config.transfer_deadline_s, led)
        self._promotions = Promotions(config, ladder, self._below, holds, metrics, pace)
        self._probes = None if prober is None else Probes(config, ladder, prober, metrics)
        self._demotions = Demotions(config.geometry, ladder, self._below)
        self._warming = {
            tier.index: Warming(tier, ladder.host.groups, config.rank_count)
            for tier in ladder.tiers
            if tier.plan.reports_inventory
        }
        self._began_s: float | None = None
        self._gauges: dict[tuple[str, str], float] = {}

    def note_slot_bytes(self, slot_bytes: int) -> None:
        """Take note of the bytes of a slot, all ranks together."""
        self._promotions.slot_bytes = slot_bytes

    # -- the life of a request ------------------------------------------------------------------

    def arrived(self, state: RequestOffloadState, now_s: float | None = None) -> None:
        """Begin to bring back what a request that has just been queued will want, and to ask for more.

        An engine that was idle has heard nothing for long: unless told, it takes old answers for new ones.
        """
        if now_s is not None:
            self.look(now_s)
        self._promotions.arrived(state)
        if self._probes is not None and self._promotions.may_want(state):
            self._probes.arrived(state, self._promotions.engine_tokens(state, state.request.num_tokens))

    def look(self, now_s: float) -> None:
        """Take in what shared tiers have answered."""
        if self._probes is not None:
            self._probes.take(now_s)

    def awaits(self, state: RequestOffloadState, now_s: float) -> bool:
        """Whether more of a prompt is below and cannot be begun yet, or may turn out to be there."""
        self.look(now_s)
        awaited = self._promotions.awaits(state)
        return (self._probes is not None and self._probes.awaits(state, now_s)) or awaited

    def admitted(self, state: RequestOffloadState) -> None:
        """Note that a request was given blocks, and has pinned what it loads."""
        self._let_go(state)
        self._demotions.sighted(state)

    def finished(self, state: RequestOffloadState) -> None:
        """Note the end of a request."""
        self._let_go(state)

    def behind_store(
        self, state: RequestOffloadState, run: ChunkRun, slots: Ids, content: ChunkContent | None
    ) -> list[PreparedWrite]:
        """Say what follows a store that is being planned; to be entered with its number."""
        return self._demotions.behind(state, run, slots, content)

    def hops_of(self, writes: list[PreparedWrite]) -> tuple[Hop, ...]:
        """Say what follows a store's copy, as hops."""
        return tuple(self._below.hop_of(write) for write in writes)

    def enter_behind(self, job_id: JobId, writes: list[PreparedWrite]) -> None:
        """Enter the hops that follow a store's copy."""
        self._below.behind(job_id, 1, writes)

    # -- a step ---------------------------------------------------------------------------------

    def end_step(self, now_s: float) -> None:
        """Do, once a step, what nobody asks for."""
        if self._began_s is None:
            self._began_s = now_s
        for warming in self._warming.values():
            if warming.step():
                self._ladder.host.residency_epoch += 1
        self.look(now_s)
        self._promotions.keep_what_has_come()
        self._demotions.end_step()
        self._ladder.keep_room()
        self._promotions.plan()

    def told(self, told: OffloadingConnectorMetadata) -> OffloadingConnectorMetadata:
        """Add to what a step tells the workers."""
        return replace(
            told,
            jobs=told.jobs + self._below.send(),
            jobs_to_cancel=self._promotions.take_cancelled(),
            discards=self._ladder.take_discards(),
            keeps_tiers=self._keeps,
        )

    def note(self, answers: OffloadingWorkerMetadata) -> None:
        """Take in what the ranks say of their tiers; answers for hops that are closed change nothing."""
        if answers.tiers:
            self._ladder.note_reports(answers.tiers)
        for piece in answers.inventory:
            if piece.tier in self._warming:
                self._warming[piece.tier].take(piece)
        for key, results in answers.results.items():
            hop = self._below.answer(key, results, answers.fates.get(key, {}))
            if hop is None:
                continue
            if isinstance(hop.what, Promotion):
                if hop.owing:
                    self._promotions.became_late(hop.what)
                else:
                    self._promotions.ended(hop, hop.what)
            elif not hop.owing:
                self._demotions.ended(hop, hop.what)
        self._promotions.keep_what_has_come()

    # -- the rest -------------------------------------------------------------------------------

    def before_reset(self) -> None:
        """Tell whoever listens what is about to be forgotten."""
        self._ladder.tell_removed()

    def reset(self, states: Iterable[RequestOffloadState]) -> None:
        """Forget everything: the catalog has. Tiers that keep what they hold tell of it anew."""
        self._ladder.reset()
        self._promotions.reset(states)
        if self._probes is not None:
            self._probes.reset(self._keeps)
        for warming in self._warming.values():
            warming.begin(self._ladder.host.generation, expected=self._keeps)
        self._began_s = None

    def is_warming(self, now_s: float) -> bool:
        """Whether tiers are opened or tell what they hold still, and an idle engine should listen."""
        reached = self._probes is None or self._probes.are_reached
        if reached and all(warming.is_done for warming in self._warming.values()):
            return False
        return self._began_s is None or now_s < self._began_s + WARM_UP_LIMIT_S

    @property
    def is_idle(self) -> bool:
        """Whether no hop is open."""
        return not len(self._below)

    def close(self) -> None:
        """Ask no more."""
        if self._probes is not None:
            self._probes.close()

    def take_events(self) -> list[OffloadingEvent]:
        """Hand out what happened in tiers since the last call."""
        return self._ladder.take_events()

    def set_gauges(self) -> None:
        """Say how things stand, where that has changed."""
        gauges: dict[tuple[str, str], float] = {}
        for tier in self._ladder.tiers:
            name = tier.plan.name
            if not tier.plan.is_shared:  # of one that others use nobody knows
                gauges["tier_used_bytes", name] = tier.used_bytes
                gauges["tier_capacity_bytes", name] = tier.capacity_bytes
            gauges["tier_in_service", name] = int(tier.serves)
            gauges["tier_takes_writes", name] = int(tier.takes_writes)
            gauges["tier_open_write_bytes", name] = tier.open_bytes
        promoted = sum(isinstance(hop.what, Promotion) for hop in self._below)
        gauges["open_jobs", Direction.PROMOTE.value] = promoted
        gauges["open_jobs", Direction.DEMOTE.value] = len(self._below) - promoted
        for (name, label), value in gauges.items():
            if self._gauges.get((name, label)) != value:
                self._metrics.set(name, value, label)
        self._gauges = gauges

    def check_invariants(self, states: Iterable[RequestOffloadState]) -> None:
        """Check the books of tiers and of what is open between them."""
        self._promotions.check_invariants()
        if self._probes is not None:
            self._probes.check_invariants(states)
        self._ladder.check_invariants(idle=self.is_idle)

    # -- inside ---------------------------------------------------------------------------------

    def _let_go(self, state: RequestOffloadState) -> None:
        self._promotions.let_go(state)
        if self._probes is not None:
            self._probes.let_go(state)
