"""kvtide's tiers under vLLM's own tiering: its manager, its host memory, its jobs; no engine."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtide.errors import ConfigError, CorruptRecordError
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.testing.memory_tier import MemoryTier, Records
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.records import HEADER_BYTES, ChunkName
from kvtide.tiers.shared import SharedTier
from kvtide.vllm.plugin import SECONDARY_MODULE, SECONDARY_TIERS, register
from kvtide.vllm.secondary_identity import vllm_config_behind
from kvtide.vllm.secondary_settings import settings_of

ROW_BYTES = 8192
ROWS = 8
PATIENCE_S = 20.0
"""After which a test is taken to hang; nothing here needs more than a few seconds."""

MEMORY = {"type": "kvtide-tier", "class": "kvtide.testing.memory_tier.MemoryTier"}
FAULTY = {"type": "kvtide-tier", "class": "kvtide.testing.faulty_tiers.FaultyTier"}
HELD = {"type": "kvtide-tier", "class": "kvtide.testing.faulty_tiers.HeldTier"}
ALWAYS = range(1 << 30)


class SharedMemory(SharedTier):
    """Records in a dict that outlives the server, as those of a shared tier do."""

    lying: ClassVar[dict[str, bytes]] = {}

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        return cls(place)

    def _name(self, key: OffloadKey) -> str:
        return f"{self.folder_of(key)}/{self.file_of(key[:-4], key)}"

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        record = self.lying.get(self._name(key))
        if record is None:
            return False
        if len(record) != HEADER_BYTES + payload.nbytes:
            raise CorruptRecordError("of another length")
        payload[:] = record[HEADER_BYTES:]
        self.check(record[:HEADER_BYTES], key, payload)
        return True

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        self.lying[self._name(name.key)] = self.header_of(name, payload) + bytes(payload)
        return Written.NEW

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        return [self._name(key) in self.lying for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.lying.pop(self._name(key), None)

    def ping(self, deadline_s: float) -> str:
        return "a dict"

    def close(self) -> None:
        pass


SHARED = {"type": "kvtide-tier", "class": f"{__name__}.SharedMemory"}


def keys_of(seed: int, count: int, group_index: int = 0) -> list[OffloadKey]:
    draw = Random(seed)
    return [make_offload_key(draw.randbytes(32), group_index) for _ in range(count)]


def content_of(key: OffloadKey) -> np.ndarray:
    """What a chunk holds: another for every key."""
    return np.frombuffer(Random(key).randbytes(ROW_BYTES), np.uint8)


class Tiering:
    """vLLM's tiering manager above one of our tiers, and a request that stores and loads through it."""

    def __init__(
        self,
        entry: dict[str, Any],
        opens: bool = True,
        dtype: str = "bfloat16",
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        entry = {"identity": "a test", **({} if "path" in entry else {"limit": "64MiB"}), **entry}
        config = OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(16, (f"layer-{group}",), group) for group in range(2)),
            worker_kv_bytes_per_block=ROW_BYTES,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": ROWS * ROW_BYTES, "secondary_tiers": [entry]},
            engine_id=f"kvtide-test-{uuid.uuid4().hex}",
            model=OffloadingModelConfig("tiny", dtype),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, replica, replicas, None, False),
        )
        self.spec = TieringOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        self.primary = self.manager.primary_tier
        (self.tier,) = self.manager.secondary_tiers
        self.inner = self.tier._lending._inner
        self._rows = np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)
        self._count = 0
        self.open = True
        if opens:
            self.until(lambda: self.tier._state is not None and self.tier._state.opened)

    def step(self) -> None:
        """End a step, as vLLM's scheduler does."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, "it hangs"
            self.step()
            time.sleep(0.001)

    def settle(self) -> None:
        """Step until no job is open."""
        self.until(lambda: not self.manager.has_pending_work())

    def request(self) -> ReqContext:
        self._count += 1
        context = ReqContext(f"request-{self._count}")
        self.manager.on_new_request(context)
        return context

    def store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Put chunks into host memory, as a device would; says which ones vLLM took."""
        context = self.request()
        for index, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (index + 1))
        plan = self.manager.prepare_store(keys, context)
        taken = list(plan.keys_to_store) if plan is not None else []
        if taken:
            for key, row in zip(taken, plan.store_spec.chunk_ids, strict=True):
                self._rows[row] = content_of(key)
            self.manager.complete_store(taken, context)
        self.manager.on_request_finished(context)
        return taken

    def kept(self, keys: Sequence[OffloadKey]) -> None:
        """Store chunks, and wait until the tier has them or has refused them."""
        for start in range(0, len(keys), ROWS // 2):
            part = keys[start : start + ROWS // 2]
            assert self.store(part) == list(part)
            self.settle()

    def pushed_out(self, seed: int = 999) -> None:
        """Fill host memory with other chunks."""
        self.kept(keys_of(seed, ROWS))

    def found(self, keys: Sequence[OffloadKey], context: ReqContext) -> int:
        """Ask as vLLM does, until there is an answer: chunks of the longest prefix that is ready."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            hits, later = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                hits += result is LookupResult.HIT
                later |= result is not LookupResult.HIT
            self.step()
            if not later:
                return hits
            assert time.monotonic() < give_up_s, "a request waits for ever"
            time.sleep(0.001)

    def load(self, keys: Sequence[OffloadKey]) -> int:
        """Bring a prefix up and read it as a device would; every byte is compared."""
        context = self.request()
        hits = self.found(keys, context)
        if hits:
            ready = keys[:hits]
            rows = self.manager.prepare_load(ready, context).chunk_ids
            for key, row in zip(ready, rows, strict=True):
                assert np.array_equal(self._rows[row], content_of(key)), "wrong bytes"
            self.manager.complete_load(ready, context)
        self.manager.on_request_finished(context)
        return hits

    def close(self) -> None:
        if self.open:
            self.open = False
            self._rows = np.empty(0)
            self.manager.shutdown()


@pytest.fixture
def tiering() -> Iterator[Callable[..., Tiering]]:
    """Make tierings that are closed at the end."""
    register()
    made: list[Tiering] = []
    SharedMemory.lying.clear()

    def make(entry: dict[str, Any], **arguments: Any) -> Tiering:
        made.append(Tiering(entry, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def disk(folder: Path, **others: Any) -> dict[str, Any]:
    # Machines are shared: a slow disk is another test's matter.
    return {"type": "kvtide-disk", "folder": str(folder), "deadline_s": 30.0, **others}


# -- a chunk's life --------------------------------------------------------------------------------------


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


# -- trouble ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["read", "write", "contains"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError], ids=["foreseen", "unforeseen"])
def test_a_tier_that_raises_costs_hits_and_nothing_else(
    call: str, error: type[Exception] | None, tiering: Callable[..., Tiering]
) -> None:
    raising = {"error": error} if error is not None else {}
    one, keys = tiering({**FAULTY, "failing": {}, **raising}), keys_of(13, 4)
    if call != "write":
        one.kept(keys)
        one.pushed_out()
    one.inner.failing = {kind: ALWAYS for kind in type(next(iter(_calls()))) if kind.value == call}
    if call == "write":
        one.kept(keys)
        one.pushed_out()
    assert one.load(keys) == 0
    one.settle()


def _calls() -> list[Any]:
    from kvtide.testing.faulty_tiers import TierCall

    return list(TierCall)


def test_a_tier_that_recovers_serves_again(tiering: Callable[..., Tiering]) -> None:
    one, keys = tiering({**FAULTY, "failing": {"read": list(range(4))}}), keys_of(14, 4)
    one.kept(keys)
    one.pushed_out()
    one.until(lambda: one.load(keys) == 4)


def test_a_read_that_does_not_return_ends_at_its_deadline_and_writes_no_row_afterwards(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["read"], "deadline_s": 0.2})
    keys = keys_of(15, 4)
    one.kept(keys)
    one.pushed_out()
    switch.touch()
    assert one.load(keys) == 0
    # vLLM gives the rows to others now; what the calls find out later must not come near them.
    others = keys_of(16, ROWS)
    assert one.store(others) == others
    switch.unlink()
    one.until(lambda: one.tier._lane.state().late_count == 0)
    assert one.load(others) == ROWS


def test_a_write_that_does_not_return_gives_its_rows_back(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["write"], "deadline_s": 0.2})
    keys = keys_of(17, 3)
    switch.touch()
    one.kept(keys)  # which waits until vLLM has no job open
    one.kept(keys_of(18, ROWS))  # which needs every row
    switch.unlink()
    one.until(lambda: one.tier._lane.state().late_count == 0)
    # What was written in the end is what was to be written, not what is in the rows by then.
    one.until(lambda: one.load(keys) == 3)


def test_a_lookup_that_is_not_answered_is_a_miss_after_a_bounded_time(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["contains"], "deadline_s": 0.2})
    keys = keys_of(19, 3)
    one.kept(keys)
    one.pushed_out()
    switch.touch()
    assert one.load(keys) == 0
    switch.unlink()
    one.until(lambda: one.load(keys) == 3)


def test_a_full_tier_skips_stores_and_serves_what_it_has(tiering: Callable[..., Tiering]) -> None:
    limit = 4 * (ROW_BYTES + HEADER_BYTES)
    one, keys = tiering({**SHARED_FULL, "limit": limit}), keys_of(20, 4)
    one.kept(keys)
    one.kept(keys_of(21, 4))
    one.pushed_out()
    assert one.load(keys) == 4


class FullShared(SharedMemory):
    """Takes so many records and no more; a shared tier evicts by its own rules, or not at all."""

    def __init__(self, place: TierPlace) -> None:
        super().__init__(place)
        self._limit = place.limit_bytes // (ROW_BYTES + HEADER_BYTES)

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        from kvtide.errors import TierFullError

        if len(self.lying) >= self._limit:
            raise TierFullError("full")
        return super().write(name, payload, deadline_s)


SHARED_FULL = {"type": "kvtide-tier", "class": f"{__name__}.FullShared"}


def test_stores_beyond_the_queue_are_skipped(tiering: Callable[..., Tiering], tmp_path: Path) -> None:
    switch = tmp_path / "hold"
    entry = {**HELD, "switch": str(switch), "holding": ["write"], "queue": 4 * ROW_BYTES}
    one = tiering(entry)
    switch.touch()
    one.store(keys_of(22, 4))
    one.store(keys_of(23, 4))
    one.until(lambda: len(one.manager._jobs) == 1)
    switch.unlink()
    one.settle()
    assert set(one.inner.inner.records) == set(keys_of(22, 4))
    one.pushed_out()
    one.kept(keys_of(23, 4))  # offered anew
    assert set(one.inner.inner.records) >= set(keys_of(23, 4))


def test_a_tier_that_cannot_be_opened_takes_and_promises_nothing(tiering: Callable[..., Tiering]) -> None:
    one = tiering({**FAULTY, "failing": {"open": list(range(1000))}}, opens=False)
    one.kept(keys_of(24, 4))
    one.pushed_out()
    assert one.load(keys_of(24, 4)) == 0


class Noting(MemoryTier):
    """Notes who calls."""

    callers: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in {"open", "read_into", "write", "contains", "discard", "begin_generation", "inventory"}:
            Noting.callers.add(threading.current_thread().name)
        return super().__getattribute__(name)


def test_no_call_to_a_tier_is_made_by_vllm_s_own_thread(tiering: Callable[..., Tiering]) -> None:
    Noting.callers.clear()
    entry = {"type": "kvtide-tier", "class": f"{__name__}.Noting", "limit": 12 * (ROW_BYTES + HEADER_BYTES)}
    one, keys = tiering(entry), keys_of(30, 4)
    one.kept(keys)
    one.pushed_out()
    assert one.load(keys) == 4
    one.kept(keys_of(31, 4))
    one.manager.reset_cache()
    one.until(lambda: one.tier._serves)
    assert Noting.callers == {"kvtide-tier", "kvtide-tier-lookups", "kvtide-tier-survey"}


# -- resets and ends -------------------------------------------------------------------------------------


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
    one.kept(later)
    one.pushed_out()
    assert one.load(later) == 4
    one.close()
    # What this life wrote after its reset may be of other weights than the fingerprint says.
    second = tiering(entry)
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
    one.until(lambda: one.inner.held_count(_calls()[1]) > 0)
    region = one.primary._mmap_region
    with caplog.at_level(logging.WARNING):
        one.close()
    assert region.mmap_obj is None
    assert not Path(region.mmap_path).exists()
    said = [record.message for record in caplog.records]
    assert any("left behind" in line for line in said)
    assert not any("Failed to close" in line for line in said), said
    switch.unlink()
    give_up_s = time.monotonic() + PATIENCE_S
    while any(thread.name.startswith("kvtide-tier") for thread in threading.enumerate()):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


# -- at random -------------------------------------------------------------------------------------------


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


# -- settings and names ----------------------------------------------------------------------------------


def test_every_name_leads_to_its_class_with_and_without_the_plug_in() -> None:
    register()
    for name, class_name in SECONDARY_TIERS.items():
        by_name = SecondaryTierFactory.get_tier_class({"type": name})
        by_path = SecondaryTierFactory.get_tier_class({"type": class_name, "module_path": SECONDARY_MODULE})
        assert by_name is by_path
        assert by_name.__name__ == class_name


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"type": "kvtide-disk", "limit": "1GiB"}, "folder"),
        ({"type": "kvtide-disk", "folder": "{tmp}", "limit": 0}, "limit"),
        ({"type": "kvtide-disk", "folder": "{tmp}", "threads": 0}, "kvtide-disk.threads = 0: give"),
        ({"type": "kvtide-disk", "folder": "{tmp}", "class": "a.B"}, "is for the type kvtide-tier"),
        ({"type": "kvtide-tier"}, "kvtide-tier.class"),
        ({"type": "kvtide-tier", "class": "no.such.Tier"}, "cannot be imported"),
        ({**MEMORY, "identity": ""}, "does not say which weights"),
        ({**MEMORY, "locality": "near"}, "give LOCAL or REMOTE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_refused_by_name(entry: dict[str, Any], said: str, tmp_path: Path) -> None:
    register()
    filled = {name: str(tmp_path) if value == "{tmp}" else value for name, value in entry.items()}
    with pytest.raises(ConfigError, match=said):
        Tiering(filled)


def test_options_of_a_tier_are_not_shown_when_another_setting_is_wrong() -> None:
    register()
    with pytest.raises(ConfigError) as caught:
        Tiering({**MEMORY, "password": "hush", "threads": 0})
    assert "hush" not in str(caught.value)


def test_two_servers_on_one_folder_are_refused_by_name(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    tiering(disk(tmp_path))
    with pytest.raises(ConfigError, match="another instance"):
        tiering(disk(tmp_path))


def test_replicas_of_one_server_have_folders_of_their_own_and_share_the_limit(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    entry = disk(tmp_path, limit="128MiB")
    first, second = (tiering(entry, replica=index, replicas=2) for index in range(2))
    first.kept(keys_of(32, 4))
    assert second.load(keys_of(32, 4)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0", "replica-1"]
    assert first.tier._state.capacity_bytes <= 64 << 20


def test_what_is_not_named_here_is_the_tier_s_own_option() -> None:
    given = {"path": "/mnt/kv", "url": "redis://there", "threads": 2}
    settings = settings_of("kvtide-directory", "directory", "REMOTE", given)
    assert settings.options == {"path": "/mnt/kv", "url": "redis://there"}
    assert (settings.class_path, settings.threads, settings.locality) == ("directory", 2, "REMOTE")


def test_the_configuration_is_the_one_that_the_settings_come_from() -> None:
    mine, others = (
        VllmConfig(
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"cpu_bytes_to_use": 1},
            )
        )
        for _ in range(2)
    )
    spec = SimpleNamespace(extra_config=mine.kv_transfer_config.kv_connector_extra_config)

    def called_with(nearer: VllmConfig) -> VllmConfig | None:
        return vllm_config_behind(spec)

    def asks(further: VllmConfig, nearer: VllmConfig) -> VllmConfig | None:
        return called_with(nearer)

    found = asks(mine, others)
    assert found is mine
    del mine, found
    assert called_with(others) is None
