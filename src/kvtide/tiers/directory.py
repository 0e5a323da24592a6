"""A folder on a file system that many hosts share: a file for each record, found by its name alone.

Nobody knows what lies there but the file system; hosts read, write and remove as they like, and none waits
for another. A record is there whole or not at all, and proves itself when it is read. Knows which file is
whose; how files are written and read, and what is removed, is decided beside it.
"""

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import ByteSize

from kvtide.errors import (
    CorruptRecordError,
    NodeUnavailableError,
    TierFullError,
    TierUnavailableError,
)
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.directory_cleaner import Cleaner
from kvtide.tiers.directory_files import (
    GONE,
    RecordFile,
    is_file,
    stands,
    tier_error,
    told_as_tier_errors,
    write_file,
)
from kvtide.tiers.directory_folder import SharedFolder, file_system_of
from kvtide.tiers.directory_lease import last_count
from kvtide.tiers.directory_names import spread, temporary_in
from kvtide.tiers.directory_options import DirectoryOptions
from kvtide.tiers.directory_room import Room
from kvtide.tiers.records import HEADER_BYTES, ChunkName
from kvtide.tiers.shared import SharedTier, end_of

logger = logging.getLogger(__name__)

WRITE_ATTEMPTS = 3
"""A folder that was just made may be removed before a file is in it."""

TRIED_BYTES, TRY_S = 4096, 60.0
"""What is written and read back before anything else, and how long that may take."""


def shown(byte_count: int) -> str:
    """Write a number of bytes for people."""
    return ByteSize(byte_count).human_readable()


class DirectoryTier(SharedTier):
    """A file for each record.

    Args:
        place: From the settings; ``limit_bytes`` is of the whole folder, whoever writes there, 0 for none.
        options: Where it is.
    """

    def __init__(self, place: TierPlace, options: DirectoryOptions) -> None:
        super().__init__(place)
        self._path, self._durable = options.path, options.fsync
        self._folder = SharedFolder(options.path)
        cleans = place.limit_bytes > 0 and place.rank == 0
        self._cleaner = Cleaner(options.path, place.limit_bytes) if cleans else None
        self._room = Room(place.limit_bytes, lambda: last_count(self._path), self._nudge)

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        return cls(place, DirectoryOptions.read_from(place.options))

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        DirectoryOptions.read_from(options)

    def open(self) -> None:
        for warning in self._folder.open():
            logger.warning("%s", warning)
        with contextlib.suppress(TierFullError):  # what is there can be read
            self._try_out(time.monotonic() + TRY_S)
        if self._cleaner is not None:
            self._cleaner.start()

    # -- the contract -----------------------------------------------------------------------------

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        until_s = end_of(deadline_s)
        try:
            path = self._path_of(key)
        except KeyError:
            return False
        try:
            with RecordFile(path) as file:
                return self._checked(file, path, key, payload, until_s)
        except OSError as error:
            if error.errno in GONE:
                return False
            raise tier_error(path, error) from None

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        if not self.writes(name.key):
            return Written.THERE_ALREADY
        until_s = end_of(deadline_s)
        path, byte_count = self._path_of(name.key), HEADER_BYTES + payload.nbytes
        with told_as_tier_errors(path):
            if stands(path, byte_count):
                return Written.THERE_ALREADY
            self._room.take(byte_count)
            try:
                new = self._written(path, self.header_of(name, payload), payload, until_s)
            except BaseException:  # also an interrupt: the room would be nobody's for ever
                self._room.give_back(byte_count)
                raise
        if not new:
            self._room.give_back(byte_count)
        return Written.NEW if new else Written.THERE_ALREADY

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        until_s = end_of(deadline_s)
        with told_as_tier_errors(self._path):
            return [self._is_here(key, until_s) for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            try:
                os.unlink(self._path_of(key))
            except KeyError:
                continue
            except OSError as error:
                if error.errno not in GONE:
                    logger.debug("%s: %s", self._path, error)

    def close(self) -> None:
        if self._cleaner is not None and not self._cleaner.close():
            logger.warning("%s: does not answer; what counts its records ends when it does", self._path)

    def ping(self, deadline_s: float) -> str:
        self._folder.open()
        try:
            self._try_out(end_of(deadline_s))
        except TierFullError as error:
            raise TierUnavailableError(f"{error}; make room, or set a limit") from None
        with told_as_tier_errors(self._path):
            status, count = os.statvfs(self._path), last_count(self._path)
        free, total = (shown(blocks * status.f_frsize) for blocks in (status.f_bavail, status.f_blocks))
        said = f"{self._path} on {file_system_of(self._path)}: {free} of {total} free"
        return said if count is None else f"{said}, records took {shown(count.used_bytes)} when last counted"

    # -- inside -----------------------------------------------------------------------------------

    def _path_of(self, key: OffloadKey) -> str:
        """Name the file of a record.

        Raises:
            KeyError: Of a group that there is not.
        """
        block_hash = split_offload_key(key)[0]
        return "/".join((self._path, self.folder_of(key), spread(block_hash), self.file_of(block_hash, key)))

    def _checked(
        self, file: RecordFile, path: str, key: OffloadKey, payload: memoryview, until_s: float
    ) -> bool:
        try:
            header = file.read(payload, until_s)
            if header is None:
                return False
            self.check(header, key, payload)
        except CorruptRecordError as error:
            file.remove()
            raise CorruptRecordError(f"{path}: {error}; the record is removed") from None
        file.note_use()
        return True

    def _written(self, path: str, header: bytes, payload: memoryview, until_s: float) -> bool:
        for _ in range(WRITE_ATTEMPTS):
            try:
                return write_file(path, header, payload, until_s, self._durable)
            except FileNotFoundError:
                self._folder.make(os.path.dirname(path))
        raise NodeUnavailableError(f"{path}: others remove what is being written; do their clocks go right?")

    def _is_here(self, key: OffloadKey, until_s: float) -> bool:
        if time.monotonic() > until_s:
            raise TierUnavailableError(f"{self._path}: out of time while asking what is here")
        try:
            return is_file(self._path_of(key))
        except KeyError:
            return False

    def _nudge(self) -> None:
        if self._cleaner is not None:
            self._cleaner.nudge()

    def _try_out(self, until_s: float) -> None:
        """Write a file, read it back and remove it.

        Raises:
            TierFullError: There is no room for it.
            TierUnavailableError: One of these cannot be done; says what would do.
        """
        path, content = temporary_in(self._path), os.urandom(TRIED_BYTES)
        back = bytearray(TRIED_BYTES)
        try:
            with told_as_tier_errors(self._path):
                write_file(path, bytes(HEADER_BYTES), memoryview(content), until_s)
                with RecordFile(path) as file:
                    file.read(memoryview(back), until_s)
        except CorruptRecordError as error:
            raise TierUnavailableError(
                f"{self._path}: what was written does not come back: {error}"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if back != content:
            raise TierUnavailableError(f"{self._path}: what was written does not come back")
