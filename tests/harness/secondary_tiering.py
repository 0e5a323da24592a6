"""vLLM's own tiering manager above a tier of ours, and requests that store and load through it: no engine."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Self

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtide.errors import CorruptRecordError, TierFullError
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.records import HEADER_BYTES, ChunkName
from kvtide.tiers.shared import SharedTier
from kvtide.vllm.plugin import register

ROW_BYTES = 8192
ROWS = 8
PATIENCE_S = 60.0
"""After which a test is taken to hang; nothing here needs more than a few seconds."""

MEMORY = {"type": "kvtide-tier", "class": "kvtide.testing.memory_tier.MemoryTier"}
FAULTY = {"type": "kvtide-tier", "class": "kvtide.testing.faulty_tiers.FaultyTier"}
HELD = {"type": "kvtide-tier", "class": "kvtide.testing.faulty_tiers.HeldTier"}


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


def wait_until(condition: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "it hangs"
        meanwhile()
        time.sleep(0.001)


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
        # Machines are shared: that a tier is slow is what some tests are about, and no others.
        usual = {"identity": "a test", "limit": "64MiB", "deadline_s": 30.0, "wait_limit_s": 60.0}
        entry = {**usual, **entry}
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
        wait_until(condition, self.step)

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


@contextmanager
def tierings() -> Iterator[Callable[..., Tiering]]:
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
    return {"type": "kvtide-disk", "folder": str(folder), **others}


class FullShared(SharedMemory):
    """Takes so many records and no more; a shared tier evicts by its own rules, or not at all."""

    def __init__(self, place: TierPlace) -> None:
        super().__init__(place)
        self._limit = place.limit_bytes // (ROW_BYTES + HEADER_BYTES)

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        if len(self.lying) >= self._limit:
            raise TierFullError("full")
        return super().write(name, payload, deadline_s)


SHARED_FULL = {"type": "kvtide-tier", "class": f"{__name__}.FullShared"}
