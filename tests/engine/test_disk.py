"""What comes back from disk gives the very answers of the engine's own hits, also after a restart."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, ask_twice, assert_exact, prompts_of
from engine.tiny_engine import TinyEngine, tiny_engine
from kvtide.errors import ConfigError

CHUNKS = STORED_TOKENS // 32
SMALL_HOST = "1MiB"
"""Host memory for 32 chunks of the models here: one prompt and a half."""


def settings_of(folder: Path, **others: object) -> dict[str, object]:
    return {
        "host_memory": "24MiB",
        "disk": str(folder / "disk"),
        "disk_limit": "256MiB",
        "disk_reserve": 0,
        # Machines are shared: a slow disk is another test's matter.
        "disk_deadline_s": 30.0,
        "defer_limit_s": 30.0,
        **others,
    }


@contextmanager
def patient_engine(model: Path, settings: dict[str, object], **options: object) -> Iterator[TinyEngine]:
    """Start an engine whose requests wait for the disk: these models compute faster than a disk reads."""
    with tiny_engine(model, POOL_BLOCKS, settings, **options) as engine:
        engine.deciding._pace.seconds_for = lambda token_count: None
        engine.drain()  # as an idle server does until it knows what is on disk
        yield engine


def wait_for(engine: TinyEngine, what: str, count: int) -> None:
    """Step an idle engine until so much was counted."""
    give_up_s = time.monotonic() + 60
    while engine.totals.get(what, 0) < count:
        assert time.monotonic() < give_up_s, f"{what} does not become {count}: {engine.totals}"
        engine.step()
        time.sleep(0.01)


def flip_bits(folder: Path, count: int) -> None:
    """Damage the payloads of the first records of a slab."""
    (slab,) = (folder / "disk" / "rank-0").glob("slab-*")
    payload_bytes = int(slab.name.removeprefix("slab-"))
    with slab.open("r+b") as file:
        for slot in range(count):
            at = slot * (4096 + payload_bytes) + 4096 + 1000 + slot
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("model", [models.llama, models.qwen3], ids=["llama", "qwen3"])
def test_a_restarted_engine_answers_from_disk_like_a_hit(model: Callable[[], Path], tmp_path: Path) -> None:
    prompts = prompts_of(11)
    settings = settings_of(tmp_path)
    with patient_engine(model(), settings) as engine:
        hits = ask_twice(engine, prompts)
        wait_for(engine, "tier_stored_chunks|disk", 3 * CHUNKS)
    with patient_engine(model(), settings) as engine:
        loads = [engine.ask(prompt) for prompt in prompts]
        totals = engine.totals
    assert_exact(loads, hits)
    assert totals["tier_hit_chunks|disk"] == 3 * CHUNKS
    assert [load.local_tokens for load in loads] == [0, 0, 0]


@pytest.mark.parametrize("demotion", ["at_once", "second_sight", "on_eviction"])
def test_what_left_host_memory_comes_back_from_disk(demotion: str, tmp_path: Path) -> None:
    prompts = prompts_of(12)
    settings = settings_of(tmp_path, host_memory=SMALL_HOST, disk_demotion=demotion, promotion_share=0.9)
    with patient_engine(models.llama(), settings) as engine:
        hits = ask_twice(engine, prompts)
        wait_for(engine, "tier_stored_chunks|disk", CHUNKS)
        load = engine.ask(prompts[0])
        totals = engine.totals
    if demotion == "on_eviction":
        # What leaves at once in a small pool cannot all be saved before it does: no hit ends where this does.
        assert 256 <= load.loaded_tokens <= STORED_TOKENS
    else:
        assert_exact([load], hits[:1])
    assert totals["tier_hit_chunks|disk"] > 0
    assert totals["pool_used_bytes|"] <= 1 << 20


def test_damaged_records_are_computed_again_and_the_rest_is_loaded(tmp_path: Path) -> None:
    prompts = prompts_of(13, 2)
    settings = settings_of(tmp_path)
    with patient_engine(models.qwen3(), settings) as engine:
        hits = ask_twice(engine, prompts)
        wait_for(engine, "tier_stored_chunks|disk", 2 * CHUNKS)
    flip_bits(tmp_path, 3)
    with patient_engine(models.qwen3(), settings) as engine:
        loads = [engine.ask(prompt) for prompt in prompts]
        wait_for(engine, "tier_lost_chunks|disk", 1)
        totals = dict(engine.totals)
        again = [engine.ask(prompt) for prompt in prompts]
    whole = [load for load in loads if load.loaded_tokens >= 512]
    assert totals["tier_errors|disk,corrupt"] == totals["tier_lost_chunks|disk"] > 0
    # A cold run gives other bits than a hit: what was not loaded is compared when it is in host memory again.
    assert_exact(whole, [hit for hit, load in zip(hits, loads, strict=True) if load in whole])
    assert_exact(again, hits, min_loaded_tokens=256)


def test_other_weights_start_cold_and_say_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (prompt,) = prompts_of(14, 1)
    settings = settings_of(tmp_path)
    with patient_engine(models.llama(), settings) as engine:
        engine.ask(prompt)
        wait_for(engine, "tier_stored_chunks|disk", CHUNKS)
    options = {"hf_overrides": {"rope_theta": 20_000.0}}
    with (
        caplog.at_level(logging.WARNING, "kvtide"),
        patient_engine(models.llama(), settings, **options) as engine,
    ):
        load = engine.ask(prompt)
    assert load.loaded_tokens == 0
    said = [record.message for record in caplog.records if "starts cold" in record.message]
    assert len(said) == 1, caplog.text
    assert "model" in said[0]


def test_a_reset_outlives_a_restart_unless_the_tiers_are_kept(tmp_path: Path) -> None:
    prompt, other = prompts_of(15, 2)
    for keeps in (False, True):
        settings = settings_of(tmp_path / str(keeps), reset_keeps_tiers=keeps)
        with patient_engine(models.llama(), settings) as engine:
            engine.ask(prompt)
            wait_for(engine, "tier_stored_chunks|disk", CHUNKS)
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            engine.drain()
            assert engine.ask(prompt).loaded_tokens == (STORED_TOKENS if keeps else 0)
            engine.ask(other)
            wait_for(engine, "tier_stored_chunks|disk", (2 if keeps else 3) * CHUNKS)
        with patient_engine(models.llama(), settings) as engine:
            # The weights in memory may have been others: what was written after a reset is not served either.
            loaded = [engine.ask(one).loaded_tokens for one in (prompt, other)]
            assert loaded == ([STORED_TOKENS] * 2 if keeps else [0, 0])


def test_a_second_instance_on_one_folder_is_refused_by_name(tmp_path: Path) -> None:
    from kvtide.tiers.disk import DiskTier
    from kvtide.tiers.records import RecordIdentity

    settings = settings_of(tmp_path)
    first = DiskTier(tmp_path / "disk", RecordIdentity(bytes(32)), 1 << 20)
    with (
        pytest.raises(ConfigError, match="another instance"),
        patient_engine(models.llama(), settings),
    ):
        pass
    first.close()
