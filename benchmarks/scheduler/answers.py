"""What a worker would report of the jobs that a step told it of, were every copy instant.

Knows the two connectors' metadata: ours and that of vLLM's ``OffloadingConnector``. Copies nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata as NativeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata as NativeAnswers,
)

from kvtide.jobs import Direction, HopResult, OffloadingWorkerMetadata, PoolReport
from kvtide.vllm.metadata import StepMetadata, WorkerAnswers


@dataclass(slots=True)
class Jobs:
    """The jobs of one step, whichever connector planned them.

    Attributes:
        loading: Requests that are being loaded.
        stored_chunks: How many chunks are copied down, by job.
        loaded_chunks: How many chunks are copied up, by job.
        keys: What names the jobs to their connector.
    """

    loading: list[str]
    stored_chunks: list[int]
    loaded_chunks: list[int]
    keys: list[Any]


def jobs_of(metadata: Any) -> Jobs:
    """Read what a step tells the workers.

    Raises:
        TypeError: It is neither connector's.
    """
    if isinstance(metadata, StepMetadata):
        return _ours(metadata)
    if isinstance(metadata, NativeMetadata):
        return _native(metadata)
    raise TypeError(f"{type(metadata).__name__} is of another connector")


def _ours(metadata: StepMetadata) -> Jobs:
    jobs = Jobs([], [], [], [])
    for job in metadata.step.jobs:
        hop = job.hops[0]
        if job.direction is Direction.STORE:
            jobs.stored_chunks.append(len(hop.target.slots))
        else:
            jobs.loading.append(job.request_id)
            jobs.loaded_chunks.append(len(hop.source.slots))
        jobs.keys += [(job.job_id, index) for index in range(len(job.hops))]
    return jobs


def _native(metadata: NativeMetadata) -> Jobs:
    loads, stores = metadata.load_jobs, metadata.store_jobs
    return Jobs(
        [job.req_id for job in loads.values()],
        [len(job.dst_spec.block_ids) for job in stores.values()],
        [len(job.src_spec.block_ids) for job in loads.values()],
        [*loads, *stores],
    )


def all_done(keys: Sequence[Any], ours: bool) -> WorkerAnswers | NativeAnswers:
    """Report that these jobs have ended well, as the only rank."""
    if ours:
        return WorkerAnswers(OffloadingWorkerMetadata({key: {0: HopResult.DONE} for key in keys}))
    return NativeAnswers(dict.fromkeys(keys, 1))


def pool_ready(chunks: int, chunk_bytes: int) -> WorkerAnswers:
    """Report that the whole pool of the only rank can be used."""
    return WorkerAnswers(OffloadingWorkerMetadata(pools={0: PoolReport(chunks, chunks, chunk_bytes)}))
