"""What a tier below host memory is: bytes by key, in blocking calls that have a deadline.

A tier keeps no policy and knows no requests: what is written, read and discarded is decided elsewhere, and
the calls come from the tier's own threads. ``kvtide.testing.TierTests`` says what every tier has to pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self, TypeVar

from kvtide.errors import ConfigError, TierError
from kvtide.keys import OffloadKey
from kvtide.tiers.records import HEADER_BYTES, ChunkName, RecordHeader, RecordIdentity, RecordRun


class Written(Enum):
    """How a write that raised nothing ended."""

    NEW = "new"
    THERE_ALREADY = "there already"


@dataclass(frozen=True, slots=True)
class TierPlace:
    """What a tier that is named in the settings is built from.

    Attributes:
        identity: Of this rank's records.
        rank: Of this worker, from 0.
        limit_bytes: Of what this rank may take; 0 where the settings name no limit.
        options: As the user wrote them.
        instance: Names this server's present life, the same on all its ranks; no other has the same.
        writes: Per group, whether this rank writes its records, or another one that has the same bytes; a
            single one is for all groups.
    """

    identity: RecordIdentity
    rank: int
    limit_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    instance: str = ""
    writes: tuple[bool, ...] = (True,)


class Tier(ABC):
    """One medium, as one rank sees it.

    Every call may come from several threads at once. A call that has not ended by its deadline raises
    ``TierUnavailableError``; where the medium cannot be interrupted it may return later, and whoever called
    it keeps buffer and thread out of use until it does.
    """

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """Make one as the settings ask for it; without blocking, that is what ``open`` is for.

        Raises:
            ConfigError: The options will not do, or this tier cannot be named in the settings.
        """
        raise ConfigError(
            "tiers",
            f"{cls.__module__}.{cls.__qualname__}",
            "cannot be built from settings: it has no build()",
        )

    @classmethod  # noqa: B027 - most have none
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that will not do, before anything is built from them.

        Raises:
            ConfigError: Names the option, and shows no secret.
        """

    def open(self) -> None:  # noqa: B027 - most tiers are ready once they are made
        """Make ready; called once, before any other call, from a thread that may wait.

        Raises:
            TierUnavailableError: Not now; it is called again later.
        """

    @abstractmethod
    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        """Fill ``payload`` with what was written under ``key``.

        Args:
            key: Of a chunk.
            payload: ``uint8[n]``, C-contiguous, owned by the caller throughout.
            deadline_s: Seconds from now after which to give up.

        Returns:
            True when ``payload`` holds the verified bytes, False when the key is not here. On False or on an
            error the contents of ``payload`` mean nothing.

        Raises:
            CorruptRecordError: Not what was written; the key has been discarded.
            TierUnavailableError: Refused, unreachable or out of time.
        """

    @abstractmethod
    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        """Keep a copy of ``payload`` under ``name.key``; once it returns, it can be read back.

        Args:
            name: Of a chunk.
            payload: ``uint8[n]``, C-contiguous, not written to by the caller until the call has ended.
            deadline_s: Seconds from now after which to give up.

        Raises:
            TierFullError: No room: nothing was kept.
            TierUnavailableError: Refused, unreachable or out of time; whether it was kept is not known.
        """

    def run_chunks(self, payload_bytes: int) -> int:
        """Say how many neighbouring chunks ``read_run`` and ``write_run`` are best handed in one call.

        Args:
            payload_bytes: Of each.
        """
        return 1

    def read_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[bool | TierError]:
        """Fill each of ``payloads``: what ``read_into`` does, for neighbouring chunks in one call.

        Args:
            run: The chunks.
            payloads: For each ``uint8[n]``, all of one length.
            deadline_s: Seconds from now after which to give up on all of them.

        Returns:
            For each chunk what ``read_into`` would return, or would raise.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time: nothing was read.
        """
        return [
            _outcome(self.read_into, key, payload, deadline_s)
            for key, payload in zip(run.keys(), payloads, strict=True)
        ]

    def write_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[Written | TierError]:
        """Keep a copy of each of ``payloads``: what ``write`` does, for neighbouring chunks in one call.

        Args:
            run: The chunks.
            payloads: For each ``uint8[n]``, all of one length.
            deadline_s: Seconds from now after which to give up on all of them.

        Returns:
            For each chunk what ``write`` would return, or would raise.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time; whether anything was kept is not known.
        """
        return [
            _outcome(self.write, name, payload, deadline_s)
            for name, payload in zip(run.names(), payloads, strict=True)
        ]

    @abstractmethod
    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        """Say which keys are here: a hint, the read decides.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """

    @abstractmethod
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Forget keys; unknown ones are ignored. Trouble is counted, never raised."""

    @abstractmethod
    def begin_generation(self, trusted: bool = False) -> None:
        """Never serve again what was written before, at a cost that does not depend on how much that is.

        A write that is under way is of before. When this returns, a restart does not undo it.

        Args:
            trusted: What is written from now on may be served after a restart. False when it may be of
                other weights than the fingerprint says: a private tier then serves none of it after one.

        Raises:
            TierUnavailableError: A restart would undo it; until then nothing of before is served.
        """

    @abstractmethod
    def close(self) -> None:
        """End: no call is under way when it returns, and what was written stays."""


T = TypeVar("T")


def _outcome(call: Callable[..., T], *arguments: Any) -> T | TierError:
    try:
        return call(*arguments)
    except TierError as error:
        return error


class PrivateTier(Tier):
    """A tier that one instance has for itself: it knows what it holds, and survives a restart."""

    @abstractmethod
    def inventory(self) -> Iterator[RecordHeader]:
        """List what is here and can be read, of this fingerprint and generation, parents first or not.

        May be called while other calls go on; what they change may be seen or not.
        """

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """What it could hold as things are, given its limit and the room that others leave it."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What of that is taken by records that can be read."""

    def record_bytes(self, payload_bytes: int) -> int:
        """What a record takes of the capacity."""
        return HEADER_BYTES + payload_bytes
