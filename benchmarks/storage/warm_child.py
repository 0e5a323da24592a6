"""Starts on a folder full of records, in a process of its own.

Knows how both halves are put together for one tier; does not judge.
"""

import gc
import shutil
import sqlite3
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtide.config import load_config
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import OffloadingWorkerMetadata
from kvtide.keys import make_offload_key
from kvtide.metrics import MetricsDelta
from kvtide.spec import OffloadingSpec
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import ChunkName, RecordIdentity
from kvtide.transfer.pool import HostPool
from kvtide.transfer.tier_hops import TierHops, TierSeat
from kvtide.transfer.tier_lane import TierLane

PAYLOAD_BYTES = 512
SHARED_CHUNKS = 20
"""Of each prompt, the chunks that it has in common with all others."""

IDLE_PAUSE_S = 0.001
"""What vLLM sleeps between steps of an engine that has nothing to compute."""

IDENTITY = RecordIdentity(bytes(range(32)))


def measure_starts(
    progress: Callable[[str], None], folder: str, records: int, prompts: int, rounds: int
) -> list[dict[str, Any]]:
    """Write the records of so many prompts, then start again and again."""
    place = Path(folder)
    try:
        progress(f"writing {records:,} records")
        _write(place, records, prompts)
        samples = []
        for number in range(rounds):
            progress(f"start {number + 1} of {rounds}")
            samples.append(_start(place))
        return samples
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _names(records: int, prompts: int) -> list[ChunkName]:
    """Name the chunks: prompts that share a beginning, each a chain of hashes."""
    names: list[ChunkName] = []
    parent: bytes | None = None
    for index in range(SHARED_CHUNKS):
        names.append(_name(0, index, parent))
        parent = names[-1].key[:32]
    shared, left = parent, records - SHARED_CHUNKS
    for prompt in range(prompts):
        parent = shared
        for index in range(left // prompts + (prompt < left % prompts)):
            names.append(_name(prompt + 1, SHARED_CHUNKS + index, parent))
            parent = names[-1].key[:32]
    return names


def _name(prompt: int, index: int, parent: bytes | None) -> ChunkName:
    own = sha256(f"{prompt} {index}".encode()).digest()
    return ChunkName(make_offload_key(own, 0), parent, index)


def _write(folder: Path, records: int, prompts: int) -> None:
    tier = DiskTier(folder, IDENTITY, 4 << 30, direct=False)
    tier.open()
    payload = memoryview(bytes(PAYLOAD_BYTES))
    for name in _names(records, prompts):
        tier.write(name, payload, 60.0)
    tier.close()


def _start(folder: Path) -> dict[str, Any]:
    """Open the folder and step until the books are warm."""
    geometry = KVGeometry((GroupGeometry(0, GroupKind.FULL_ATTENTION, 16, 1, 16),))
    config = load_config(extra_config={"host_memory": "1MiB", "disk": str(folder), "disk_limit": "4GiB"})
    metrics = MetricsDelta()
    scheduler = OffloadingSpec(config).scheduler(geometry, metrics, with_events=False)
    pool = HostPool(16, PAYLOAD_BYTES, prefault=False)
    began_s = time.perf_counter()
    tier = DiskTier(folder, IDENTITY, 4 << 30, direct=False)
    seat = TierSeat(TierLane(tier, "disk"), (tier.record_bytes(PAYLOAD_BYTES),), (1,))
    hops = TierHops([seat], pool, [PAYLOAD_BYTES], metrics)
    # vLLM does so once it has started: what was there before costs the collector nothing from then on.
    gc.collect()
    gc.freeze()
    slowest_s, steps = 0.0, 0
    while scheduler.has_pending_push_work(time.monotonic()):
        told_s, told = _timed(_worker, hops)
        taken_s, _ = _timed(scheduler.update_connector_output, told, time.monotonic())
        stepped_s, _ = _timed(scheduler.build_connector_meta, EMPTY_STEP, time.monotonic())
        slowest_s = max(slowest_s, told_s, taken_s, stepped_s)
        steps += 1
        time.sleep(IDLE_PAUSE_S)
    warm_s = time.perf_counter() - began_s
    found = metrics.data["tier_found_chunks|disk"]
    hops.close(10.0)
    return {
        "warm_s": warm_s,
        "slowest_hook_cpu_s": slowest_s,
        "steps": steps,
        "found": found,
        "rows_s": _rows_s(folder),
    }


def _worker(hops: TierHops) -> OffloadingWorkerMetadata:
    hops.poll()
    answers = hops.take_answers()
    reports = {(0, tier): report for tier, report in answers.reports.items()}
    return OffloadingWorkerMetadata(tiers=reports, inventory=answers.inventory)


def _timed(hook: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Say what a hook takes of the CPU: what it waits for are neighbours here."""
    before_s = time.thread_time()
    told = hook(*arguments)
    return time.thread_time() - before_s, told


EMPTY_STEP = SimpleNamespace(
    scheduled_cached_reqs=SimpleNamespace(req_ids=(), new_block_ids=(), resumed_req_ids=()),
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    preempted_req_ids=None,
    kv_connector_block_state=None,
    kv_cache_block_copies=None,
)
"""vLLM's ``SchedulerOutput`` of a step that computes nothing, as far as it is looked at."""


def _rows_s(folder: Path) -> float:
    """Read the rows of the index, and nothing else."""
    began_s = time.perf_counter()
    (path,) = folder.glob("rank-0/index.sqlite")
    with sqlite3.connect(path) as index:
        index.execute("SELECT * FROM records").fetchall()
    return time.perf_counter() - began_s
