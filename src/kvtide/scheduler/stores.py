"""Which chunks of a request become a store now.

Turns "so many tokens are computed" into jobs: chunks that are whole and whose hash is known, offered once
in prefix order. What was refused for want of room is offered again only after something made room.
"""

from collections.abc import Sequence

from kvtide.geometry import GroupGeometry
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, Ids, OffloadPolicy, ids
from kvtide.keys import ChunkRun
from kvtide.manager.base import OffloadingManager, PrepareStoreOutput, Refusal
from kvtide.metrics import MetricsDelta
from kvtide.scheduler.contents import content_of
from kvtide.scheduler.fences import NULL_BLOCK
from kvtide.scheduler.holds import BlockHolds
from kvtide.scheduler.limits import NO_LIMIT
from kvtide.scheduler.lower_tiers import LowerTiers
from kvtide.scheduler.open_jobs import HeldChunks, OpenJobs
from kvtide.scheduler.restore_points import chunks_kept
from kvtide.scheduler.state import GroupOffloadState, RequestOffloadState, SchedulerOffloadConfig

EVERY_GROUP_NOW: frozenset[int] = frozenset()


class StorePlanner:
    """Plans stores into ``jobs``.

    Attributes:
        slot_bytes: Of one slot, all ranks together; 0 until a pool was reported. Bounds the queue.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        manager: OffloadingManager,
        jobs: OpenJobs,
        metrics: MetricsDelta,
        holds: BlockHolds,
        lower: LowerTiers | None = None,
    ) -> None:
        self._config = config
        self._lower = lower
        self._holds = holds
        interval = config.geometry.restore_interval
        self._interval_tokens = -(-max(config.restore_interval_tokens, 1) // interval) * interval
        self._manager = manager
        self._jobs = jobs
        self._metrics = metrics
        self.slot_bytes = 0
        self._lazy_groups = frozenset(
            group.group_index for group in config.geometry.groups if config.is_lazy(group)
        )

    def plan(
        self, state: RequestOffloadState, computed_tokens: int, now_s: float, final: bool = False
    ) -> None:
        """Offer what is whole by ``computed_tokens`` and was not offered since the last admission.

        A prompt is offered as it is computed; what is generated in pieces of several chunks, and at the
        end: a chunk at a time costs several times as much, and nobody reads it meanwhile.

        Args:
            state: Of the request.
            computed_tokens: Tokens whose KV is there once this step has run.
            now_s: Now.
            final: Nothing comes after this.
        """
        request = state.request
        last_token = self.last_token(state)
        if state.stale or not last_token:
            state.offer_at = NO_LIMIT
            return
        computed_tokens = min(computed_tokens, last_token)
        later = self._left_for_later(state)
        for group_state, group in zip(state.groups, self._config.geometry.groups, strict=True):
            if group.keeps_states or group.group_index in later:
                continue
            # Tokens without a hash are guesses of a drafter or not sampled yet.
            hashed = group.hashed_chunks(len(request.block_hashes))
            chunk_count = min(group.full_chunks(computed_tokens), hashed)
            if not final and chunk_count < group_state.next_stored_chunk_idx + self._piece(state, group):
                chunk_count = min(chunk_count, group.full_chunks(request.num_prompt_tokens))
            if chunk_count > group_state.next_stored_chunk_idx and not self._still_refused(state):
                if group.looks_back:
                    self._offer(state, group_state, group, chunk_count, now_s)
                else:
                    end = computed_tokens if final else 0
                    self._offer_windows(state, group_state, group, chunk_count, end, now_s)
        state.offer_at = self._next_offer(state, last_token)

    def plan_state(
        self, state: RequestOffloadState, engine_index: int, block_id: int, token_count: int, now_s: float
    ) -> None:
        """Store the state that recurrent layers have after ``token_count`` tokens, in block ``block_id``.

        It is there when this step has run, and for as long as the block is fenced. ``engine_index`` is the
        group's position among the engine's.
        """
        group = next(one for one in self._config.geometry.groups if one.engine_index == engine_index)
        chunk_count = token_count // group.tokens_per_chunk
        hashed = group.hashed_chunks(len(state.request.block_hashes))
        if (
            token_count % group.tokens_per_chunk
            or state.stale
            or not 0 < chunk_count <= hashed
            or token_count > self.last_token(state)
        ):
            return
        own_hash = state.request.block_hashes[chunk_count * group.hashes_per_chunk - 1]
        if not self._holds.goes_by(block_id, own_hash):
            # With asynchronous scheduling vLLM 0.32 offers a state when tokens are accepted. By the next step
            # it may have let go of the block and given it to somebody.
            return
        run = group.run(state.request.block_hashes, chunk_count - 1, chunk_count)
        output = self._manager.prepare_store(run, state.context, self._queue_room())
        if output.keys_to_store:
            self._open(state, group, output, ids((block_id,)), now_s)
        if output.refusal is not None:
            self._metrics.add("skipped_store_chunks", output.refused_count, output.refusal.value)

    def plan_left(
        self,
        owner: RequestOffloadState,
        group: GroupGeometry,
        run: ChunkRun,
        block_ids: Sequence[int],
        now_s: float,
    ) -> Refusal | None:
        """Store what a request has left behind.

        In pieces of what one step hands out: the end is needed first, and a copy of all of it may take longer
        than a step may wait.

        Args:
            owner: Stands for the request.
            group: Of the chunks.
            run: Chunks whose blocks hold them; those before it are known.
            block_ids: From the beginning of the prompt.
            now_s: Now.

        Returns:
            Why the rest of it was refused.
        """
        piece = max(1, self._config.blocks_per_step // group.blocks_per_chunk)
        for start in range(run.start, run.stop, piece):
            offered = run.between(start, min(start + piece, run.stop))
            output = self._manager.prepare_store(offered, owner.context, self._queue_room())
            if stored := output.keys_to_store:
                blocks = slice(stored.start * group.blocks_per_chunk, stored.stop * group.blocks_per_chunk)
                self._open(owner, group, output, ids(block_ids[blocks]), now_s)
            if output.refusal is Refusal.BELOW_THRESHOLD:
                # All that goes counts as offered, not one piece of it.
                rest = run.between(start, run.stop)
                output = self._manager.prepare_store(rest, owner.context, self._queue_room())
            if output.refusal is not None:
                self._metrics.add("skipped_store_chunks", output.refused_count, output.refusal.value)
                return output.refusal
        return None

    def room_epochs(self) -> tuple[int, int]:
        """Count what may end a refusal, of any kind."""
        return self._epoch(Refusal.QUEUE_FULL), self._epoch(Refusal.POOL_FULL)

    def last_token(self, state: RequestOffloadState) -> int:
        """Tokens of a request that may be stored."""
        if self._config.offload_prompt_only:
            return min(state.limits.max_offload_tokens, state.request.num_prompt_tokens)
        return state.limits.max_offload_tokens

    def _next_offer(self, state: RequestOffloadState, last_token: int) -> int:
        """Say how many tokens have to be computed before there is anything new to offer."""
        prompt_tokens, offers = state.request.num_prompt_tokens, []
        later = self._left_for_later(state)
        for group_state, group in zip(state.groups, self._config.geometry.groups, strict=True):
            tokens = (group_state.next_stored_chunk_idx + 1) * group.tokens_per_chunk
            if tokens > last_token or group.keeps_states or group.group_index in later:
                continue
            if tokens > prompt_tokens:
                # What a limit cuts off is offered when the request ends.
                tokens += (self._piece(state, group) - 1) * group.tokens_per_chunk
            offers.append(tokens)
        return min(offers, default=NO_LIMIT)

    def _piece(self, state: RequestOffloadState, group: GroupGeometry) -> int:
        """Chunks of what is generated that are offered together."""
        if state.limits.policy is OffloadPolicy.REQUEST_LEVEL:
            return 1
        return max(1, self._config.generated_store_tokens // group.tokens_per_chunk)

    def _left_for_later(self, state: RequestOffloadState) -> frozenset[int]:
        """Groups of which nothing is stored until the engine needs its blocks."""
        return EVERY_GROUP_NOW if state.limits.policy is OffloadPolicy.REQUEST_LEVEL else self._lazy_groups

    def _offer(
        self,
        state: RequestOffloadState,
        group_state: GroupOffloadState,
        group: GroupGeometry,
        chunk_count: int,
        now_s: float,
    ) -> None:
        # From the first chunk on, whatever was offered before: a parent may have been evicted since, and
        # a chunk without it could not be read.
        run = group.run(state.request.block_hashes, 0, chunk_count)
        group_state.next_stored_chunk_idx = chunk_count
        state.refused = None
        self._store(state, group_state, group, run, now_s)

    def _offer_windows(
        self,
        state: RequestOffloadState,
        group_state: GroupOffloadState,
        group: GroupGeometry,
        chunk_count: int,
        end_tokens: int,
        now_s: float,
    ) -> None:
        """Offer what a later request can use, of what the engine still holds."""
        prompt_tokens, geometry = state.request.num_prompt_tokens, self._config.geometry
        # With a drafter the last chunk of a prompt has no name: who asks for the same again ends before it.
        unnamed = geometry.finest.lookahead_hashes * geometry.finest.tokens_per_hash
        whole = {prompt_tokens - 1, prompt_tokens, end_tokens}
        ends = {geometry.restore_point(max(0, end - short)) for end in whole for short in (0, unnamed)}
        as_a_whole = state.limits.policy is OffloadPolicy.REQUEST_LEVEL
        interval_tokens = geometry.restore_interval if as_a_whole else self._interval_tokens
        first = self._first_held(group_state, group, chunk_count)
        group_state.next_stored_chunk_idx = chunk_count
        state.refused = None
        for kept in chunks_kept(group, interval_tokens, ends, first, chunk_count):
            run = group.run(state.request.block_hashes, kept.start, kept.stop)
            self._store(state, group_state, group, run, now_s)

    def _store(
        self,
        state: RequestOffloadState,
        group_state: GroupOffloadState,
        group: GroupGeometry,
        run: ChunkRun,
        now_s: float,
    ) -> None:
        while run:
            output = self._manager.prepare_store(run, state.context, self._queue_room())
            if stored := output.keys_to_store:
                blocks = slice(stored.start * group.blocks_per_chunk, stored.stop * group.blocks_per_chunk)
                self._open(state, group, output, ids(group_state.block_ids[blocks]), now_s)
            if output.refusal is not None:
                self._note_refusal(state, group_state, group, output)
                return
            # With a window there may be more behind chunks that are there already.
            run = run.between(output.keys_to_store.stop, run.stop)

    def _first_held(self, group_state: GroupOffloadState, group: GroupGeometry, chunk_count: int) -> int:
        """First chunk not offered yet from which on the engine still holds every block."""
        first = group_state.next_stored_chunk_idx * group.blocks_per_chunk
        blocks = group_state.block_ids[first : chunk_count * group.blocks_per_chunk]
        gone = max((index + 1 for index, block in enumerate(blocks) if block == NULL_BLOCK), default=0)
        return -(-(first + gone) // group.blocks_per_chunk)

    def _note_refusal(
        self,
        state: RequestOffloadState,
        group_state: GroupOffloadState,
        group: GroupGeometry,
        output: PrepareStoreOutput,
    ) -> None:
        assert output.refusal is not None
        self._metrics.add("skipped_store_chunks", output.refused_count, output.refusal.value)
        # Behind a window the blocks will be somebody else's by the time there is room.
        if not output.refusal.is_verdict and group.looks_back:
            group_state.next_stored_chunk_idx -= output.refused_count
            state.refused = (output.refusal, self._epoch(output.refusal))

    def _open(
        self,
        state: RequestOffloadState,
        group: GroupGeometry,
        output: PrepareStoreOutput,
        block_ids: Ids,
        now_s: float,
    ) -> None:
        run = output.keys_to_store
        content = content_of(state, run, group) if self._config.with_events else None
        if content is not None:
            self._manager.describe(run, output.store_spec, content)
        first = run.stop * group.blocks_per_chunk - len(block_ids)
        hops: tuple[Hop, ...] = (self._hop(group, block_ids, first, output.store_spec),)
        writes = []
        if self._lower is not None:
            writes = self._lower.behind_store(state, run, output.store_spec.slots, content)
            hops += self._lower.hops_of(writes)
        status = self._jobs.plan(
            state,
            self._manager.generation,
            Direction.STORE,
            hops,
            (HeldChunks(run, output.store_spec),),
            now_s,
        )
        if self._lower is not None:
            self._lower.enter_behind(status.job.job_id, writes)
        if self._config.holds_stored_blocks:
            self._holds.take(status)

    def _hop(self, group: GroupGeometry, block_ids: Ids, first: int, slots: CPULoadStoreSpec) -> Hop:
        """Say which blocks go where; of several groups, those of one."""
        groups = len(self._config.geometry.groups)
        if groups == 1:
            return Hop(GPULoadStoreSpec(block_ids, (len(block_ids),), (first,)), slots)
        sizes, places, firsts = [0] * groups, [0] * groups, [0] * groups
        sizes[group.group_index], firsts[group.group_index] = len(block_ids), first
        places[group.group_index] = len(slots.slots)
        device = GPULoadStoreSpec(block_ids, tuple(sizes), tuple(firsts))
        return Hop(device, CPULoadStoreSpec(slots.slots, tuple(places)))

    def _still_refused(self, state: RequestOffloadState) -> bool:
        return state.refused is not None and self._epoch(state.refused[0]) == state.refused[1]

    def _epoch(self, refusal: Refusal) -> int:
        """Count what may end a refusal of this kind."""
        return self._jobs.closed_count if refusal is Refusal.QUEUE_FULL else self._manager.room_epoch

    def _queue_room(self) -> int | None:
        if not self.slot_bytes:
            return None
        return max(0, self._config.store_queue_bytes // self.slot_bytes - self._jobs.store_chunk_count)
