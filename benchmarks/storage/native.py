"""vLLM's own ``fs`` tier: a file for each chunk, read and written by its own threads and its C extension.

It keeps no checksum and has no limit. Its settings are its defaults; what is read was written by itself.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.storage.pages import Pages

CALL_LIMIT_S = 120.0
POLL_S = 0.0005


class NativeTier:
    """vLLM's ``FileSystemTierManager`` over the same memory.

    Args:
        folder: For its files; made.
        pages: What is read into and written from.
    """

    def __init__(self, folder: Path, pages: Pages) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        chunks = pages.view.cast("B", (pages.chunk_count, pages.chunk_bytes))
        self._manager = FileSystemTierManager(_spec(pages.chunk_bytes), chunks, "fs", str(folder))
        self._request = ReqContext(req_id="one")
        self._keys = [
            make_offload_key(index.to_bytes(32, "big"), 0) for index in range(1, pages.chunk_count + 1)
        ]
        self._job_count = 0

    def write(self) -> None:
        """Write every chunk, as one job."""
        self._run(self._manager.submit_store, 1, is_promotion=False)

    def read(self, job_count: int) -> None:
        """Read every chunk; vLLM's own manager makes one job of what one request needs."""
        self._run(self._manager.submit_load, job_count, is_promotion=True)

    def close(self) -> None:
        """End its threads."""
        self._manager.shutdown()

    def _run(self, submit: Any, job_count: int, is_promotion: bool) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        for indices in np.array_split(np.arange(len(self._keys), dtype=np.int32), job_count):
            self._job_count += 1
            keys = [self._keys[index] for index in indices]
            submit(TransferJob(self._job_count, keys, indices, is_promotion, self._request))
        left, give_up_s = job_count, time.monotonic() + CALL_LIMIT_S
        while left:
            for result in self._manager.get_finished_jobs():
                if not result.success:
                    raise RuntimeError("vLLM's fs tier failed a job")
                left -= 1
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"no answer of vLLM's fs tier within {CALL_LIMIT_S:.0f} s")
            time.sleep(POLL_S)


def _spec(chunk_bytes: int) -> Any:
    """Make what the tier asks of a spec: one group, one rank."""
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    class Spec(OffloadingSpec):
        def get_manager(self) -> Any:
            raise NotImplementedError

        def get_worker(self, kv_caches: Any) -> Any:
            raise NotImplementedError

    return Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=chunk_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="benchmark",
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
    )
