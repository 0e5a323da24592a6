"""What is fixed at start, and what is known of each request.

The owner of per-request state keeps it here, in its own table; nothing is hung on the engine's objects.
"""

from dataclasses import dataclass, field

from kvtide.geometry import GroupGeometry, KVGeometry
from kvtide.jobs import JobId, ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.base import Refusal
from kvtide.scheduler.engine import EngineRequest
from kvtide.scheduler.limits import UNLIMITED, RequestLimits


@dataclass(frozen=True, slots=True)
class SchedulerOffloadConfig:
    """Geometry and limits, fixed at start.

    Attributes:
        geometry: Groups, blocks and chunks.
        offload_prompt_only: Leave out what was generated.
        restore_interval_tokens: Behind a window, chunks are kept for restore points so far apart, and for the
            ends of prompts and requests; 0 for every point there can be.
        holds_stored_blocks: Blocks are held while a store reads them: the engine may write into a new
            block before it lets the workers wait for a fenced copy.
        generated_store_tokens: What was generated is stored in pieces of about so many tokens.
        defer_limit_s: Longest wait for somebody else's copy.
        transfer_deadline_s: A copy that has not begun by then is given up.
        store_queue_bytes: Bytes of stores that may be open at once.
        with_events: Whether anyone listens to KV events.
        lazy: Store what the engine is about to hand out, not what is complete.
        promotion_share: Of host memory, what promotions may take before their requests have read it.
        probe_wait_s: Longest wait for what shared tiers answer.
        reset_keeps_tiers: What lies below host memory is still right after a reset.
        blocks_per_step: Blocks that the engine hands out in one step at most, loads left aside.
    """

    geometry: KVGeometry
    offload_prompt_only: bool = False
    defer_limit_s: float = 2.0
    transfer_deadline_s: float = 30.0
    store_queue_bytes: int = 1 << 30
    with_events: bool = False
    generated_store_tokens: int = 256
    restore_interval_tokens: int = 0
    holds_stored_blocks: bool = False
    lazy: bool = False
    blocks_per_step: int = 0
    promotion_share: float = 0.25
    probe_wait_s: float = 0.05
    reset_keeps_tiers: bool = False

    @property
    def rank_count(self) -> int:
        """Ranks that answer each job."""
        return self.geometry.shard_count

    def is_lazy(self, group: GroupGeometry) -> bool:
        """Whether chunks of a group wait for the engine to need their blocks.

        With a drafter a chunk depends on the tokens after it, which the engine's hash of a block leaves open.
        """
        return self.lazy and group.looks_back and not group.lookahead_hashes


@dataclass(slots=True)
class GroupOffloadState:
    """One group of one request.

    Attributes:
        block_ids: The group's block table, as allocated.
        next_stored_chunk_idx: Chunks below it were offered for storing since the last admission.
        num_hit_chunks: Chunks that the last load brought or is bringing.
    """

    block_ids: list[int] = field(default_factory=list)
    next_stored_chunk_idx: int = 0
    num_hit_chunks: int = 0


@dataclass(slots=True)
class LookupMemo:
    """An answer and what it depended on; asked again unchanged, it is given again."""

    computed_tokens: int
    hash_count: int
    residency_epoch: int
    restored_tokens: int
    later: bool


@dataclass(slots=True)
class Wait:
    """A request is told "ask again", without a look at anything else, while somebody's load is open.

    Attributes:
        job_id: The load that brings what it lacks.
        computed_tokens: The engine's own hit when that was found out.
        until_s: When its patience ends.
    """

    job_id: JobId
    computed_tokens: int
    until_s: float


@dataclass(slots=True)
class Kept:
    """What tiers below host memory have to do with a request.

    Attributes:
        handles: Of prefixes that were brought back for it and stay until it has read them.
        coming: What was brought back for it behind what others bring: kept as soon as that has come.
        chunk_count: Chunks of both.
        jobs: Open promotions that were begun for it.
        epoch: Of residency, when it was last looked at.
        attempts: Times promotions were begun again though no more was there.
        reached_tokens: Up to where something was there when they were begun.
        sighted: It has been admitted before.
        questions: Asked of shared tiers on its behalf, that have not been answered to their end.
        asked_s: When it was first held back for answers.
    """

    handles: list[int] = field(default_factory=list)
    coming: list[ChunkRun] = field(default_factory=list)
    chunk_count: int = 0
    jobs: set[JobId] = field(default_factory=set)
    epoch: int = -1
    attempts: int = 0
    reached_tokens: int = 0
    sighted: bool = False
    questions: set[int] = field(default_factory=set)
    asked_s: float | None = None


@dataclass(slots=True)
class RequestOffloadState:
    """Beside one request of the engine.

    Attributes:
        request: The engine's own object.
        groups: Per KV cache group.
        context: Names the request to the primitives.
        limits: What it allows.
        local_tokens: The engine's own hit, as it was last told to us.
        transfer_jobs: Open jobs of this request.
        load_job: The open load, if any.
        load_failed: A load of this request has failed, ours or another connector's. None is offered again:
            the same chunks might fail for ever, and vLLM 0.32 counts the blocks of a request whose load has
            failed as reserved, against itself: a second load may wait for them for ever.
        computed: A forward has been planned for it since its admission: its blocks hold something.
        deferred_since_s: When the present wait began.
        refused: Why a store was refused, and the epoch it waits to see the end of.
        being_admitted: The engine has asked and not yet told us of blocks.
        stale: The blocks hold KV of before a reset, which must not be stored.
        below: What tiers below host memory have to do with it.
        planned_tokens: With lazy stores: tokens that were computed, or in the making, at the last look; no
            limit for all it knows but the last one.
        memo: The last lookup.
        wait: What it waits for, when that is another request's load.
        offer_at: Computed tokens from which on there may be something to store.
    """

    request: EngineRequest
    groups: list[GroupOffloadState]
    context: ReqContext
    limits: RequestLimits = UNLIMITED
    local_tokens: int = 0
    transfer_jobs: set[JobId] = field(default_factory=set)
    load_job: JobId | None = None
    load_failed: bool = False
    computed: bool = False
    deferred_since_s: float | None = None
    refused: tuple[Refusal, int] | None = None
    being_admitted: bool = False
    stale: bool = False
    memo: LookupMemo | None = None
    wait: Wait | None = None
    offer_at: int = 0
    planned_tokens: int = 0
    below: Kept = field(default_factory=Kept)

    def begin_admission(self, local_tokens: int) -> None:
        """Note that the engine asks on behalf of a request that owns no blocks."""
        self.local_tokens = local_tokens
        self.being_admitted = True
        self.stale = self.computed = False
        self.offer_at = self.planned_tokens = 0
        for group in self.groups:
            group.block_ids = []
            group.next_stored_chunk_idx = 0
