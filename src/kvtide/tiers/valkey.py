"""Records in a server that speaks the Redis protocol: Valkey, Redis, one server or a cluster of them.

A record is one string, header and payload, under a name that only whoever computes the same bytes knows. The
server evicts by its own rules. Knows how records become questions and what the answers mean; which node has a
key is known by ``Routes``, what is said on a connection by ``valkey_commands``.
"""

import logging
from collections.abc import Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from kvtide.errors import CorruptRecordError, NodeUnavailableError, TierError, TierUnavailableError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.options import need_client
from kvtide.tiers.records import HEADER_BYTES, ChunkName, RecordRun
from kvtide.tiers.shared import SharedTier, end_of
from kvtide.tiers.valkey_commands import Found, Given, Taken, count, get, put
from kvtide.tiers.valkey_facts import facts_of
from kvtide.tiers.valkey_nodes import Node
from kvtide.tiers.valkey_options import ValkeySettings
from kvtide.tiers.valkey_routes import Cluster, OneServer, Routes
from kvtide.tiers.valkey_wire import Deadline, Refusal, Wire

logger = logging.getLogger(__name__)

OPEN_S = 5.0
DISCARD_S = 2.0
KEYS_AT_ONCE = 256

LARGE_BYTES = 256 << 10
"""From here on a second record in the same call gains little."""
RUN_BYTES = 1 << 20
RUN_CHUNKS = 16

T = TypeVar("T")


