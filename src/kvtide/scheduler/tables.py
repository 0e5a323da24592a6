"""Which blocks requests own, and which copies a step has to wait for before it writes them.

Every way in which the engine hands out a block ends here, where it is checked against open copies. Knows
block tables and fences; does not know what is in a block, or why it was given.
"""

from collections.abc import Mapping, Sequence

from kvtide.geometry import KVGeometry
from kvtide.jobs import JobId
from kvtide.scheduler.engine import BlockTable, EngineStep
from kvtide.scheduler.lazy import LazyStores
from kvtide.scheduler.open_jobs import OpenJobs
from kvtide.scheduler.state import RequestOffloadState


class BlockTables:
    """The tables of requests, as they were told last.

    Args:
        geometry: Of the groups.
        jobs: Open copies and the blocks they touch.
        lazy: Told of every block that is given away; None when stores are eager.
    """

    def __init__(self, geometry: KVGeometry, jobs: OpenJobs, lazy: LazyStores | None) -> None:
        self._geometry = geometry
        self._jobs = jobs
        self._lazy = lazy
        self._flush: set[JobId] = set()

    def admitted(self, state: RequestOffloadState, block_ids: BlockTable, loaded_tokens: int) -> set[JobId]:
        """Take note of an admission: ``block_ids`` is the request's complete table, all groups.

        Returns:
            Copies in the way of its load alone; those in the way of a forward are the step's to wait for.
        """
        restored_tokens = state.local_tokens + loaded_tokens
        after: set[JobId] = set()
        for group_state, group in zip(state.groups, self._geometry.groups, strict=True):
            table = block_ids[group.engine_index]
            # The engine's own hit keeps its contents; what it gave beyond that is about to be written.
            local_tokens = 0 if self._geometry.takes_hits_back else state.local_tokens
            first_new = max(len(group_state.block_ids), local_tokens // group.tokens_per_block)
            first_computed = first_new
            if loaded_tokens:
                first_computed = max(first_new, -(-restored_tokens // group.tokens_per_block))
            after |= self._jobs.fences.conflicts(table[first_new:first_computed])
            self._flush |= self._jobs.fences.conflicts(table[first_computed:])
            if self._lazy is not None:
                self._lazy.handed_out(table[first_new:])
            group_state.block_ids = list(table)
        for other in self._geometry.others:
            self._handed_out(block_ids[other.engine_index])
        return after

    def begin_step(self, step: EngineStep, requests: Mapping[str, RequestOffloadState]) -> None:
        """Take note of what a step takes away, copies into, and gives to running requests."""
        for request_id in step.preempted_req_ids or ():
            if (state := requests.get(request_id)) is not None:
                self._flush |= state.transfer_jobs - {state.load_job}
                if self._lazy is not None:
                    self._lazy.preempted(state)
        for copy in step.kv_cache_block_copies or ():
            self._flush |= self._jobs.fences.conflicts((copy.dst_block_id,))
        cached = step.scheduled_cached_reqs
        for request_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            # Those of a resumed request came with its admission.
            if new_block_ids is None or request_id in cached.resumed_req_ids:
                continue
            for block_ids in new_block_ids:
                self._handed_out(block_ids)
            if (state := requests.get(request_id)) is not None:
                for group_state, group in zip(state.groups, self._geometry.groups, strict=True):
                    group_state.block_ids.extend(new_block_ids[group.engine_index])

    def take_waits(self) -> frozenset[JobId]:
        """Hand out the copies, still open, that the step has to wait for."""
        flush, self._flush = self._flush, set()
        return frozenset(job_id for job_id in flush if self._jobs.get(job_id) is not None)

    def follow_windows(self, step: EngineStep, state: RequestOffloadState) -> None:
        """Take over a table: behind a window the engine has let go of old blocks."""
        blocks = step.kv_connector_block_state
        if self._geometry.is_one_prefix or blocks is None:
            return
        if tables := blocks.get_block_ids(state.request.request_id):
            self.take(state, tables)

    def take(self, state: RequestOffloadState, tables: BlockTable) -> None:
        """Take over a whole table that gives nothing away."""
        for group_state, group in zip(state.groups, self._geometry.groups, strict=True):
            group_state.block_ids = list(tables[group.engine_index])

    def _handed_out(self, block_ids: Sequence[int]) -> None:
        self._flush |= self._jobs.fences.conflicts(block_ids)
        if self._lazy is not None:
            self._lazy.handed_out(block_ids)
