"""kvtide's tiers under vLLM's own tiering: what is stored comes back, and what may leave does."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from secondary_tiering import (
    FAULTY,
    HELD,
    MEMORY,
    ROW_BYTES,
    SHARED,
    Tiering,
    disk,
    keys_of,
    tierings,
    wait_until,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvtide.testing.faulty_tiers import TierCall
from kvtide.testing.memory_tier import MemoryTier, Records
from kvtide.tiers.records import HEADER_BYTES


@pytest.fixture
def tiering() -> Iterator[Callable[..., Tiering]]:
    with tierings() as make:
        yield make


@pytest.mark.parametrize("kind", ["memory", "shared", "disk"])
def test_what_left_host_memory_comes_back_with_its_bytes(
    kind: str, tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    one = tiering({"memory": MEMORY, "shared": SHARED, "disk": disk(tmp_path)}[kind])
    keys = [*keys_of(1, 3), *keys_of(2, 3, group_index=1)]
    one.kept(keys)
    one.pushed_out()
    assert one.primary.lookup(keys[0], ReqContext("nobody")) is LookupResult.MISS
    assert one.load(keys) == 6
    assert one.load([*keys_of(3, 1), *keys]) == 0


@pytest.mark.parametrize("kind", ["shared", "disk"])
def test_another_life_finds_what_one_has_written(
    kind: str, tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    entry = {"shared": SHARED, "disk": disk(tmp_path)}[kind]
    keys = keys_of(4, 6)
    first = tiering(entry)
    first.kept(keys)
    first.close()
    assert tiering(entry).load(keys) == 6


@pytest.mark.parametrize("change", [{"identity": "another"}, {"dtype": "float16"}], ids=str)
def test_of_another_model_nothing_is_found(
    change: dict[str, Any], tiering: Callable[..., Tiering], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(5, 4)
    first = tiering(disk(tmp_path))
    first.kept(keys)
    first.close()
    dtype = change.pop("dtype", "bfloat16")
    with caplog.at_level(logging.WARNING, "kvtide"):
        assert tiering(disk(tmp_path, **change), dtype=dtype).load(keys) == 0
    assert [record.message for record in caplog.records if "starts cold" in record.message]


def test_a_damaged_record_is_computed_again_and_the_rest_is_loaded(tiering: Callable[..., Tiering]) -> None:
    one, keys = tiering(MEMORY), keys_of(6, 5)
    one.kept(keys)
    one.pushed_out()
    one.inner.records[keys[3]][HEADER_BYTES + 77] ^= 1
    assert one.load(keys) == 3
    one.kept(keys[3:4])
    one.pushed_out()
    assert one.load(keys) == 5


def test_what_was_used_least_leaves_and_the_end_of_a_prompt_before_its_beginning(
    tiering: Callable[..., Tiering],
) -> None:
    record_bytes = ROW_BYTES + HEADER_BYTES
    one = tiering({**MEMORY, "limit": 12 * record_bytes})
    first, second, third = keys_of(7, 4), keys_of(8, 4), keys_of(9, 4)
    for keys in (first, second, third):
        one.kept(keys)
    context = one.request()
    one.manager.touch(first, context)
    one.manager.on_request_finished(context)
    one.kept(keys_of(10, 2))
    there = set(one.inner.records)
    assert there == {*first, *second[:2], *third, *keys_of(10, 2)}


def test_a_second_life_keeps_the_limit_of_what_the_first_has_written(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    entry = disk(tmp_path, limit="4MiB")
    first = tiering(entry)
    first.kept(keys_of(11, 400))
    first.close()
    second = tiering(entry)
    second.until(lambda: second.tier._found_all)
    newest = keys_of(12, 400)
    second.kept(newest)
    # Beside them there is the index, of which a limit as small as this takes no account.
    slab_bytes = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("slab-*"))
    assert 3 << 20 < slab_bytes <= 4 << 20
    assert second.load(newest[-4:]) == 4
    # It is the former ones that have left.
    capacity = second.tier._state.capacity_bytes // second.tier._record_bytes
    assert sum(second.inner.contains(newest, 1.0)) > 0.9 * capacity


@pytest.mark.parametrize("kind", ["shared", "disk"])
@pytest.mark.parametrize("keeps", [False, True])
def test_after_a_reset_nothing_of_before_is_served_unless_the_tiers_are_kept(
    kind: str, keeps: bool, tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    base = {"shared": SHARED, "disk": disk(tmp_path)}[kind]
    entry = {**base, "reset_keeps_tiers": keeps}
    one, keys, later = tiering(entry), keys_of(25, 4), keys_of(26, 4)
    one.kept(keys)
    one.manager.reset_cache()
    assert one.load(keys) == (4 if keeps else 0)
    one.until(lambda: one.tier._serves)
    one.store(keys)
    one.settle()
    one.kept(later)
    one.pushed_out()
    assert (one.load(keys), one.load(later)) == (4, 4)
    one.close()
    # What this life wrote after its reset may be of other weights than the fingerprint says; what was in a
    # shared tier before is still there for all others.
    second = tiering(entry)
    assert second.load(keys) == (0 if kind == "disk" and not keeps else 4)
    assert second.load(later) == (4 if keeps else 0)


def test_a_reset_waits_for_calls_that_do_not_return_no_longer_than_their_deadline(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["write"], "deadline_s": 0.2})
    keys = keys_of(27, 4)
    switch.touch()
    one.store(keys)
    one.manager.reset_cache()
    switch.unlink()
    one.until(lambda: one.tier._serves and one.tier._lane.state().late_count == 0)
    one.settle()
    assert one.load(keys) == 0


def test_a_shutdown_gives_vllm_its_memory_back_though_calls_do_not_return(
    tiering: Callable[..., Tiering], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("kvtide.vllm.secondary.CLOSE_PATIENCE_S", 0.1)
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["write"]})
    switch.touch()
    one.store(keys_of(28, 4))
    one.until(lambda: one.inner.held_count(TierCall.WRITE) > 0)
    region = one.primary._mmap_region
    with caplog.at_level(logging.WARNING):
        one.close()
    assert region.mmap_obj is None
    assert not Path(region.mmap_path).exists()
    said = [record.message for record in caplog.records]
    assert any("left behind" in line for line in said)
    assert not any("Failed to close" in line for line in said), said
    switch.unlink()
    wait_until(lambda: not any(one.name.startswith("kvtide-tier") for one in threading.enumerate()))


@pytest.mark.parametrize("seed", range(12))
def test_at_random_with_faults_no_byte_is_wrong_and_no_job_stays_open(
    seed: int, tiering: Callable[..., Tiering]
) -> None:
    print("seed", seed)
    draw = Random(seed)
    some = {kind: {draw.randrange(200) for _ in range(40)} for kind in ("read", "write", "contains")}
    records = draw.randrange(6, 40)
    entry = {**FAULTY, "failing": some, "limit": records * (ROW_BYTES + HEADER_BYTES)}
    one = tiering(entry)
    prompts = [keys_of(1000 + number, 6) for number in range(8)]
    hits = 0
    for _ in range(150):
        prompt = draw.choice(prompts)
        match draw.choices(["store", "load", "step", "damage", "reset"], [4, 6, 2, 1, 0.1])[0]:
            case "store":
                one.store(prompt[: draw.randrange(1, 7)])
            case "load":
                hits += one.load(prompt)
            case "step":
                one.step()
            case "damage":
                lying: Records = one.inner.inner.records
                if lying and (record := lying.get(draw.choice(list(lying)))) is not None:
                    record[draw.randrange(len(record))] ^= 1 << draw.randrange(8)
            case "reset":
                one.manager.reset_cache()
    one.settle()
    assert isinstance(one.inner.inner, MemoryTier)
    assert len(one.inner.inner.records) <= records
    assert hits
