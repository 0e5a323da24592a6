"""What crosses between the two halves, in the classes that vLLM wants to see."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtide.jobs import OffloadingConnectorMetadata, OffloadingWorkerMetadata


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, once a step."""

    step: OffloadingConnectorMetadata


@dataclass(frozen=True, slots=True)
class WorkerAnswers(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, once a step, joined over ranks."""

    answers: OffloadingWorkerMetadata

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerAnswers":
        """Join with what another rank said."""
        if not isinstance(other, WorkerAnswers):
            return self
        return WorkerAnswers(self.answers.combine(other.answers))
