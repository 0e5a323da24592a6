"""Loads: planning one, and knowing which chunks somebody is bringing to the device already.

A second request that wants chunks which a first one is loading does not load them again: it waits, for a
bounded time, and then hits the engine's own cache.
"""

from kvtide.errors import MissingChunkError
from kvtide.geometry import KVGeometry, chunks_needed
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId
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
        self._loading: dict[tuple[int, bytes], JobId] = {}

    def is_brought_by_another(self, state: RequestOffloadState, computed_tokens: int) -> bool:
        """Say whether an open load brings the first chunk this request lacks; those after it come along."""
        if not self._loading:
            return False
        for group in self._geometry.groups:
            first = computed_tokens // group.tokens_per_chunk
            run = group.run(state.request.block_hashes, first, first + 1)
            if (group.group_index, run.hash_of(first)) in self._loading:
                return True
        return False

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
        for group_state, chunks in zip(state.groups, held, strict=False):
            group_state.num_hit_chunks = len(chunks.run)
            for block_hash in chunks.run.hashes():
                self._loading.setdefault((chunks.run.group_index, block_hash), status.job.job_id)

    def ended(self, status: TransferJobStatus) -> None:
        """Unpin the chunks of a load that was closed; after a failure they are not offered to it again."""
        state = status.owner
        for chunks in status.held:
            self._manager.complete_load(chunks.run, chunks.spec, state.context)
            for block_hash in chunks.run.hashes():
                name = (chunks.run.group_index, block_hash)
                if self._loading.get(name) == status.job.job_id:
                    del self._loading[name]
        state.load_job = None
        if not status.failed:
            self._metrics.add("hit_tokens", status.token_count, "host")
            return
        self._metrics.add("failed_load_requests", 1)
        state.barred_from_chunk = state.local_tokens // self._geometry.groups[0].tokens_per_chunk
        state.memo = None

    def check_invariants(self) -> None:
        """Check that nobody waits for a load that is closed."""
        for job_id in self._loading.values():
            assert self._jobs.get(job_id) is not None, f"load {job_id} is closed and still waited for"

    def _targets(self, state: RequestOffloadState, restored_tokens: int) -> GPULoadStoreSpec:
        block_ids: list[int] = []
        sizes: list[int] = []
        indices: list[int] = []
        for group_state, group in zip(state.groups, self._geometry.groups, strict=True):
            first = state.local_tokens // group.tokens_per_block
            blocks = group_state.block_ids[first : -(-restored_tokens // group.tokens_per_block)]
            block_ids += blocks
            sizes.append(len(blocks))
            indices.append(first)
        return GPULoadStoreSpec(tuple(block_ids), tuple(sizes), tuple(indices))


def _joined(held: list[HeldChunks]) -> CPULoadStoreSpec:
    slots = tuple(slot for chunks in held for slot in chunks.spec.slots)
    return CPULoadStoreSpec(slots, tuple(len(chunks.spec.slots) for chunks in held))
