"""What lies in the folder of a private disk: ranks, and the models whose records they are.

Reads what is there and changes nothing; what else somebody put into the folder is named and left aside.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.tiers.rank_folder import RankFolder, Stored, reason
from kvtide.tiers.records import DOUBTFUL, RecordHeader
from kvtide.tiers.slabs import Place, slot_bytes_of

FINGERPRINTS = "fingerprints"
LONGEST_NOTE_BYTES = 1 << 20
"""A file in ``fingerprints`` that is longer is none of ours."""

LAST_S = 1 << 40
"""A time beyond it, in seconds since the epoch, is nonsense."""

_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,3})")
_NOTE = re.compile(r"([0-9a-f]{64})\.json")
_NEW_NOTE = re.compile(r"[0-9a-f]{64}\.[0-9]+")  # of an instance that was killed while it wrote one


@dataclass(frozen=True, slots=True)
class ModelNote:
    """What an instance wrote down of a fingerprint.

    Attributes:
        model: Name, as whoever wrote it chose.
        last_used_s: Seconds since the epoch, None if it does not say.
    """

    model: str
    last_used_s: float | None


@dataclass(slots=True)
class Holding:
    """What is stored of one fingerprint and generation.

    Attributes:
        record_count: Of all ranks.
        byte_count: What the records take of slabs.
        oldest_s: When the first of them was written, seconds since the epoch.
        newest_s: And the last.
        groups: Indexes of KV cache groups.
        ranks: In whose folders they are.
    """

    record_count: int = 0
    byte_count: int = 0
    oldest_s: int = LAST_S
    newest_s: int = 0
    groups: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    _missing: dict[OffloadKey, int] = field(default_factory=dict, repr=False)

    @property
    def chunk_count(self) -> int:
        """Chunks of which anything is here."""
        return len(self._missing)

    @property
    def whole_chunk_count(self) -> int:
        """Chunks of which every shard is here: only those can be brought back."""
        return sum(missing <= 0 for missing in self._missing.values())

    def add(self, rank: int, place: Place, header: RecordHeader) -> None:
        """Count a record in the folder of ``rank``."""
        self.record_count += 1
        self.byte_count += slot_bytes_of(place.payload_bytes)
        self.oldest_s = min(self.oldest_s, header.written_at_s)
        self.newest_s = max(self.newest_s, header.written_at_s)
        self.groups.add(split_offload_key(header.name.key)[1])
        self.ranks.add(rank)
        key = header.name.key
        self._missing[key] = self._missing.get(key, header.shard.count) - 1


Holdings = dict[tuple[bytes, int], Holding]
"""By fingerprint, ``bytes[32]``, and generation as records have it."""


def number_of(generation: int) -> int:
    """Number a generation, whether or not it is in doubt."""
    return generation & ~DOUBTFUL


@dataclass(slots=True)
class DiskFolder:
    """The whole folder: a folder for each rank, and what is known of fingerprints.

    Attributes:
        path: As it was given.
        ranks: In order.
        models: By fingerprint, ``bytes[32]``.
        left_aside: What was found and not used, and why.
    """

    path: Path
    ranks: list[RankFolder] = field(default_factory=list)
    models: dict[bytes, ModelNote] = field(default_factory=dict)
    left_aside: list[str] = field(default_factory=list)

    @property
    def slab_bytes(self) -> int:
        """Of all slabs together, without their holes."""
        return sum(rank.slab_bytes for rank in self.ranks)

    def in_use(self) -> bool:
        """Whether an instance has it now."""
        return any(rank.in_use() for rank in self.ranks)

    def served(self) -> dict[bytes, set[int]]:
        """Tell which generations of each fingerprint are served, or would be after a restart."""
        served: dict[bytes, set[int]] = {}
        for rank in self.ranks:
            for fingerprint, generation in rank.served():
                served.setdefault(fingerprint, set()).add(generation)
        return served

    def record_count(self) -> int | None:
        """How many records the indexes name; None where one of them cannot be read."""
        counts = [rank.row_count() for rank in self.ranks]
        return None if None in counts else sum(count or 0 for count in counts)

    def records(self) -> Iterator[tuple[RankFolder, Stored]]:
        """List what is stored, rank by rank."""
        for rank in self.ranks:
            for stored in rank.records():
                yield rank, stored

    def close(self) -> None:
        """Let go of everything."""
        for rank in self.ranks:
            rank.close()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[DiskFolder]:
    """Open a folder for reading.

    Raises:
        ConfigError: It cannot be read, or nothing in it is a disk tier's.
    """
    folder = DiskFolder(path)
    try:
        _fill(folder)
        if not folder.ranks:
            raise ConfigError("PATH", str(path), _what_would_do(path))
        yield folder
    finally:
        folder.close()


def _fill(folder: DiskFolder) -> None:
    try:
        names = sorted(os.listdir(folder.path))
    except PermissionError as error:
        raise _not_ours(folder.path, error) from None
    except OSError as error:
        raise ConfigError("PATH", str(folder.path), f"cannot be read: {reason(error)}") from None
    for name in names:
        rank = _RANK.fullmatch(name)
        try:
            if name == FINGERPRINTS:
                _read_notes(folder)
            elif rank is not None:
                folder.ranks.append(RankFolder(folder.path / name, int(rank[1])))
            else:
                folder.left_aside.append(f"{name}: not one of kvtide's")
        except PermissionError as error:
            # Half of what is there would look like all of it.
            raise _not_ours(folder.path / name, error) from None
        except OSError as error:
            folder.left_aside.append(f"{name}: {reason(error)}")
    folder.ranks.sort(key=lambda one: one.rank)
    folder.left_aside += [line for rank in folder.ranks for line in rank.left_aside]


def _not_ours(path: Path, error: PermissionError) -> ConfigError:
    hint = f"cannot be read: {reason(error)}; run this as the user that runs the server"
    return ConfigError("PATH", str(path), hint)


def _what_would_do(path: Path) -> str:
    if _RANK.fullmatch(path.name):
        return f"the folder of one rank; give the whole: {path.parent}"
    return "no folder of a disk tier: nothing like rank-0 is in it; give what the setting disk names"


def _read_notes(folder: DiskFolder) -> None:
    there = os.open(folder.path / FINGERPRINTS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(there)):
            named = _NOTE.fullmatch(name)
            note = _read_note(there, name) if named is not None else None
            if named is not None and note is not None:
                folder.models[bytes.fromhex(named[1])] = note
            elif _NEW_NOTE.fullmatch(name) is None:
                folder.left_aside.append(f"{FINGERPRINTS}/{name}: not one of kvtide's")
    finally:
        os.close(there)


def _read_note(folder: int, name: str) -> ModelNote | None:
    """Read a file of ``fingerprints``; None when it is not one."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            text = file.read(LONGEST_NOTE_BYTES + 1)
        said = json.loads(text) if len(text) <= LONGEST_NOTE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("model"), str):
        return None
    used = said.get("last_used_s")
    if not isinstance(used, int | float) or not 0 <= used < LAST_S:
        used = None
    return ModelNote(said["model"], used)
