"""A shared tier in a dict, for tests: a store that outlives its tiers, which others use and which evicts.

Everything a tier is told about chunks is held against what it was told before: who writes what, which chunk
stands behind which, how far a lead reaches. Knows records by name; who the others are it does not know.
"""

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

from kvtide.errors import ConfigError, CorruptRecordError, TierError
from kvtide.keys import LEAD_ALIGNMENT, OffloadKey, make_offload_key, split_offload_key
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.records import HEADER_BYTES, ChunkName, RecordRun
from kvtide.tiers.shared import SharedTier

OPTIONS: Mapping[str, type] = {
    "store": str,
    "run_chunks": int,
    "limit_bytes": int,
    "evicts": str,
    "seed": int,
}
"""Of a tier: the name of its store, chunks it wants in one call. Of the store: its limit, 0 for none, which
record leaves ("oldest" or "random"), and what chance begins with."""

ARCHIVED = 600
"""Records that are remembered as they were written."""


@dataclass(slots=True)
class Stored:
    """One record.

    Attributes:
        key: Of its chunk.
        data: Header and payload, to be damaged by whoever likes.
    """

    key: OffloadKey
    data: bytearray


class Store:
    """What lies in a store, and what has become of it.

    Args:
        limit_bytes: Of all records; 0 for none.
        evicts: Which leaves: the ``oldest``, or a ``random`` one.
        seed: Of chance.

    Attributes:
        records: By name, the oldest first.
        archive: Records that anybody may use as they were written lately, by name, whole for ever.
        gone: Keys of which a record was evicted, or removed or damaged by others: nobody was told.
        discarded: Records of names that others use too, and that a tier was told to forget.
        mistakes: What a tier was told that cannot be.
        happened: How often what happened.
        lock: To be held by whoever looks or changes.
    """

    def __init__(self, limit_bytes: int = 0, evicts: str = "oldest", seed: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._evicts = evicts
        self._chance = random.Random(seed)
        self._byte_count = 0
        self._writers: dict[str, int] = {}
        self._places: dict[OffloadKey, tuple[int, bytes | None]] = {}
        self.records: dict[str, Stored] = {}
        self.archive: dict[str, Stored] = {}
        self.gone: set[OffloadKey] = set()
        self.discarded: list[str] = []
        self.mistakes: list[str] = []
        self.happened: Counter[str] = Counter()
        self.lock = threading.RLock()

    def put(self, name: str, key: OffloadKey, data: bytes | bytearray) -> None:
        """Keep a record; others leave for it, or it does not stay itself."""
        self.take(name)
        self.records[name] = Stored(key, bytearray(data))
        self._byte_count += len(data)
        while self._limit_bytes and self._byte_count > self._limit_bytes:
            names = list(self.records)
            leaves = names[0] if self._evicts == "oldest" else self._chance.choice(names)
            self.gone.add(self.records[leaves].key)
            self.take(leaves)
            self.happened["store: evicted"] += 1

    def take(self, name: str) -> None:
        """Remove a record, if it is there."""
        stored = self.records.pop(name, None)
        if stored is not None:
            self._byte_count -= len(stored.data)

    def remember(self, name: str, key: OffloadKey, data: bytes) -> None:
        """Archive what was written."""
        self.archive.pop(name, None)
        self.archive[name] = Stored(key, bytearray(data))
        if len(self.archive) > ARCHIVED:
            del self.archive[next(iter(self.archive))]

    def note_writer(self, name: str, rank: int) -> None:
        """Hold who writes a record against who has done so before."""
        first = self._writers.setdefault(name, rank)
        if first != rank:
            self.mistakes.append(f"rank {rank} writes {name}, which rank {first} writes")

    def note_place(self, key: OffloadKey, index: int, parent_hash: bytes | None) -> None:
        """Hold where a chunk is said to stand against what was said before."""
        first = self._places.setdefault(key, (index, parent_hash))
        if first != (index, parent_hash):
            self.mistakes.append(f"{key!r} is chunk {index} behind {parent_hash!r}, and was {first}")

    def note_run(self, run: RecordRun) -> None:
        """Hold a run, and its lead, against what was said before."""
        wanted = run.start % LEAD_ALIGNMENT
        if len(run.lead) != wanted or (run.parent_hash is None) == bool(run.start):
            self.mistakes.append(
                f"chunk {run.start} of group {run.group_index}: a lead of {len(run.lead)}, {wanted} are due"
            )
            return
        chain, first = run.lead + run.hashes, run.start - len(run.lead)
        if run.lead and run.lead[-1] != run.parent_hash:
            self.mistakes.append(
                f"chunk {run.start} of group {run.group_index}: another parent than its lead"
            )
        for at, block_hash in enumerate(chain):
            parent = chain[at - 1] if at else run.parent_hash
            if at or not run.lead:
                self.note_place(make_offload_key(block_hash, run.group_index), first + at, parent)


_STORES: WeakValueDictionary[str, Store] = WeakValueDictionary()


def store_named(options: Mapping[str, Any]) -> Store:
    """Find a store of this process by its name, or make it; it is there as long as anybody holds it."""
    name = options.get("store", "")
    store = _STORES.get(name)
    if store is None:
        store = Store(options.get("limit_bytes", 0), options.get("evicts", "oldest"), options.get("seed", 0))
        _STORES[name] = store
    return store


class SharedMemoryTier(SharedTier):
    """Records of a store that many tiers share.

    Args:
        place: With ``OPTIONS``.

    Attributes:
        store: Where they lie.
    """

    def __init__(self, place: TierPlace) -> None:
        super().__init__(place)
        self.store = store_named(place.options)
        self._rank = place.rank
        self._run_chunks = int(place.options.get("run_chunks", 1))
        self._name = place.options.get("store", "")

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        cls.check_options(place.options)
        return cls(place)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            kind = OPTIONS.get(name)
            if kind is None:
                raise ConfigError("tiers.options", name, f"known options: {', '.join(OPTIONS)}")
            if type(value) is not kind:
                raise ConfigError(f"tiers.options.{name}", value, f"give a {kind.__name__}")

    def name_of(self, key: OffloadKey) -> str:
        """Name a record as it lies in the store now."""
        return f"{self.folder_of(key)}/{self.file_of(split_offload_key(key)[0], key)}"

    def holds(self, key: OffloadKey) -> bool:
        """Whether a record is here and whole; one that is not stays where it is."""
        stored = self.store.records.get(self.name_of(key))
        try:
            if stored is not None:
                self.check(stored.data[:HEADER_BYTES], key, memoryview(stored.data)[HEADER_BYTES:])
        except CorruptRecordError:
            return False
        return stored is not None

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        with self.store.lock:
            name = self.name_of(key)
            stored = self.store.records.get(name)
            if stored is None:
                return False
            try:
                if len(stored.data) != self.record_bytes(payload.nbytes):
                    raise CorruptRecordError(f"a record of {len(stored.data)} bytes")
                payload[:] = memoryview(stored.data)[HEADER_BYTES:]
                self.check(stored.data[:HEADER_BYTES], key, payload)
            except CorruptRecordError:
                self.store.take(name)
                self.store.happened["store: corrupt record found"] += 1
                raise
            return True

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        if not self.writes(name.key):
            return Written.THERE_ALREADY
        with self.store.lock:
            self.store.note_place(name.key, name.chunk_index, name.parent_hash)
            called = self.name_of(name.key)
            self.store.note_writer(called, self._rank)
            if called in self.store.records:
                return Written.THERE_ALREADY
            record = self.header_of(name, payload) + bytes(payload)
            self.store.put(called, name.key, record)
            if not is_private(called):
                self.store.remember(called, name.key, record)
            return Written.NEW

    def run_chunks(self, payload_bytes: int) -> int:
        return self._run_chunks

    def read_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[bool | TierError]:
        self._note_run(run, len(payloads), "read")
        return super().read_run(run, payloads, deadline_s)

    def write_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[Written | TierError]:
        self._note_run(run, len(payloads), "written")
        return super().write_run(run, payloads, deadline_s)

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        with self.store.lock:
            return [self.name_of(key) in self.store.records for key in keys]

    def find(self, run: RecordRun, deadline_s: float) -> Sequence[bool]:
        self._note_run(run, len(run), "asked for")
        return super().find(run, deadline_s)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        with self.store.lock:
            for name in map(self.name_of, keys):
                if not self.is_apart and name in self.store.records:
                    self.store.discarded.append(name)
                self.store.take(name)

    def ping(self, deadline_s: float) -> str:
        return f"a store in memory, {len(self.store.records)} records"

    def close(self) -> None:
        """Do nothing: the records stay with whoever holds the store."""

    def _note_run(self, run: RecordRun, count: int, what: str) -> None:
        with self.store.lock:
            self.store.note_run(run)
            self.store.happened[f"store: several {what} in one call"] += count > 1
            if run.start % LEAD_ALIGNMENT and run.start > LEAD_ALIGNMENT:
                self.store.happened["store: a lead that begins within the prompt"] += 1
            if len(run) != count:
                self.store.mistakes.append(f"{len(run)} chunks are {what}, {count} were handed over")


def is_private(name: str) -> bool:
    """Whether a record is of one server alone, which was reset."""
    return "-" in name.split("/")[1]
