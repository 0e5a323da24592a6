"""A tier of one's own: a file for each record, in a folder that one instance has for itself.

    python examples/own_tier.py

It is named in the settings by its path, once the module can be imported where the server runs:

    "tiers": [{"class": "own_tier.FolderTier", "name": "folder", "limit": "10GiB",
               "options": {"folder": "/var/cache/kv-files"}}]

``kvtide.testing.PrivateTierTests`` says whether a tier keeps the contract; ``tests/test_own_tier.py`` asks
that of this one.
"""

import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kvtide.errors import ConfigError, CorruptRecordError, TierFullError, TierUnavailableError
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.tiers.base import PrivateTier, TierPlace, Written
from kvtide.tiers.records import (
    HEADER_BYTES,
    ChunkName,
    RecordHeader,
    RecordIdentity,
    next_generation,
    pack,
    served_generation,
    unpack,
)

DEADLINE_S = 2.0


class FolderTier(PrivateTier):
    """Files, and what they are in a dict. One lock around everything: simple, not fast.

    Args:
        folder: Made when it is not there; what else lies in it is removed.
        identity: Of this rank's records: what is not ours is not served.
        limit_bytes: Of all records.
    """

    def __init__(self, folder: Path, identity: RecordIdentity, limit_bytes: int) -> None:
        self._folder, self._identity, self._limit_bytes = folder, identity, limit_bytes
        self._lock = threading.Lock()
        self._headers: dict[OffloadKey, RecordHeader] = {}
        self._generation = 0

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        if set(place.options) != {"folder"}:
            raise ConfigError("tiers.options", dict(place.options), 'give {"folder": "/path"}')
        folder = Path(place.options["folder"]) / f"rank-{place.rank}"
        return cls(folder, place.identity, place.limit_bytes)

    def open(self) -> None:
        # A constructor must not wait for a medium; this may.
        with self._lock, _told(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / "generation"
            written = int(path.read_text()) if path.exists() else 0
            self._remember(served_generation(written))
            for path in self._folder.glob("*.record"):
                try:
                    with path.open("rb") as file:
                        header = unpack(file.read(HEADER_BYTES))
                except CorruptRecordError:
                    header = None
                if header and self._identity.owns(header) and header.generation == self._generation:
                    self._headers[header.name.key] = header
                else:
                    path.unlink()

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        with self._lock:
            if key not in self._headers:
                return False
            path = self._path(key)
            try:
                if not path.exists():
                    raise CorruptRecordError(f"{path} is gone")
                with _told(self._folder), path.open("rb") as file:
                    header = unpack(file.read(HEADER_BYTES))
                    file.readinto(payload)
                # Length, key, rank, generation and checksum: nothing is served that is not what was written.
                self._identity.check(header, key, payload, self._generation)
            except CorruptRecordError:
                self._forget(key)
                raise
            return True

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        with self._lock:
            if name.key in self._headers:
                return Written.THERE_ALREADY
            if self._used_bytes() + self.record_bytes(payload.nbytes) > self._limit_bytes:
                raise TierFullError(f"{self._folder}: {self._limit_bytes} bytes are used")
            header = self._identity.header_of(name, payload, self._generation)
            new = self._folder / "new"
            with _told(self._folder):
                new.write_bytes(pack(header) + payload)
                new.replace(self._path(name.key))
            self._headers[name.key] = header
            return Written.NEW

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        with self._lock:
            return [key in self._headers for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)

    def begin_generation(self, trusted: bool = False) -> None:
        # One number: what is old is not served from here on, and goes when the folder is next opened.
        with self._lock:
            self._headers.clear()
            with _told(self._folder):
                self._remember(next_generation(self._generation, trusted))

    def inventory(self) -> Iterator[RecordHeader]:
        with self._lock:
            return iter(list(self._headers.values()))

    @property
    def capacity_bytes(self) -> int:
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    def close(self) -> None:
        """Do nothing: every file is whole as it is."""

    def _remember(self, generation: int) -> None:
        self._generation = generation
        new = self._folder / "new"
        new.write_text(str(generation))
        new.replace(self._folder / "generation")  # whole, or not at all

    def _path(self, key: OffloadKey) -> Path:
        return self._folder / f"{key.hex()}.record"

    def _forget(self, key: OffloadKey) -> None:
        if self._headers.pop(key, None) is not None:
            self._path(key).unlink(missing_ok=True)

    def _used_bytes(self) -> int:
        return sum(self.record_bytes(header.payload_bytes) for header in self._headers.values())


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into a tier's, so that it ends as a miss."""
    try:
        yield
    except OSError as error:
        kind = TierFullError if error.errno == errno.ENOSPC else TierUnavailableError
        raise kind(f"{folder}: {error.strerror}") from None


def main() -> None:
    identity = RecordIdentity(fingerprint=bytes(32))
    name = ChunkName(make_offload_key(bytes(range(32)), group_index=0), parent_hash=None, chunk_index=0)
    payload, back = os.urandom(100_000), bytearray(100_000)
    with tempfile.TemporaryDirectory() as folder:
        tier = FolderTier(Path(folder), identity, limit_bytes=1 << 20)
        tier.open()
        print(f"written: {tier.write(name, memoryview(payload), DEADLINE_S).value}")
        tier.close()

        tier = FolderTier(Path(folder), identity, limit_bytes=1 << 20)
        tier.open()
        print(f"after a restart it lists {len(list(tier.inventory()))} record")
        found = tier.read_into(name.key, memoryview(back), DEADLINE_S)
        print(f"read: {found}, the very same: {back == payload}")

        path = next(Path(folder).glob("*.record"))
        path.write_bytes(path.read_bytes()[:-1] + bytes([payload[-1] ^ 1]))
        try:
            tier.read_into(name.key, memoryview(back), DEADLINE_S)
        except CorruptRecordError as error:
            print(f"one bit flipped: {error}")
        print(f"and then: {tier.read_into(name.key, memoryview(back), DEADLINE_S)}")


if __name__ == "__main__":
    main()
