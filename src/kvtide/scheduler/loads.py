"""Loads: planning one, and knowing which chunks somebody is bringing to the device already.

A second request that wants chunks which a first one is loading does not load them again: it waits, for a
bounded time, and then hits the engine's own cache.
"""

from kvtide.errors import MissingChunkError
from kvtide.geometry import KVGeometry, chunks_needed
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId, ids
from kvtide.keys import ChunkRun
from kvtide.manager.base import OffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.scheduler.open_jobs import HeldChunks, OpenJobs, TransferJobStatus
from kvtide.scheduler.state import RequestOffloadState


class LoadPlanner:
    """Plans loads into ``jobs`` and settles their ends."""

    def __init__(
        self, geometry: KVGeometry, manager: OffloadingManager, jobs: OpenJobs, metrics: MetricsDelta
    ) -> None:
        self._geometry = geometry
        self._manager = manager
        self._jobs = jobs
        self._metrics = metrics
        self._loading: dict[JobId, list[ChunkRun]] = {}

    def brought_by(self, state: RequestOffloadState, computed_tokens: int) -> JobId | None:
        """Name the open load that brings the first chunk this request lacks; those after it come along."""
        for job_id, runs in self._loading.items():
            for run in runs:
                group = self._geometry.groups[run.group_index]
                first = computed_tokens // group.tokens_per_chunk
                if run.start <= first < run.stop:
                    mine = group.run(state.request.block_hashes, first, first + 1)
                    if mine.hash_of(first) == run.hash_of(first):
                        return job_id
        return None

    def plan(
        self, state: RequestOffloadState, restored_tokens: int, after: frozenset[JobId], now_s: float
    ) -> None:
        """Pin the chunks and open the job that fills the request's blocks up to ``restored_tokens``.

        Args:
            state: Of the request, its block tables recorded.
            restored_tokens: Tokens of the prompt it will have after the load.
            after: Jobs that still touch the target blocks.
            now_s: Now.
        """
        held: list[HeldChunks] = []
        hops: tuple[Hop, ...] = ()
        try:
            for group in self._geometry.groups:
                needed = chunks_needed(group, state.local_tokens, restored_tokens)
                run = group.run(state.request.block_hashes, needed.start, needed.stop).frozen()
                held.append(HeldChunks(run, self._manager.prepare_load(run, state.context)))
            hops = (Hop(_joined(held), self._targets(state, restored_tokens)),)
        except MissingChunkError:
            # The engine has parked the request by now: a job without a hop fails on the worker, and the
            # request is computed.
            for chunks in held:
                self._manager.complete_load(chunks.run, chunks.spec, state.context)
            held = []
        status = self._jobs.plan(
            state,
            self._manager.generation,
            Direction.LOAD,
            hops,
            held,
            now_s,
            after,
            restored_tokens - state.local_tokens,
        )
        state.load_job = status.job.job_id
        self._loading[status.job.job_id] = [chunks.run for chunks in held]
        for group_state, chunks in zip(state.groups, held, strict=False):
            group_state.num_hit_chunks = len(chunks.run)

    def give_up(self, status: TransferJobStatus) -> None:
        """Part a request from its load that does not end: it is computed. Its chunks stay pinned."""
        state = status.owner
        status.given_up = True
        self._loading.pop(status.job.job_id, None)
        state.transfer_jobs.discard(status.job.job_id)
        state.load_job = None
        state.load_failed = True
        self._metrics.add("failed_load_requests", 1)

    def ended(self, status: TransferJobStatus) -> None:
        """Unpin the chunks of a load that was closed; after a failure they are not offered to it again."""
        state = status.owner
        for chunks in status.held:
            self._manager.complete_load(chunks.run, chunks.spec, state.context)
        if status.given_up:
            return
        del self._loading[status.job.job_id]
        state.load_job = None
        if not status.failed:
            self._metrics.add("hit_tokens", status.token_count, "host")
            return
        self._metrics.add("failed_load_requests", 1)
        state.load_failed = True

    def check_invariants(self) -> None:
        """Check that nobody waits for a load that is closed."""
        for job_id in self._loading:
            assert self._jobs.get(job_id) is not None, f"load {job_id} is closed and still waited for"

    def _targets(self, state: RequestOffloadState, restored_tokens: int) -> GPULoadStoreSpec:
        block_ids = ids(())
        sizes: list[int] = []
        indices: list[int] = []
        for group_state, group in zip(state.groups, self._geometry.groups, strict=True):
            needed = max(state.local_tokens, group.first_needed_token(restored_tokens))
            first = needed // group.tokens_per_block
            blocks = group_state.block_ids[first : -(-restored_tokens // group.tokens_per_block)]
            block_ids.extend(blocks)
            sizes.append(len(blocks))
            indices.append(first)
        return GPULoadStoreSpec(block_ids, tuple(sizes), tuple(indices))


def _joined(held: list[HeldChunks]) -> CPULoadStoreSpec:
    if len(held) == 1:
        return held[0].spec
    slots = ids(())
    for chunks in held:
        slots.extend(chunks.spec.slots)
    return CPULoadStoreSpec(slots, tuple(len(chunks.spec.slots) for chunks in held))
