"""The yardsticks of ``stores``: each store's own client, put and get as its manual has them, nothing around.

No header, no checksum, no queue, and names as short as anybody's. Knows clients; does not know how a store is
started, nor kvtide's tiers.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.storage.pages import Pages


class Client(ABC):
    """Plain calls, made by several threads at once."""

    gets_into_slots = True
    """Whether ``get`` leaves the bytes where they are wanted; else it makes an object of them."""

    def at_once(self, record_bytes: int) -> int:
        """Say how many records a call takes."""
        return 1

    def hold(self, pages: Pages) -> None:  # noqa: B027 - most need not
        """Make ready for memory from which is put and into which is got."""

    def let_go(self, pages: Pages) -> None:  # noqa: B027
        """Undo ``hold``."""

    @abstractmethod
    def put(self, keys: Sequence[str], records: Sequence[memoryview]) -> None:
        """Put records under keys that are new.

        Raises:
            RuntimeError: It was not done.
        """

    def rest(self) -> None:  # noqa: B027
        """Between put and get, of either arm; not timed."""

    @abstractmethod
    def get(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        """Get records, each of the length of its slot.

        Raises:
            RuntimeError: One is not there, or has another length.
        """

    def fill(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        """Get records into slots, however long that takes: for looking at them."""
        self.get(keys, slots)

    @abstractmethod
    def clear(self) -> None:
        """Remove all records, this client's and kvtide's."""

    def close(self) -> None:  # noqa: B027
        """End."""


class FolderClient(Client):
    """open, write, close, rename: no reader sees half a file; open, read into the slot, close.

    Args:
        folder: Of its own; made.
        tier_folder: Of the tier.
        cached: Whether a put may end in the page cache and a get find it there; else both go to the medium.
    """

    def __init__(self, folder: Path, tier_folder: Path, cached: bool) -> None:
        folder.mkdir(parents=True)
        self._folder, self._tier_folder, self._cached = folder, tier_folder, cached

    def put(self, keys: Sequence[str], records: Sequence[memoryview]) -> None:
        for key, record in zip(keys, records, strict=True):
            unfinished = self._folder / f"{key}.part"
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o600)
            moved = os.write(descriptor, record)
            if not self._cached:
                os.fsync(descriptor)
            os.close(descriptor)
            unfinished.rename(self._folder / key)
            _demand(moved, record.nbytes)

    def get(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            descriptor = os.open(self._folder / key, os.O_RDONLY)
            moved = os.readv(descriptor, [slot])
            os.close(descriptor)
            _demand(moved, slot.nbytes)

    def rest(self) -> None:
        for path in () if self._cached else self._records():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def clear(self) -> None:
        # The tier's folders stay: where there are many records they stand long before.
        for path in self._records():
            path.unlink()

    def _records(self) -> list[Path]:
        return [*self._folder.iterdir(), *self._tier_folder.glob("kv*/**/*.*of*")]


class RedisClient(Client):
    """redis-py's ``set`` and ``get``.

    Args:
        url: Of the server.
    """

    gets_into_slots = False

    def __init__(self, url: str) -> None:
        import redis

        self._redis: Any = redis.Redis.from_url(url)

    def put(self, keys: Sequence[str], records: Sequence[memoryview]) -> None:
        for key, record in zip(keys, records, strict=True):
            _demand(bool(self._redis.set(key, record)), True)

    def get(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            _demand(len(self._redis.get(key) or b""), slot.nbytes)

    def fill(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            slot[:] = self._redis.get(key)

    def clear(self) -> None:
        self._redis.flushall(asynchronous=False)

    def close(self) -> None:
        self._redis.close()


class ObstoreClient(Client):
    """obstore's ``put`` and ``get(...).bytes()``.

    Args:
        store: Of obstore, with what else the tier keeps in it.
    """

    gets_into_slots = False

    def __init__(self, store: Any) -> None:
        import obstore

        self._obstore, self._store = obstore, store

    def put(self, keys: Sequence[str], records: Sequence[memoryview]) -> None:
        for key, record in zip(keys, records, strict=True):
            self._obstore.put(self._store, key, record)

    def get(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            _demand(len(self._obstore.get(self._store, key).bytes()), slot.nbytes)

    def fill(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            slot[:] = memoryview(self._obstore.get(self._store, key).bytes())

    def clear(self) -> None:
        for some in self._obstore.list(self._store):
            self._obstore.delete(self._store, [one["path"] for one in some])


class MooncakeStoreClient(Client):
    """``put_from`` and ``get_into`` over registered memory, in this process; or a batch of records a call.

    Args:
        master: ``host:port``.
        batch_bytes: Of the records that one call takes at most; 0 for one record, by itself.
    """

    def __init__(self, master: str, batch_bytes: int = 0) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        self._batch_bytes = batch_bytes
        host = master.rpartition(":")[0]
        _demand(self._store.setup(host, "P2PHANDSHAKE", 0, 0, "tcp", "", master), 0)

    def at_once(self, record_bytes: int) -> int:
        return max(1, self._batch_bytes // record_bytes)

    def hold(self, pages: Pages) -> None:
        _demand(self._store.register_buffer(pages.address, len(pages.view)), 0)

    def let_go(self, pages: Pages) -> None:
        _demand(self._store.unregister_buffer(pages.address), 0)

    def put(self, keys: Sequence[str], records: Sequence[memoryview]) -> None:
        if self._batch_bytes:
            _demand(set(self._store.batch_put_from(list(keys), *_places(records))), {0})
            return
        for key, address, byte_count in zip(keys, *_places(records), strict=True):
            _demand(self._store.put_from(key, address, byte_count), 0)

    def get(self, keys: Sequence[str], slots: Sequence[memoryview]) -> None:
        if self._batch_bytes:
            ends = self._store.batch_get_into(list(keys), *_places(slots))
            _demand(list(ends), [slot.nbytes for slot in slots])
            return
        for key, address, byte_count in zip(keys, *_places(slots), strict=True):
            _demand(self._store.get_into(key, address, byte_count), byte_count)

    def clear(self) -> None:
        # Lease or not: nobody reads any more.
        self._store.remove_all(True)


def _places(records: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    import numpy as np

    addresses = [np.frombuffer(record, np.uint8).ctypes.data for record in records]
    return addresses, [record.nbytes for record in records]


def _demand(found: object, due: object) -> None:
    if found != due:
        raise RuntimeError(f"the yardstick's client: {found!r}, where {due!r} is due")
