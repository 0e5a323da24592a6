"""What is brought back to host memory for requests that wait in the engine's queue.

A request that arrives names what it will want; what only lies below is promoted in the order in which
requests came, within a budget of slots, and stays until the request has read it or gone. Turns "this is
below" into jobs; how long a request waits for them is decided elsewhere.
"""

from collections import Counter
from collections.abc import Iterable

from kvtide.geometry import GroupGeometry, KVGeometry, chunks_needed
from kvtide.jobs import JobId, OffloadPolicy, leading_done
from kvtide.keys import ChunkRun
from kvtide.manager.ladder import Ladder, Source
from kvtide.metrics import MetricsDelta
from kvtide.scheduler.below import BelowJobs, OpenHop, Promotion
from kvtide.scheduler.contents import content_of
from kvtide.scheduler.holds import BlockHolds
from kvtide.scheduler.lookup import readable_tokens
from kvtide.scheduler.open_jobs import HeldChunks
from kvtide.scheduler.pace import RecomputePace
from kvtide.scheduler.state import Kept, RequestOffloadState, SchedulerOffloadConfig

PIECE_CHUNKS = 16
PIECE_BYTES = 8 << 20
"""One job brings so much at most: what has come can be used while the rest is late."""

ATTEMPTS = 2
"""Times promotions are begun again for a request that goes on asking, though no more is there than before:
something is wrong with what it wants."""


