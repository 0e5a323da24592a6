"""Failures of the field that concern what lies below host memory: records gone or damaged, queues, restarts.

Real disk tier, real lane, real time. Each test has in ``failure_rules.py`` the line of the connector without
which it fails.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_lives import OTHERS, PROMPT, Build, run

from kvtide.scheduler.pace import RecomputePace
from kvtide.testing import HeldTier, TierCall
from kvtide.tiers.slabs import slot_bytes_of
from kvtide.vllm.testing import Harness
from kvtide.vllm.testing.model import PatternModel

CHUNKS = 7  # of PROMPT


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model here computes in no time: nobody would wait for a disk."""
    monkeypatch.setattr(RecomputePace, "seconds_for", lambda self, token_count: None)


def with_disk(build: Build, folder: Path, **settings: object) -> Harness:
    usual = {"disk_limit": "64MiB", "disk_reserve": 0, "disk_deadline_s": 30.0, "defer_limit_s": 30.0}
    harness = build(disk=str(folder / "disk"), **usual | settings)
    wait_until_warm(harness)
    return harness


def wait_until_warm(harness: Harness) -> None:
    """As an idle engine does, which steps until it knows what is on disk."""
    lower = harness.connector._deciding._lower
    wait_for(harness, lambda: not lower.is_warming(time.monotonic()))
    wait_for(harness, lambda: counted(harness, "tier_takes_writes|disk") == 1)


def counted(harness: Harness, name: str) -> float:
    return float(harness.counted.data.get(name, 0))


def wait_for(harness: Harness, done: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30
    while not done():
        assert time.monotonic() < give_up_s, sorted(harness.counted.data.items())
        harness.step()
        time.sleep(0.001)


def leave_on_disk_alone(harness: Harness, prompt: list[int] = PROMPT) -> None:
    """Have a prompt's chunks on disk, and neither on the device nor in host memory."""
    before = counted(harness, "tier_stored_chunks|disk")
    run(harness, f"stores-{prompt[0]}-{before}", prompt)
    # The answer fills an eighth chunk.
    wait_for(harness, lambda: counted(harness, "tier_stored_chunks|disk") >= before + CHUNKS + 1)
    harness.scheduler.reset_prefix_cache()
    harness.connector._deciding._manager._evict(1 << 20)


def tier_of(harness: Harness) -> object:
    return harness.ranks[0]._worker._hops._seats[0].lane._tier


def ask(harness: Harness, name: str, prompt: list[int] = PROMPT) -> None:
    """Ask, waiting in real time for what a disk brings, and demand the right answer."""
    harness.store.auto_finish = harness.load.auto_finish = True
    harness.add(name, prompt, 4)
    wait_for(harness, lambda: len(harness.outputs[name]) == 4)
    harness.drain()
    assert harness.outputs[name] == PatternModel.answer(prompt, 4)


def test_records_that_are_gone_before_their_load_are_computed_and_not_asked_for_again(
    build: Build, tmp_path: Path
) -> None:
    # vLLM #39732; and #49176: a lookup that keeps saying hit.
    harness = with_disk(build, tmp_path)
    leave_on_disk_alone(harness)
    tier = tier_of(harness)
    tier.discard([header.name.key for header in tier.inventory()])  # type: ignore[attr-defined]
    ask(harness, "finds nothing")
    assert counted(harness, "tier_lost_chunks|disk") == CHUNKS
    assert counted(harness, "failed_load_requests|") == 0
    misses = counted(harness, "tier_errors|disk,miss")
    wait_for(harness, lambda: counted(harness, "tier_stored_chunks|disk") >= 2 * CHUNKS + 1)
    harness.scheduler.reset_prefix_cache()
    harness.connector._deciding._manager._evict(1 << 20)
    ask(harness, "finds what was written anew")
    assert counted(harness, "tier_errors|disk,miss") == misses == CHUNKS
    assert counted(harness, "tier_hit_chunks|disk") == CHUNKS


def test_a_flipped_bit_in_a_record_is_found_out_and_the_chunks_before_it_are_used(
    build: Build, tmp_path: Path
) -> None:
    # vLLM #54363
    harness = with_disk(build, tmp_path)
    leave_on_disk_alone(harness)
    tier = tier_of(harness)
    headers = sorted(tier.inventory(), key=lambda one: one.name.chunk_index)  # type: ignore[attr-defined]
    place = tier._entries[headers[4].name.key]  # type: ignore[attr-defined]
    (slab,) = (tmp_path / "disk" / "rank-0").glob("slab-*")
    slot_bytes = slot_bytes_of(place.payload_bytes)
    with slab.open("r+b") as file:
        at = place.slot * slot_bytes + 4096 + 11
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x20]))
    ask(harness, "finds four whole chunks")
    assert counted(harness, "tier_errors|disk,corrupt") == 1
    assert counted(harness, "hit_tokens|host") == 4 * 4


def test_a_slow_disk_has_a_bounded_queue_and_nobody_waits_for_it(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # llm-d-kv-cache #457
    record_bytes = 8192 + 512
    harness = with_disk(build, tmp_path, disk_queue=2 * CHUNKS * record_bytes)
    lane = harness.ranks[0]._worker._hops._seats[0].lane
    held = HeldTier(lane._tier, {TierCall.WRITE})
    monkeypatch.setattr(lane, "_tier", held)
    for index, prompt in enumerate(OTHERS[:6]):
        run(harness, f"stores-{index}", prompt)
    assert counted(harness, "tier_open_write_bytes|disk") <= 2 * CHUNKS * record_bytes
    assert counted(harness, "tier_skipped_chunks|disk,queue_full") >= 4 * CHUNKS
    assert counted(harness, "flush_seconds|") < 0.05, "no step has waited for it"
    held.release()
    wait_for(harness, lambda: counted(harness, "tier_stored_chunks|disk") == 2 * CHUNKS)
    harness.drain()


def test_a_disk_that_was_full_before_a_restart_is_full_after_it_and_stays_within_its_limit(
    build: Build, tmp_path: Path
) -> None:
    # LMCache #4564, #1454
    limit_bytes = 1 << 20
    harness = with_disk(build, tmp_path, disk_limit=limit_bytes)
    for index in range(24):
        run(harness, f"first life {index}", [1000 + 40 * index + i for i in range(30)])
        wait_for(harness, lambda: counted(harness, "tier_open_write_bytes|disk") == 0)
    assert counted(harness, "tier_evicted_chunks|disk") > 0
    full_bytes = counted(harness, "tier_used_bytes|disk")
    harness.restart(weights=0)
    wait_until_warm(harness)
    assert counted(harness, "tier_used_bytes|disk") >= 0.9 * full_bytes
    for index in range(24):
        run(harness, f"second life {index}", [5000 + 40 * index + i for i in range(30)])
        on_disk = sum(
            path.stat().st_blocks * 512 for path in (tmp_path / "disk").rglob("*") if path.is_file()
        )
        assert on_disk <= limit_bytes + (4 << 20), "the index may take a few megabytes beside a small limit"
        assert counted(harness, "tier_used_bytes|disk") <= limit_bytes
    harness.close()
