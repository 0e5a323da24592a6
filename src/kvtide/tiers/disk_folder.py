"""The folder of a private disk: whose it is, and for whom the records in it were written.

Knows folders, locks and the names of fingerprints; does not know records.
"""

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import ConfigError, TierUnavailableError
from kvtide.tiers.fingerprint import Fingerprint

LOCK_NAME = "lock"
SESSION_BYTES = 16

LOCK_ATTEMPTS = 5
"""Another rank that asks whether there is a lock has it for a moment (``session_of``)."""


def folder_of_rank(folder: Path, rank: int) -> Path:
    """Where a rank keeps its records."""
    return folder / f"rank-{rank}"


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """The file system that a folder is or would be on.

    Attributes:
        folder: As given.
        free_bytes: What is free there, for whoever asks.
        total_bytes: Its size.
    """

    folder: str
    free_bytes: int
    total_bytes: int


def room_at(folder: Path) -> DiskRoom:
    """Look at where a folder is or would be made; nothing is made.

    Raises:
        ConfigError: It could not be made or written to.
    """
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError("disk", str(folder), f"cannot be used: {there} is no folder that may be written to")
    status = os.statvfs(there)
    return DiskRoom(str(folder), status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)


class FolderLock:
    """Has a rank's folder for as long as it is not released.

    Args:
        folder: Of the instance; made with mode 0700 when it is not there.
        rank: Of the worker.

    Attributes:
        session: ``bytes[SESSION_BYTES]``: another one each time, for others to tell this run by.

    Raises:
        ConfigError: Another instance has it, or it cannot be made.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        own = folder_of_rank(folder, rank)
        try:
            for path in (folder, own):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(own / LOCK_NAME, flags, 0o600)
        except OSError as error:
            raise ConfigError("disk", str(folder), f"cannot be used: {error.strerror}") from None
        try:
            lock_file(self._descriptor)
            self.session = os.urandom(SESSION_BYTES)
            os.pwrite(self._descriptor, self.session, 0)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError("disk", str(folder), _refusal(error)) from None

    def release(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)


def session_of(folder: Path, rank: int) -> bytes:
    """Tell which run has a rank's folder now: ``bytes[SESSION_BYTES]``.

    Raises:
        TierUnavailableError: None has.
    """
    path = folder_of_rank(folder, rank) / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TierUnavailableError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(descriptor, SESSION_BYTES, 0)
    finally:
        os.close(descriptor)
    raise TierUnavailableError(f"{path}: no rank has this folder yet")


def lock_file(descriptor: int) -> None:
    """Lock a file; whoever only asks whether it is locked has it for an instant.

    Raises:
        BlockingIOError: Another has it.
    """
    for left in reversed(range(LOCK_ATTEMPTS)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.01)
        else:
            return


def _refusal(error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return "another instance uses this folder; give each a folder of its own"
    return f"cannot be used: {error.strerror}"


class KnownFingerprints:
    """Which fingerprints there are records of, by model and by what they were taken from.

    A file for each in ``fingerprints/``. What cannot be read or written is as if it were not there: nothing
    is served or refused by it.

    Args:
        folder: Of the instance.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "fingerprints"

    def all(self) -> list[tuple[float, str, Fingerprint]]:
        """List them, the one used last at the end: seconds since the epoch, name of the model, parts."""
        found = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                entry = json.loads(path.read_text())
                fingerprint = Fingerprint(str(entry["text"]))
                if fingerprint.digest.hex() == path.stem:
                    found.append((float(entry["last_used_s"]), str(entry["model"]), fingerprint))
        return sorted(found, key=lambda one: one[0])

    def changed(self, fingerprint: Fingerprint) -> list[str] | None:
        """Name the parts in which a fingerprint differs from the one used last.

        Returns:
            Names; none when it is known and its records may be there; None when there was no other.
        """
        known = [one for _, _, one in self.all()]
        if not known:
            return None
        return [] if fingerprint in known else fingerprint.changed(known[-1])

    def note(self, fingerprint: Fingerprint, model: str) -> None:
        """Remember that a fingerprint is used now."""
        entry = {"model": model, "text": fingerprint.text, "last_used_s": time.time()}
        path = self._folder / f"{fingerprint.digest.hex()}.json"
        new = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w") as file:
                json.dump(entry, file)
            new.replace(path)