class ValkeyTier(SharedTier):
    """Records in strings.

    Args:
        place: From the settings.
        settings: Where the server is, and how one gets in.
    """

    def __init__(self, place: TierPlace, settings: ValkeySettings) -> None:
        super().__init__(place)
        self._settings = settings
        kind = Cluster if settings.cluster else OneServer
        self._routes: Routes = kind(settings.address, settings.access)

    def __repr__(self) -> str:
        return f"<ValkeyTier {self._settings.address}>"

    @classmethod
    def build(cls, place: TierPlace) -> Self:
        """From ``{"url": "redis://host:6379"}``, and what else ``ValkeyOptions`` has."""
        cls.check_options(place.options)
        return cls(place, ValkeySettings.of(place.options))

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        ValkeySettings.of(options)
        need_client("valkey", "redis.connection", "the redis client")

    def open(self) -> None:
        self._routes.open(Deadline.after(OPEN_S))

    @property
    def nodes(self) -> list[Node]:
        """The servers that records lie on."""
        return self._routes.nodes()

    # -- the contract -----------------------------------------------------------------------------

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        return _value(self._read([key], [payload], _deadline(deadline_s))[0])

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        if not self.writes(name.key):
            return Written.THERE_ALREADY
        return _value(self._write([name], [payload], _deadline(deadline_s))[0])

    def run_chunks(self, payload_bytes: int) -> int:
        return 1 if payload_bytes >= LARGE_BYTES else min(RUN_CHUNKS, RUN_BYTES // max(1, payload_bytes))

    def read_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[bool | TierError]:
        return _unless_out(self._read(run.keys(), payloads, _deadline(deadline_s)))

    def write_run(
        self, run: RecordRun, payloads: Sequence[memoryview], deadline_s: float
    ) -> Sequence[Written | TierError]:
        names = run.names()
        if names and not self.writes(names[0].key):
            return [Written.THERE_ALREADY] * len(names)
        return _unless_out(self._write(names, payloads, _deadline(deadline_s)))

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        deadline = _deadline(deadline_s)
        found = []
        for first in range(0, len(keys), KEYS_AT_ONCE):
            names = [self._name_of(key) for key in keys[first : first + KEYS_AT_ONCE]]
            for answer in self._ask_counts(b"EXISTS", names, deadline):
                if isinstance(answer, TierUnavailableError) and not isinstance(answer, NodeUnavailableError):
                    raise answer
                found.append(answer == 1)
        return found

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._forget(keys, Deadline.after(DISCARD_S))

    def ping(self, deadline_s: float) -> str:
        return facts_of(self._routes, self._settings.prefix, _deadline(deadline_s))

    def close(self) -> None:
        self._routes.close()

    # -- inside -------------------------------------------------------------------------------------

    def _name_of(self, key: OffloadKey) -> bytes:
        block_hash, _ = split_offload_key(key)
        return f"{self._settings.prefix}{self.folder_of(key)}/{self.file_of(block_hash, key)}".encode()

    def _read(
        self, keys: Sequence[OffloadKey], payloads: Sequence[memoryview], deadline: Deadline
    ) -> list[bool | TierError]:
        records = [
            Taken(self._name_of(key), memoryview(bytearray(HEADER_BYTES)), payload)
            for key, payload in zip(keys, payloads, strict=True)
        ]

        def talk(
            wire: Wire, indexes: Sequence[int], said: MutableSequence[Found | Refusal | None], share: Deadline
        ) -> None:
            get(wire, [records[index] for index in indexes], said, share)

        found = self._routes.ask([record.key for record in records], talk, deadline)
        judged = [self._judged(*each) for each in zip(keys, records, found, strict=True)]
        corrupt = [key for key, one in zip(keys, judged, strict=True) if isinstance(one, CorruptRecordError)]
        if corrupt:
            self._forget(corrupt, deadline)
        return judged

    def _judged(self, key: OffloadKey, record: Taken, found: Found | TierError) -> bool | TierError:
        """Hold what came against what was asked for."""
        if found is Found.NOTHING:
            return False
        if found is Found.OTHER_LENGTH:
            found = CorruptRecordError(
                f"a value of another length, where {record.payload.nbytes} bytes are due"
            )
        elif found is Found.RECORD:
            try:
                self.check(record.header, key, record.payload)
                return True
            except CorruptRecordError as error:
                found = error
        if isinstance(found, CorruptRecordError):
            return CorruptRecordError(f"{self._settings.address}: {found}; the record is forgotten")
        return found

    def _forget(self, keys: Sequence[OffloadKey], deadline: Deadline) -> None:
        for first in range(0, len(keys), KEYS_AT_ONCE):
            names = [self._name_of(key) for key in keys[first : first + KEYS_AT_ONCE]]
            answers = self._ask_counts(b"UNLINK", names, deadline)
            trouble = [answer for answer in answers if isinstance(answer, TierError)]
            if trouble:
                logger.debug("%d records were not discarded: %s", len(trouble), trouble[0])

    def _write(
        self, names: Sequence[ChunkName], payloads: Sequence[memoryview], deadline: Deadline
    ) -> list[Written | TierError]:
        records = [
            Given(self._name_of(name.key), partial(self.header_of, name, payload), payload)
            for name, payload in zip(names, payloads, strict=True)
        ]

        def talk(
            wire: Wire,
            indexes: Sequence[int],
            said: MutableSequence[Written | Refusal | None],
            share: Deadline,
        ) -> None:
            put(wire, [records[index] for index in indexes], self._settings.ttl_s, said, share)

        return self._routes.ask([record.key for record in records], talk, deadline)

    def _ask_counts(self, word: bytes, names: Sequence[bytes], deadline: Deadline) -> list[int | TierError]:
        def talk(
            wire: Wire, indexes: Sequence[int], said: MutableSequence[int | Refusal | None], share: Deadline
        ) -> None:
            count(wire, word, [names[index] for index in indexes], said, share)

        return self._routes.ask(names, talk, deadline)


def _deadline(deadline_s: float) -> Deadline:
    return Deadline(end_of(deadline_s))


def _value(outcome: T | TierError) -> T:
    if isinstance(outcome, TierError):
        raise outcome
    return outcome


def _unless_out(outcomes: list[T | TierError]) -> list[T | TierError]:
    """Hand back outcomes, unless none was had for the one reason that the medium is out."""
    first = next(iter(outcomes), None)
    if isinstance(first, TierUnavailableError) and all(
        isinstance(outcome, TierUnavailableError) for outcome in outcomes
    ):
        raise first
    return outcomes
