"""Mooncake Store: the memory of many machines, behind one master.

An object is a record: header, then payload, one beside the other in registered memory. Payloads pass through
a staging buffer on purpose: a transfer that was given up may still write when its call has long ended, and it
shall do so where nobody looks; what is served was copied first and checked then. Knows records and what the
store's codes mean for them; the client lives in a process of its own (``mooncake_client``).
"""

import importlib.metadata
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from kvtide.errors import CorruptRecordError, TierError, TierUnavailableError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.mooncake_client import KEYS_AT_ONCE, Berth, MooncakeClient
from kvtide.tiers.mooncake_codes import FULL, MISSES, Code, error_of, name_of
from kvtide.tiers.mooncake_options import MooncakeOptions
from kvtide.tiers.mooncake_staging import rounded
from kvtide.tiers.options import need_client
from kvtide.tiers.records import HEADER_BYTES, ChunkName, RecordRun
from kvtide.tiers.shared import SharedTier, end_of

logger = logging.getLogger(__name__)

OPEN_LIMIT_S = 15.0
"""For the client to start and to hear from the master."""

DISCARD_LIMIT_S = 2.0

RUN_BYTES = 16 << 20
"""Of the records that one call is best handed: beyond it a call more costs next to nothing."""

FULL_PAUSE_S = 0.1
"""A store that is full evicts when it is asked for room, a moment later: so it is asked twice."""

READS = 3
"""Of a record that is damaged, before that is believed."""

PACKAGES = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)


