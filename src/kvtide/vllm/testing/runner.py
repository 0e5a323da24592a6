"""One step on all ranks, in the order in which vLLM's model runners call a connector's hooks.

Knows the order, and what a runner does with blocks between two forwards. What is in the blocks is the
oracle's business, what is to be computed the scheduler's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from kvtide.vllm.testing.demands import Span
from kvtide.vllm.testing.memory import DeviceMemory
from kvtide.vllm.testing.oracle import Oracle
from kvtide.vllm.testing.ranks import RankAnswers, results_of
from kvtide.vllm.testing.shape import Runner
from kvtide.vllm.testing.tables import WorkerTables


class ModelRunner:
    """The workers of all ranks.

    Args:
        order: Whose order.
        ranks: Their connectors.
        memory: Their KV tensors.
        oracle: Judges bytes.
        tables: What they know of requests.
        answers: Joins what they say.
        check_loads: Called with a rank and requests whose load it says has ended well.

    Attributes:
        between: Called at points of a step where copies may go on.
    """

    def __init__(
        self,
        order: Runner,
        ranks: Sequence[KVConnectorBase_V1],
        memory: DeviceMemory,
        oracle: Oracle,
        tables: WorkerTables,
        answers: RankAnswers,
        check_loads: Callable[[int, set[str]], None],
    ) -> None:
        self._order = order
        self._ranks = ranks
        self._memory = memory
        self._oracle = oracle
        self._tables = tables
        self._answers = answers
        self._check_loads = check_loads
        self.between: Callable[[], None] = lambda: None

    def execute(self, step: SchedulerOutput, requests: Mapping[str, Any]) -> ModelRunnerOutput:
        """Run a step; ``requests`` are the scheduler's.

        Raises:
            WrongBytesError: A forward would have read a byte that its prefix does not demand.
        """
        ranks, metadata, order = self._ranks, step.kv_connector_metadata, self._order
        self.between()
        if order is Runner.V2:
            self._prepare_blocks(step)
        for rank in ranks:
            rank.handle_preemptions(metadata)
        if order is not Runner.V2:
            self._prepare_blocks(step)
        for rank in ranks:
            rank.bind_connector_metadata(metadata)
        self.between()
        spans, sampled = self._forward(step, requests)
        self.between()
        if order is Runner.V2:
            self._oracle.settle(spans)
        for rank in ranks:
            rank.start_load_kv(None)
        if order is Runner.V1:
            self._oracle.settle(spans)
        if order is not Runner.V1_DRAFTING:
            for rank in ranks:
                rank.wait_for_save()
        self.between()
        output = self._answers.joined([self._results(index, step) for index in range(len(ranks))])
        if order is Runner.V1_DRAFTING:
            self._oracle.settle(spans)
        for rank in ranks:
            if order is Runner.V1_DRAFTING:
                rank.wait_for_save()
            rank.clear_connector_metadata()
        req_ids = list(sampled)
        return ModelRunnerOutput(
            req_ids,
            {request_id: index for index, request_id in enumerate(req_ids)},
            list(sampled.values()),
            kv_connector_output=output,
        )

    def guesses(self, output: ModelRunnerOutput) -> DraftTokenIds:
        """What the drafter guesses to come next, of the requests of a step."""
        return DraftTokenIds(output.req_ids, self._tables.guesses(output.req_ids))

    def _prepare_blocks(self, step: SchedulerOutput) -> None:
        """Zero new blocks and copy blocks, for models that need it."""
        if step.new_block_ids_to_zero:
            self._memory.clear(step.new_block_ids_to_zero)
        if step.kv_cache_block_copies:
            sources, targets = np.array(step.kv_cache_block_copies).T
            self._memory.copy(sources, targets)

    def _forward(
        self, step: SchedulerOutput, requests: Mapping[str, Any]
    ) -> tuple[list[Span], dict[str, list[int]]]:
        self._tables.follow(step, requests)
        spans, sampled = [], {}
        for request_id in step.num_scheduled_tokens:
            demanded = self._oracle.demanded(request_id)
            span, sampled[request_id] = self._tables.compute(request_id, step, demanded)
            spans.append(span)
        if spans:
            self._oracle.write(spans)
            self.between()
            self._oracle.read(spans)
        return spans, sampled

    def _results(self, rank: int, step: SchedulerOutput) -> KVConnectorOutput:
        output = results_of(self._ranks[rank], step.finished_req_ids)
        self._check_loads(rank, (output.finished_recving or set()) - output.failed_recving)
        return output
