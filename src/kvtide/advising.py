"""What ghost caches are told of a server's requests, and what they answer.

Values and a contract: whoever decides hands over what has come, and takes answers when they are there; it
never waits for one. Chunks go by fingerprints, eight bytes of their hash each.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

FINGERPRINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class GhostTier:
    """A tier of whose size ghosts are kept.

    Attributes:
        name: In metrics.
        policy: Who leaves it.
        chunk_count: Chunks of the finest group, with whatever belongs to them, that it can hold.
        store_threshold: Requests that have to offer a chunk before it is stored.
        filter_entries: Chunks whose offers are counted for that.
        extends_host: It is given what leaves host memory, so that both together hold as much as both can.
    """

    name: str
    policy: str
    chunk_count: int
    store_threshold: int = 1
    filter_entries: int = 1 << 16
    extends_host: bool = False


@dataclass(frozen=True, slots=True)
class GhostPlan:
    """What ghosts are kept of.

    Attributes:
        tokens_per_chunk: Of the finest group.
        tiers: Host memory first, then the tiers below it that nobody else writes to.
        most_chunks: That all ghosts together may hold; beyond it they see a sample of the sessions.
    """

    tokens_per_chunk: int
    tiers: tuple[GhostTier, ...]
    most_chunks: int = 1_000_000


class Paces(NamedTuple):
    """How fast the server is, in seconds a token; 0 where nobody knows.

    Attributes:
        compute_s: Computing a prompt.
        load_s: Bringing it back from host memory.
        read_s: Bringing it up to host memory, by tier below it.
    """

    compute_s: float = 0.0
    load_s: float = 0.0
    read_s: tuple[float, ...] = ()


class Arrival(NamedTuple):
    """A request that has come.

    Attributes:
        visit: Numbers it; never goes back.
        now_s: By a clock that never goes back.
        token_count: Of its prompt.
        chunks: Fingerprints of the prompt's whole chunks, one after another.
        paces: As they are now.
    """

    visit: int
    now_s: float
    token_count: int
    chunks: bytes
    paces: Paces = Paces()


class Growth(NamedTuple):
    """A request that has ended.

    Attributes:
        visit: Its number.
        chunks: Fingerprints of the chunks that it has added to those of its prompt and that are kept.
    """

    visit: int
    chunks: bytes


class HashView(NamedTuple):
    """Hashes of chunks, as the engine has them: a list that may grow meanwhile, and which of it are meant.

    Cutting them to fingerprints takes longer than all else that is done for an adviser when a request comes;
    so a list is handed over as it is, and cut where nobody waits.

    Attributes:
        hashes: The engine's own list; entries that are there never change.
        start: The first that is meant.
        stop: One past the last that may be.
        step: Between those that are.
        chunk_count: How many that are.
    """

    hashes: Sequence[bytes]
    start: int
    stop: int
    step: int
    chunk_count: int

    def pieces(self, count: int) -> Iterator["HashView"]:
        """Split them into views of ``count`` chunks at most."""
        for done in range(0, self.chunk_count, count):
            start = self.start + done * self.step
            stop = min(self.stop, start + count * self.step)
            yield self._replace(start=start, stop=stop, chunk_count=min(count, self.chunk_count - done))

    def fingerprints(self) -> bytes:
        """Cut them, see the function of that name."""
        return fingerprints(self.hashes, self.start, self.stop, self.step)


class Adviser(ABC):
    """Keeps ghosts somewhere else. No call waits, and none raises; called by one thread.

    Attributes:
        is_on: Whether anything is made of what it is told.
    """

    is_on: bool = True

    @abstractmethod
    def planned(self, plan: GhostPlan) -> None:
        """Say what there is to keep ghosts of. Another plan than the last one begins everything anew."""

    @abstractmethod
    def arrived(self, arrival: Arrival, chunks: HashView) -> None:
        """Tell of a request; ``chunks`` stands for those of ``arrival``, which has none."""

    @abstractmethod
    def grown(self, growth: Growth, chunks: HashView) -> None:
        """Tell of its end, likewise."""

    @abstractmethod
    def forget(self) -> None:
        """Note that every tier was emptied."""

    @abstractmethod
    def take(self) -> Sequence[Mapping[str, float]]:
        """Hand out what has been answered since the last call: deltas of ``MetricsDelta``, in order."""

    @abstractmethod
    def close(self) -> None:
        """End."""


def fingerprints(hashes: Sequence[bytes], start: int, stop: int, step: int) -> bytes:
    """Cut hashes to eight bytes each.

    Args:
        hashes: Of one length, all of them. Where that is no multiple of eight bytes these are names, as
            recorded traces have them, and not spread as an engine's hashes are: they are hashed.
        start: The first that is wanted.
        stop: One past the last that may be.
        step: Between those that are.

    Returns:
        ``FINGERPRINT_BYTES`` for each; nothing at all of hashes that are not of one length.
    """
    wanted = hashes[start:stop:step]
    if not wanted:
        return b""
    width, packed = len(wanted[0]), b"".join(wanted)
    if len(packed) != width * len(wanted):
        return b""
    if width % FINGERPRINT_BYTES or not width:
        return b"".join(map(xxhash.xxh3_64_digest, wanted))
    return np.frombuffer(packed, dtype=np.uint64)[:: width // FINGERPRINT_BYTES].tobytes()