class MooncakeTier(SharedTier):
    """Records as objects of Mooncake Store.

    Args:
        place: From the settings.
        options: Read already.
    """

    def __init__(self, place: TierPlace, options: MooncakeOptions) -> None:
        super().__init__(place)
        self._options = options
        self._where = f"mooncake at {options.master}"
        self._client = MooncakeClient(options)

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """From ``{"master": "host:port"}`` and what else ``MooncakeOptions`` has."""
        cls.check_options(place.options)
        return cls(place, MooncakeOptions.read_from(place.options))

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        MooncakeOptions.read_from(options)
        need_client("mooncake", "mooncake.store", "Mooncake's client")

    def open(self) -> None:
        self._exist([f"kv1/open/{uuid.uuid4().hex}"], time.monotonic() + OPEN_LIMIT_S)

    # -- the contract -----------------------------------------------------------------------------

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        [end] = self._read([key], [payload], end_of(deadline_s))
        if isinstance(end, TierError):
            raise end
        return end

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        [end] = self._write([name], [payload], end_of(deadline_s))
        if isinstance(end, TierError):
            raise end
        return end

    def run_chunks(self, payload_bytes: int) -> int:
        stride = rounded(self.record_bytes(payload_bytes))
        # A quarter of the buffer: several calls are under way at once.
        return max(1, min(RUN_BYTES // stride, self._options.buffer // 4 // stride, KEYS_AT_ONCE))

    def read_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[bool | TierError]:
        until_s, keys = end_of(deadline_s), run.keys()
        ends: list[bool | TierError] = []
        for piece in self._pieces(payloads):
            ends += self._read(keys[piece], payloads[piece], until_s)
        return ends

    def write_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[Written | TierError]:
        until_s, names = end_of(deadline_s), run.names()
        ends: list[Written | TierError] = []
        for piece in self._pieces(payloads):
            ends += self._write(names[piece], payloads[piece], until_s)
        return ends

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        until_s, objects = end_of(deadline_s), [self._object_of(key) for key in keys]
        return [
            end > 0
            for start in range(0, len(objects), KEYS_AT_ONCE)
            for end in self._exist(objects[start : start + KEYS_AT_ONCE], until_s)
        ]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        # What somebody reads at present has a lease, and stays.
        self._forget("remove", keys, end_of(DISCARD_LIMIT_S))

    def close(self) -> None:
        self._client.close()

    def ping(self, deadline_s: float) -> str:
        until_s, probe = end_of(deadline_s), f"kv1/ping/{uuid.uuid4().hex}"
        with self._client.berth(2 * HEADER_BYTES, until_s) as berth:
            sent, got = berth.bytes_at(0, HEADER_BYTES), berth.bytes_at(HEADER_BYTES, HEADER_BYTES)
            sent[:] = np.arange(HEADER_BYTES, dtype=np.uint8)
            got[:] = 0
            for operation, offset, due in (("put", 0, 0), ("get", HEADER_BYTES, HEADER_BYTES)):
                [end] = berth.call(operation, [probe], until_s, [offset], HEADER_BYTES)
                if end != due:
                    raise TierUnavailableError(str(error_of(end, f"{self._where}: trying a {operation}")))
            if not np.array_equal(sent, got):
                raise TierUnavailableError(f"{self._where}: other bytes came back than were written")
            berth.call("remove", [probe], until_s)
        return f"{_package_and_version()}, master {self._options.master}, {self._options.protocol}"

    # -- inside -----------------------------------------------------------------------------------

    def _object_of(self, key: OffloadKey) -> str:
        return f"{self.folder_of(key)}/{self.file_of(split_offload_key(key)[0], key)}"

    def _pieces(self, payloads: Sequence[memoryview]) -> list[slice]:
        """One piece, unless the run is longer than was asked for and does not fit the buffer."""
        if not payloads:
            return []
        fitting = self._options.buffer // rounded(self.record_bytes(payloads[0].nbytes))
        count = max(1, min(fitting, KEYS_AT_ONCE))
        return [slice(start, start + count) for start in range(0, len(payloads), count)]

    def _exist(self, objects: Sequence[str], until_s: float) -> list[int]:
        with self._client.berth(0, until_s) as berth:
            ends = berth.call("exist", objects, until_s)
        if (worst := min(ends, default=0)) < 0:
            raise TierUnavailableError(str(error_of(worst, f"{self._where}: asking what is there")))
        return ends

    def _forget(self, operation: str, keys: Sequence[OffloadKey], until_s: float) -> None:
        objects = [self._object_of(key) for key in keys]
        try:
            for start in range(0, len(objects), KEYS_AT_ONCE):
                with self._client.berth(0, until_s) as berth:
                    ends = berth.call(operation, objects[start : start + KEYS_AT_ONCE], until_s)
                for code in set(ends) - {Code.OK, Code.OBJECT_NOT_FOUND}:
                    logger.debug("%s: not all was forgotten: %s", self._where, name_of(code))
        except TierError as error:
            logger.debug("forgetting: %s", error)

    def _read(
        self, keys: Sequence[OffloadKey], payloads: Sequence[memoryview], until_s: float
    ) -> list[bool | TierError]:
        """Read records; one that is damaged again and again is forgotten.

        Whose record is expelled while he reads it may find another object's bytes: read anew, it is a miss.
        """
        ends = self._read_once(keys, payloads, until_s)
        for _ in range(READS - 1):
            if not (damaged := _damaged(ends)):
                return ends
            again = self._read_once([keys[at] for at in damaged], [payloads[at] for at in damaged], until_s)
            for at, end in zip(damaged, again, strict=True):
                ends[at] = end
        if damaged := _damaged(ends):
            self._forget("expel", [keys[at] for at in damaged], until_s)
        return ends

    def _read_once(
        self, keys: Sequence[OffloadKey], payloads: Sequence[memoryview], until_s: float
    ) -> list[bool | TierError]:
        generation, record_bytes = self.generation, self.record_bytes(payloads[0].nbytes)
        stride = rounded(record_bytes)
        objects, offsets = [self._object_of(key) for key in keys], [at * stride for at in range(len(keys))]
        with self._client.berth(stride * len(keys), until_s) as berth:
            got = berth.call("get", objects, until_s, offsets, record_bytes)
            if generation != self.generation:
                return [False] * len(keys)
            return [
                self._taken_in(berth, offset, end, key, payload)
                for offset, end, key, payload in zip(offsets, got, keys, payloads, strict=True)
            ]

    def _taken_in(
        self, berth: Berth, offset: int, end: int, key: OffloadKey, payload: memoryview
    ) -> bool | TierError:
        """Copy a record out of the buffer and check the copy."""
        if end in MISSES:
            return False
        if end < 0:
            return error_of(end, f"{self._where}: reading")
        due = self.record_bytes(payload.nbytes)
        if end != due:
            return CorruptRecordError(
                f"{self._where}: {end} bytes, where {due} are due; the record is forgotten"
            )
        header = berth.bytes_at(offset, HEADER_BYTES).tobytes()
        np.copyto(np.frombuffer(payload, np.uint8), berth.bytes_at(offset + HEADER_BYTES, payload.nbytes))
        try:
            self.check(header, key, payload)
        except CorruptRecordError as error:
            return CorruptRecordError(f"{self._where}: {error}; the record is forgotten")
        return True

    def _write(
        self, names: Sequence[ChunkName], payloads: Sequence[memoryview], until_s: float
    ) -> list[Written | TierError]:
        if not self.writes(names[0].key):
            return [Written.THERE_ALREADY] * len(names)
        record_bytes = self.record_bytes(payloads[0].nbytes)
        stride = rounded(record_bytes)
        objects = [self._object_of(name.key) for name in names]
        offsets = [at * stride for at in range(len(names))]
        with self._client.berth(stride * len(names), until_s) as berth:
            for name, payload, offset in zip(names, payloads, offsets, strict=True):
                berth.bytes_at(offset, HEADER_BYTES)[:] = np.frombuffer(
                    self.header_of(name, payload), np.uint8
                )
                np.copyto(
                    berth.bytes_at(offset + HEADER_BYTES, payload.nbytes), np.frombuffer(payload, np.uint8)
                )
            ends = berth.call("put", objects, until_s, offsets, record_bytes)
            full = [at for at, end in enumerate(ends) if end in FULL]
            if full and time.monotonic() + 2 * FULL_PAUSE_S < until_s:
                time.sleep(FULL_PAUSE_S)
                some = [objects[at] for at in full]
                again = berth.call("put", some, until_s, [offsets[at] for at in full], record_bytes)
                for at, end in zip(full, again, strict=True):
                    ends[at] = end
        return [self._written(end) for end in ends]

    def _written(self, end: int) -> Written | TierError:
        if end == Code.OK:
            return Written.NEW
        if end == Code.OBJECT_ALREADY_EXISTS:
            return Written.THERE_ALREADY
        return error_of(end, f"{self._where}: writing")


def _damaged(ends: Sequence[bool | TierError]) -> list[int]:
    return [at for at, end in enumerate(ends) if isinstance(end, CorruptRecordError)]


def _package_and_version() -> str:
    for package in PACKAGES:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "mooncake of unknown version"
