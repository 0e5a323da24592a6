"""Makes a host pool full, through the connector's own hooks.

Calls the hooks in the order of vLLM's scheduler, with vLLM's own requests and step outputs, but without
its KV cache manager: that would take most of the time, and the pool would be filled all the same.
"""

import itertools
from collections.abc import Callable, Sequence

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.scheduler.answers import all_done
from benchmarks.scheduler.engine import Engine, request
from benchmarks.scheduler.prompts import fillers
from benchmarks.scheduler.vocabulary import FILLER_CHUNKS, TOKENS_PER_BLOCK

STEP_BLOCKS = 512  # a step of 8,192 tokens


class _Table:
    """The blocks of a request, as vLLM shows them at admission."""

    def __init__(self, block_ids: list[int]) -> None:
        self._block_ids = block_ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._block_ids,)


class Filler:
    """Fills one engine's pool with prompts of a series, the next ones each time.

    Attributes:
        prompts: Prompts that were stored so far.
    """

    def __init__(self, engine: Engine, blocks: int = FILLER_CHUNKS) -> None:
        self._engine = engine
        self._blocks = blocks
        self._names = itertools.count()
        self.prompts = 0

    def fill(self, chunks: int, progress: Callable[[int], None] = lambda done: None) -> None:
        """Store prompts until ``chunks`` more chunks were offered; the last prompt is cut to fit."""
        batch: list[list[bytes]] = []
        whole, rest = divmod(chunks, self._blocks)
        done = 0
        for hashes in fillers("filler", self.prompts, whole + (rest > 0), self._blocks):
            done += len(hashes)
            batch.append(hashes if done <= chunks else hashes[:rest])
            if len(batch) * self._blocks >= STEP_BLOCKS:
                self._store(batch)
                batch = []
                progress(done)
        if batch:
            self._store(batch)
        self.prompts += whole + (rest > 0)

    def store(self, hashes: Sequence[bytes]) -> None:
        """Store one prompt of any length."""
        self._store([hashes])

    def _store(self, batch: Sequence[Sequence[bytes]]) -> None:
        """One step that computes these prompts, and one without tokens that ends their copies.

        The step without tokens keeps kvtide from learning how fast this engine computes: it does not.
        """
        engine, connector = self._engine, self._engine.connector
        requests = [
            request(f"fill-{next(self._names)}", hashes, len(hashes) * TOKENS_PER_BLOCK) for hashes in batch
        ]
        step = SchedulerOutput.make_empty()
        tables: list[list[int]] = []
        first_block = 1
        for one in requests:
            count = len(one.block_hashes)
            table = list(range(first_block, first_block + count))
            first_block += count
            tables.append(table)
            connector.on_new_request(one)
            connector.get_num_new_matched_tokens(one, 0)
            connector.update_state_after_alloc(one, _Table(table), 0)
            step.scheduled_new_reqs.append(NewRequestData.from_request(one, (list(table),)))
            step.num_scheduled_tokens[one.request_id] = one.num_tokens
            step.total_num_scheduled_tokens += one.num_tokens
        jobs = engine.noted(connector.build_connector_meta(step))
        self._end(requests, tables)
        after = SchedulerOutput.make_empty()
        after.finished_req_ids = {one.request_id for one in requests}
        late = engine.noted(connector.build_connector_meta(after))
        engine.tell(all_done([*jobs.keys, *late.keys], engine.ours))

    def _end(self, requests: Sequence[Request], tables: Sequence[list[int]]) -> None:
        for one, table in zip(requests, tables, strict=True):
            one.num_computed_tokens = one.num_tokens
            one.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self._engine.connector.request_finished_all_groups(one, (table,))
