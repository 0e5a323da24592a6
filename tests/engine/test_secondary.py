"""vLLM's own OffloadingConnector with a tier of ours below its host memory: exact, also after a restart."""

import mmap
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, ask_twice, assert_exact, prompts_of
from engine.tiny_engine import TinyEngine, tiny_engine
from kvtide.errors import ConfigError
from kvtide.vllm.plugin import register

CHUNKS = STORED_TOKENS // 32


class NumpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, between tensors in this process and vLLM's host memory; one block is one chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._device = [one.tensor.numpy() for one in kv_caches.tensors]
        self._host = [
            region.create_next_worker_view(one.page_size_bytes).numpy() for one in kv_caches.tensors
        ]
        self._tensors_of = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for tensor, block_id, row in self._pieces(src_spec, dst_spec):
            self._host[tensor][row] = self._device[tensor][block_id]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        for tensor, block_id, row in self._pieces(dst_spec, src_spec):
            self._device[tensor][block_id] = self._host[tensor][row]
        return self._end(job_id)

    def _pieces(self, device: GPULoadStoreSpec, host: Any) -> Iterator[tuple[int, int, int]]:
        pairs = iter(zip(device.block_ids.tolist(), host.chunk_ids.tolist(), strict=True))
        for tensors, count in zip(self._tensors_of, device.group_sizes, strict=True):
            for _ in range(count):
                block_id, row = next(pairs)
                yield from ((tensor, block_id, row) for tensor in tensors)

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class TieringOnCPU(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering as it is, but for the copies of a device, which vLLM has for accelerators alone."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                self.config.engine_id,
                self.num_chunks,
                0,
                self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            )
            self._worker = NumpyWorker(kv_caches, region)
        return self._worker


@contextmanager
def native_engine(folder: Path, host_chunks: int = 30, **options: Any) -> Iterator[TinyEngine]:
    """Start an engine with vLLM's own connector, and room in host memory for a prompt and a half."""
    register()
    # One block of the models here, four layers of two heads; what vLLM needs for it is seen below.
    row_bytes = 4 * 2 * 2 * 32 * 32 * 2
    assert row_bytes % mmap.PAGESIZE == 0
    entry = {"type": "kvtide-disk", "folder": str(folder), "limit": "256MiB", "deadline_s": 30.0}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": f"kvtide-test-{uuid.uuid4().hex}",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCPU",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": host_chunks * row_bytes,
            "secondary_tiers": [entry],
        },
    }
    with tiny_engine(models.llama(), POOL_BLOCKS, kv_transfer_config=transfer, **options) as engine:
        # What the engine's wrapper knows of connectors is kvtide's.
        engine.record = lambda *_, **__: None  # type: ignore[method-assign]
        engine.drain = lambda: drained(engine)  # type: ignore[method-assign]
        manager = tiering_of(engine)
        assert manager.primary_tier.get_kv_memoryview().shape == (host_chunks, row_bytes)
        wait_until_open(engine)
        yield engine


def tiering_of(engine: TinyEngine) -> Any:
    return engine.scheduler.connector.connector_scheduler.manager


def drained(engine: TinyEngine) -> int:
    """Step until vLLM has nothing left to do: also no job of a tier."""
    give_up_s, steps = time.monotonic() + 60, 0
    while engine.scheduler.has_requests():
        assert time.monotonic() < give_up_s, "an engine without requests is still busy"
        engine.step()
        steps += 1
        time.sleep(0.001)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "an idle engine holds blocks"
    assert not tiering_of(engine)._jobs, "an idle engine has open jobs"
    return steps


def wait_until_open(engine: TinyEngine) -> None:
    (tier,) = tiering_of(engine).secondary_tiers
    give_up_s = time.monotonic() + 60
    while not tier._lane.state().opened:
        assert time.monotonic() < give_up_s, "the disk is not opened"
        time.sleep(0.01)


def records_in(engine: TinyEngine) -> int:
    (tier,) = tiering_of(engine).secondary_tiers
    return len(tier._lending._inner._entries)


def test_what_left_vllm_s_host_memory_or_its_life_comes_back_exactly(tmp_path: Path) -> None:
    prompts = prompts_of(51)
    with native_engine(tmp_path) as engine:
        hits = ask_twice(engine, prompts)
        assert records_in(engine) == 3 * CHUNKS
        again = engine.ask(prompts[0])  # in neither pool any more
    assert_exact([again], hits[:1])
    with native_engine(tmp_path) as engine:
        loads = [engine.ask(prompt) for prompt in prompts]
    assert_exact(loads, hits)
    assert [load.local_tokens for load in loads] == [0, 0, 0]
    # Other numbers from the same files: nothing that is there may be served.
    with native_engine(tmp_path, hf_overrides={"rope_theta": 20_000.0}) as engine:
        assert engine.ask(prompts[0]).loaded_tokens == 0


def test_adapters_need_a_word_from_the_user(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"secondary_tiers.identity.*adapter"),
        native_engine(tmp_path, enable_lora=True),
    ):
        pass
