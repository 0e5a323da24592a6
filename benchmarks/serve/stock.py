"""vLLM's own ``OffloadingConnector`` with kvtide's copies: the yardstick's way into host memory.

vLLM's connector and its manager decide, kvtide's pool, plans, copier and threads copy: what is compared
with kvtide differs in the connector alone. vLLM finds the class by ``spec_module_path``. Imported in engine
processes only.
"""

from collections.abc import Sequence

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec as ChunkIds
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvtide.config import KVTideConfig
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId
from kvtide.spec import CopierOf, cpu_copiers
from kvtide.transfer.devices import CopyOutcome
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import GroupRegions, LayerView, group_regions, slot_bytes_of

DEADLINE_S = 30.0
WAIT_S = 30.0


class SameCopies(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec for host memory; its worker is ours, as vLLM's own does not run on a CPU."""

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        if self._worker is None:
            # Threads are as many, and on the cores, as kvtide's settings have it.
            settings = KVTideConfig(host_memory=int(self.extra_config["cpu_bytes_to_use"]))
            self._worker = SameCopiesWorker(
                regions_of(kv_caches, self.blocks_per_chunk),
                self.num_chunks,
                self.blocks_per_chunk,
                cpu_copiers(settings, self.config.parallel.world_size),
            )
        return self._worker


def regions_of(kv_caches: base.CanonicalKVCaches, blocks_per_chunk: int) -> list[GroupRegions]:
    """Say where the blocks of each group are, from vLLM's canonical tensors ``int8[blocks, page_bytes]``."""
    return [
        group_regions(
            [
                _view(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes, str(index))
                for index, ref in enumerate(refs)
            ],
            blocks_per_chunk,
        )
        for refs in kv_caches.group_data_refs
    ]


def _view(tensor: base.torch.Tensor, page_bytes: int, name: str) -> LayerView:
    return LayerView(name, tensor.data_ptr(), tensor.stride(0), page_bytes, tensor.shape[0])


class SameCopiesWorker(base.OffloadingWorker):  # type: ignore[misc]
    """vLLM's jobs through kvtide's handlers.

    Args:
        groups: Where blocks are on the device.
        chunk_count: Chunks the pool holds.
        blocks_per_chunk: Blocks of one of them.
        copier: Who copies one way.
    """

    def __init__(
        self, groups: Sequence[GroupRegions], chunk_count: int, blocks_per_chunk: int, copier: CopierOf
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._pool = HostPool(chunk_count, slot_bytes_of(groups))
        self._store, self._load = (
            SingleDirectionOffloadingHandler(direction, groups, self._pool, copier(direction))
            for direction in (Direction.STORE, Direction.LOAD)
        )

    def submit_store(self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: ChunkIds) -> bool:
        device = device_of(src_spec)
        self._store.transfer_async(JobId(job_id), Hop(device, self._host(device, dst_spec)), DEADLINE_S)
        return True

    def submit_load(self, job_id: int, src_spec: ChunkIds, dst_spec: base.GPULoadStoreSpec) -> bool:
        device = device_of(dst_spec)
        self._load.transfer_async(JobId(job_id), Hop(self._host(device, src_spec), device), DEADLINE_S)
        return True

    def _host(self, device: GPULoadStoreSpec, chunks: ChunkIds) -> CPULoadStoreSpec:
        sizes = [
            -(-(first % self._blocks_per_chunk + count) // self._blocks_per_chunk) if count else 0
            for count, first in zip(device.group_sizes, device.block_indices, strict=True)
        ]
        return CPULoadStoreSpec(chunks.block_ids.tolist(), tuple(sizes))

    def get_finished(self) -> list[base.TransferResult]:
        return [_told(outcome) for outcome in (*self._store.get_finished(), *self._load.get_finished())]

    def wait(self, job_ids: set[int]) -> None:
        for handler in (self._store, self._load):
            if not handler.wait({JobId(job_id) for job_id in job_ids}, WAIT_S):
                raise RuntimeError(f"copies {sorted(job_ids)} have not ended after {WAIT_S:.0f} s")

    def shutdown(self) -> None:
        self._store.close()
        self._load.close()
        self._pool.close()


def device_of(spec: base.GPULoadStoreSpec) -> GPULoadStoreSpec:
    """Translate vLLM's side of a job that lies on the device."""
    return GPULoadStoreSpec(spec.block_ids.tolist(), tuple(spec.group_sizes), tuple(spec.block_indices))


def _told(outcome: CopyOutcome) -> base.TransferResult:
    return base.TransferResult(outcome.job_id, outcome.success, outcome.byte_count, outcome.copy_s)
