"""A model engine of several ranks whose copiers are told by hand, each for itself, when to finish."""

from pathlib import Path
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from kvtide.jobs import Direction, HopResult, JobId, OffloadingWorkerMetadata
from kvtide.testing import HeldDevice
from kvtide.vllm.metadata import WorkerAnswers
from kvtide.vllm.testing import EngineShape, ModelEngine


class HeldRanks(ModelEngine):
    """Two ranks.

    Attributes:
        stores: Copier of stores, per rank.
        loads: Copier of loads, per rank.
    """

    def __init__(self, folder: Path, asynchronous: bool, num_blocks: int = 33, **settings: Any) -> None:
        self.stores = [HeldDevice(Direction.STORE) for _ in range(2)]
        self.loads = [HeldDevice(Direction.LOAD) for _ in range(2)]
        shape = EngineShape(num_blocks, asynchronous=asynchronous, rank_count=2, settings=settings)
        super().__init__(
            folder,
            shape,
            lambda rank, direction: (self.stores if direction is Direction.STORE else self.loads)[rank],
        )
        for copier in (*self.stores, *self.loads):
            copier.waited.clear()

    def answer(self, job_id: JobId, results: dict[int, HopResult]) -> None:
        """Hand the scheduler half an answer that no rank gave of itself."""
        answers = OffloadingWorkerMetadata({(job_id, 0): results})
        self.connector.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=WorkerAnswers(answers))
        )

    def settle(self, limit: int = 200) -> None:
        """Step, copies finishing by themselves, until nothing is left to do."""
        for copier in (*self.stores, *self.loads):
            copier.auto_finish = True
            copier.finish()
        self.run_until_idle(limit)
        for copier in (*self.stores, *self.loads):
            copier.auto_finish = False
        self.check()
