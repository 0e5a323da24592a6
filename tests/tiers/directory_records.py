"""Folders as a directory tier leaves them, for tests of what is counted and removed there."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvtide.testing.tiers import IDENTITY
from kvtide.tiers.base import TierPlace
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.directory_walk import UNIT_BYTES

FINGERPRINTS = ("ab" * 32, "cd" * 32, "ef" * 32 + "-0123456789abcdef")


def folder_in_memory() -> Iterator[Path]:
    """Removed at once: there are thousands of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def put(folder: Path, number: int, age_s: float, byte_count: int = UNIT_BYTES, fingerprint: int = 0) -> Path:
    """Lay down a file that counts as a record: what is in it is nobody's business here."""
    digits = number.to_bytes(4, "big").hex()
    path = folder / f"kv1/{FINGERPRINTS[fingerprint]}/g0/{digits[4:6]}/{digits[6:8]}/{digits * 8}.0of1"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    os.truncate(path, byte_count)
    age(path, age_s)
    return path


def age(path: Path, age_s: float) -> None:
    used_ns = int((time.time() - age_s) * 1e9)
    os.utime(path, ns=(used_ns, used_ns))


def tier_of(folder: Path, limit_bytes: int, rank: int = 0) -> DirectoryTier:
    tier = DirectoryTier.build(TierPlace(IDENTITY, rank, limit_bytes, {"path": str(folder)}))
    tier.open()
    return tier
