"""A directory tier, and what is said to it, for tests of one."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.records import RecordIdentity


def place_of(
    folder: Path, identity: RecordIdentity = IDENTITY, limit_bytes: int = 0, rank: int = 0, **more: Any
) -> TierPlace:
    return TierPlace(identity, rank, limit_bytes, {"path": str(folder)}, instance=os.urandom(4).hex(), **more)


def opened(folder: Path, *args: Any, **more: Any) -> DirectoryTier:
    tier = DirectoryTier.build(place_of(folder, *args, **more))
    tier.open()
    return tier


def path_of(tier: DirectoryTier, number: int) -> Path:
    return Path(tier._path_of(name_of(number).key))


def write(tier: DirectoryTier, number: int, payload: bytes | None = None) -> Written:
    return tier.write(name_of(number), memoryview(payload or payload_of(number)), DEADLINE_S)


def read(tier: DirectoryTier, number: int) -> bytes | None:
    payload = bytearray(PAYLOAD_BYTES)
    found = tier.read_into(name_of(number).key, memoryview(payload), DEADLINE_S)
    return bytes(payload) if found else None


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("kvtide.")]


def tier_in(folder: Path) -> Iterator[DirectoryTier]:
    tier = opened(folder / "tier")
    yield tier
    tier.close()