class Promotions:
    """Plans promotions into ``below``.

    Args:
        config: Geometry and limits.
        ladder: Which chunk is where.
        below: Open hops.
        holds: Knows the engine's pool.
        metrics: Where to count.
        pace: How fast the engine computes.

    Attributes:
        slot_bytes: Of one slot, all ranks together; 0 until a pool was reported.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        ladder: Ladder,
        below: BelowJobs,
        holds: BlockHolds,
        metrics: MetricsDelta,
        pace: RecomputePace,
    ) -> None:
        self._pace = pace
        self._geometry: KVGeometry = config.geometry
        self._share = config.promotion_share
        self._with_events = config.with_events
        self._ladder = ladder
        self._below = below
        self._holds = holds
        self._metrics = metrics
        self._waiting: dict[str, RequestOffloadState] = {}
        self._coming: dict[str, RequestOffloadState] = {}
        self._open: dict[JobId, Promotion] = {}
        self._open_count = self._kept_count = 0  # chunks
        self._cancelled: set[JobId] = set()
        self._passed_over: dict[str, Counter[str]] = {}  # by request: chunks of tiers, at the last look
        self.slot_bytes = 0

    # -- a request's life -----------------------------------------------------------------------

    def arrived(self, state: RequestOffloadState) -> None:
        """Note a request that the engine has queued, and begin what can be begun."""
        if self.may_want(state):
            self._waiting[state.request.request_id] = state
            self.plan()

    def awaits(self, state: RequestOffloadState) -> bool:
        """Whether a request that is asked for, and owns no blocks, waits for a promotion to begin.

        One that could not be begun when it arrived, or went wrong, is tried again.
        """
        name = state.request.request_id
        if name not in self._waiting and state.below.epoch != self._ladder.host.residency_epoch:
            self.arrived(state)
        return name in self._waiting

    def let_go(self, state: RequestOffloadState) -> None:
        """Note a request that has been admitted, or is gone: what was kept for it may leave."""
        name = state.request.request_id
        self._waiting.pop(name, None)
        for tier, chunk_count in self._passed_over.pop(name, {}).items():
            self._metrics.add("tier_passed_over_chunks", chunk_count, tier)
        kept = state.below
        for handle in kept.handles:
            self._ladder.host.let_go(handle)
        self._kept_count -= kept.chunk_count
        kept.handles, kept.coming, kept.chunk_count = [], [], 0
        self._coming.pop(name, None)
        # What has not begun by now has nobody waiting for it.
        self._cancelled |= kept.jobs
        kept.jobs = set()

    def take_cancelled(self) -> frozenset[JobId]:
        """Hand out the jobs nobody waits for any more."""
        cancelled = frozenset(job_id for job_id in self._cancelled if job_id in self._open)
        self._cancelled.clear()
        return cancelled

    # -- jobs -----------------------------------------------------------------------------------

    def plan(self) -> None:
        """Begin promotions of whoever waits, first come first served, while there is room."""
        for name, state in list(self._waiting.items()):
            if self._room() <= 0:
                return
            del self._waiting[name]
            self._begin(state)
            state.below.epoch = self._ladder.host.residency_epoch

    def became_late(self, promotion: Promotion) -> None:
        """Have nobody wait for it; its slots stay taken until it has ended.

        Nor is anything begun for its request again: it goes on with what has come.
        """
        promotion.owner.below.attempts = ATTEMPTS
        self._ladder.host.abandon_store(promotion.chunks.run, promotion.chunks.spec)

    def ended(self, hop: OpenHop, promotion: Promotion) -> None:
        """Make ready what has come; what its tier has not got is struck out."""
        job_id = hop.key[0]
        run, spec, state = promotion.chunks.run, promotion.chunks.spec, promotion.owner
        del self._open[job_id]
        self._open_count -= len(run)
        fates = hop.all_fates()
        done = leading_done(fates)
        self._ladder.host.complete_part(run, spec, done)
        self._ladder.lose(promotion.tier, run, fates)
        name = self._ladder.tiers[promotion.tier - 1].plan.name
        self._metrics.add("tier_hit_chunks", done, name)
        if job_id in state.below.jobs:
            state.below.jobs.discard(job_id)
            if done:
                state.below.chunk_count += done
                self._kept_count += done
                self._keep(state, run.between(run.start, run.start + done))

    def keep_what_has_come(self) -> None:
        """Keep what had to wait for what it extends, now that this may be there."""
        for name, state in list(self._coming.items()):
            del self._coming[name]
            runs, state.below.coming = state.below.coming, []
            for run in runs:
                self._keep(state, run)

    def reset(self, states: Iterable[RequestOffloadState]) -> None:
        """Forget who waits: nothing is below any more, and nothing is kept."""
        for state in states:
            state.below = Kept()
        self._waiting.clear()
        self._coming.clear()
        self._passed_over.clear()
        self._kept_count = 0

    def check_invariants(self) -> None:
        """Check the counts."""
        open_hops = {hop.key[0] for hop in self._below if isinstance(hop.what, Promotion)}
        assert open_hops == set(self._open), f"promotions {set(self._open)}, open hops {open_hops}"
        chunks = sum(len(one.chunks.run) for one in self._open.values())
        assert chunks == self._open_count, f"{self._open_count} chunks are counted, {chunks} on their way up"
        assert self._kept_count >= 0, f"{self._kept_count} chunks are kept"

    # -- inside ---------------------------------------------------------------------------------

    def _keep(self, state: RequestOffloadState, run: ChunkRun) -> None:
        """Keep chunks that were brought back until their request has read them."""
        found = self._ladder.host.lookup(run, state.context)
        if found.ready_count == len(run):
            state.below.handles.append(self._ladder.host.keep(run))
        elif found.later:
            state.below.coming.append(run)
            self._coming[state.request.request_id] = state
        else:
            state.below.chunk_count -= len(run)
            self._kept_count -= len(run)

    def may_want(self, state: RequestOffloadState) -> bool:
        """Whether a request may be brought something from below."""
        request = state.request
        return not (
            state.load_failed
            or request.skip_reading_prefix_cache
            or not state.limits.max_load_tokens
            or request.lora_request is not None
            or state.below.attempts >= ATTEMPTS
            or not any(tier.serves for tier in self._ladder.tiers)
        )

    def _room(self) -> int:
        """Slots that promotions may still take."""
        most = max(1, int(self._ladder.host.capacity * self._share)) if self._ladder.host.capacity else 0
        return most - self._open_count - self._kept_count

    def _begin(self, state: RequestOffloadState) -> None:
        """Bring what a request can use and host memory has not got."""
        self._passed_over.pop(state.request.request_id, None)
        geometry, finest = self._geometry, self._geometry.finest
        limit = readable_tokens(state, geometry)
        run = finest.run(state.request.block_hashes, 0, finest.full_chunks(limit))
        if not run:
            return
        host = self._ladder.host
        below = geometry.restore_point(self._ladder.restore_point(run) * finest.tokens_per_chunk)
        above = max(host.restore_point(run) * finest.tokens_per_chunk, self.engine_tokens(state, below))
        if below < above + geometry.restore_interval:
            return
        begun = False
        for group, source in self._worth_bringing(state, below):
            begun |= self._bring(state, group, source)
        if begun:
            # Of a shared tier it is told bit by bit what is there: that is no reason to give up.
            state.below.attempts += below <= state.below.reached_tokens
            state.below.reached_tokens = max(below, state.below.reached_tokens)

    def _worth_bringing(self, state: RequestOffloadState, below: int) -> list[tuple[GroupGeometry, Source]]:
        """Choose, of what takes a request to ``below`` tokens, what comes sooner than it is computed."""
        found: list[tuple[GroupGeometry, Source]] = []
        passed: Counter[str] = Counter()
        for group in self._geometry.groups:
            needed = chunks_needed(group, 0, below)
            # The engine may take back the end of a prompt before all has come.
            wanted = group.run(state.request.block_hashes, needed.start, needed.stop).frozen()
            for source in self._ladder.sources(wanted):
                if self._is_worth(group, source):
                    found.append((group, source))
                    continue
                passed[self._ladder.tiers[source.tier - 1].plan.name] += len(source.run)
                if group.looks_back:
                    break
        if not passed:
            return found
        self._passed_over[state.request.request_id] = passed
        # With a part of what a point needs beside full attention nothing can be done.
        return found if all(group.looks_back for group in self._geometry.groups) else []

    def _bring(self, state: RequestOffloadState, group: GroupGeometry, source: Source) -> bool:
        """Open jobs for neighbouring chunks; False when there was no room for any."""
        piece = PIECE_CHUNKS
        if self.slot_bytes:
            piece = max(1, min(piece, PIECE_BYTES // self.slot_bytes))
        # Bringing back is no new offer: nothing is asked of the reuse filter.
        context = state.context._replace(policy=OffloadPolicy.REQUEST_LEVEL)
        host, begun = self._ladder.host, False
        for start in range(source.run.start, source.run.stop, piece):
            stop = min(start + piece, source.run.stop, start + self._room())
            if stop <= start:
                break
            output = host.prepare_store(source.run.between(start, stop), context)
            run = output.keys_to_store
            if run:
                if self._with_events:
                    host.describe(run, output.store_spec, content_of(state, run, group))
                promotion = Promotion(source.tier, HeldChunks(run, output.store_spec), state)
                job_id = self._below.promote(host.generation, promotion)
                self._open[job_id] = promotion
                self._open_count += len(run)
                state.below.jobs.add(job_id)
                begun = True
            if len(run) < stop - start:
                break
        return begun

    def _is_worth(self, group: GroupGeometry, source: Source) -> bool:
        """Whether a tier is expected to bring chunks before the engine would have computed them."""
        tier, count = self._ladder.tiers[source.tier - 1], len(source.run)
        compute_s = self._pace.seconds_for(count * group.tokens_per_chunk)
        return compute_s is None or tier.chunk_read_s * (count + 1) <= compute_s

    def engine_tokens(self, state: RequestOffloadState, limit: int) -> int:
        """Estimate what the engine itself holds of a prompt, by looking at a few of its blocks.

        Read only, and a hint: what it holds may leave before the request is admitted.
        """
        group = next((one for one in self._geometry.groups if one.looks_back), None)
        pool = self._holds.pool
        if group is None or pool is None:
            return 0
        hashes, step = state.request.block_hashes, group.tokens_per_block // group.tokens_per_hash
        low, high = 0, min(limit // group.tokens_per_block, len(hashes) // step)
        while low < high:
            middle = (low + high + 1) // 2
            held = pool.get_cached_block(hashes[middle * step - 1], [group.engine_index])
            low, high = (middle, high) if held else (low, middle - 1)
        return low * group.tokens_per_block
