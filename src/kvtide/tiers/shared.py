"""What tiers that many servers share have in common: names nobody else uses, and records that say so.

A record lies under a name made of the fingerprint, the group, the block hash and the shard, so that whoever
computes the same bytes finds them, and nobody else does. Knows names and headers; does not know media.

A reset cannot forget what others use. After one the weights in memory may not be those that the fingerprint
was taken of: from then on this server reads and writes under names of its own, until it is started again.
"""

import time
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import xxhash

from kvtide.errors import CorruptRecordError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import Tier, TierPlace
from kvtide.tiers.records import (
    DOUBTFUL,
    FORMAT_VERSION,
    HEADER_BYTES,
    ChunkName,
    RecordRun,
    pack,
    unpack,
)

CLOCK_STEP_S = 2
"""So much older than the tier may a record of its own life be: clocks are whole seconds, and are set back."""

IN_TIME = 0.95
"""Of its time a call takes no more than this: who waits for it counts it as late when all of it is over."""


def end_of(deadline_s: float) -> float:
    """Say when a call that begins now has to have ended, by ``time.monotonic``.

    Args:
        deadline_s: As the call was given it.
    """
    return time.monotonic() + IN_TIME * deadline_s


def fill(payload: memoryview, body: memoryview) -> None:
    """Copy ``uint8[n]``, and let other threads of the interpreter run meanwhile."""
    np.copyto(np.frombuffer(payload, dtype=np.uint8), np.frombuffer(body, dtype=np.uint8))


class SharedTier(Tier):
    """A tier that evicts by its own rules, and to which others write too.

    Args:
        place: From the settings.
    """

    def __init__(self, place: TierPlace) -> None:
        self.identity = place.identity
        self._instance = place.instance
        self._writes = place.writes
        self._reset_count = 0
        self._began_s = int(time.time())
        self.generation = 0

    # -- names --------------------------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        """Whether there was a reset: what is read and written is this server's alone."""
        return self.generation != 0

    def folder_of(self, key: OffloadKey) -> str:
        """Name what all records of a chunk's model and group have in common: ``kv1/fingerprint/g0``."""
        group_index = split_offload_key(key)[1]
        apart = f"-{self.generation:016x}" if self.generation else ""
        return f"kv{FORMAT_VERSION}/{self.identity.fingerprint.hex()}{apart}/g{group_index}"

    def file_of(self, block_hash: bytes, key: OffloadKey) -> str:
        """Name one record within ``folder_of``, by a hash and this rank's shard: ``hash.0of1``.

        Raises:
            KeyError: Of a group that there is not.
        """
        shard = self.identity.shard_of(key)
        if shard is None:
            raise KeyError(f"no such group: {split_offload_key(key)[1]}")
        return f"{block_hash.hex()}.{shard.index}of{shard.count}"

    def writes(self, key: OffloadKey) -> bool:
        """Whether this rank is the one that writes a chunk; else another writes the same bytes."""
        if len(self._writes) == 1:
            return self._writes[0]
        group_index = split_offload_key(key)[1]
        return group_index < len(self._writes) and self._writes[group_index]

    # -- records ------------------------------------------------------------------------------------

    def header_of(self, name: ChunkName, payload: memoryview) -> bytes:
        """Write down the header that goes before ``payload``: ``bytes[HEADER_BYTES]``.

        Raises:
            ValueError: Of a group that there is not.
        """
        return pack(self.identity.header_of(name, payload, self.generation, int(time.time())))

    def check(self, header: bytes | bytearray | memoryview, key: OffloadKey, payload: memoryview) -> None:
        """Hold a record that was read against what was asked for.

        Args:
            header: ``bytes[HEADER_BYTES]``.
            key: Asked for.
            payload: ``uint8[n]``, as read.

        Raises:
            CorruptRecordError: It is another record, or not what was written; says in what.
        """
        read = unpack(header)
        self.identity.check(read, key, payload, self.generation)
        if self.is_apart and read.written_at_s < self._began_s - CLOCK_STEP_S:
            raise CorruptRecordError("a record of an earlier life, written after a reset")

    @staticmethod
    def record_bytes(payload_bytes: int) -> int:
        """What a record takes."""
        return HEADER_BYTES + payload_bytes

    # -- calls --------------------------------------------------------------------------------------

    def find(self, run: RecordRun, deadline_s: float) -> Sequence[bool]:
        """Say which chunks of a run are here: a hint, the read decides.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """
        return self.contains(run.keys(), deadline_s)

    def begin_generation(self, trusted: bool = False) -> None:
        self._reset_count += 1
        life = f"{self._instance}/{self._reset_count}".encode()
        self.generation = xxhash.xxh3_64_intdigest(life) | DOUBTFUL

    @abstractmethod
    def ping(self, deadline_s: float) -> str:
        """Ask whether it can be reached and written to, for people who set it up.

        Returns:
            What answers, in one line without secrets: its kind and version, and how full it is if it says.

        Raises:
            TierUnavailableError: Says what is wrong, without secrets, and what would do.
        """
