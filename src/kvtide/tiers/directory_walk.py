"""What lies in a shared folder, and how old it is.

Knows names, sizes and times; opens no file. What has other names is not
seen, and no link is followed.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtide.tiers.directory_names import FOLDERS, RECORD, TEMPORARY

LEFT_OVER_S = 3600
"""So old an unfinished file is nobody's any more, and an empty folder of no use."""

UNIT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """One file that counts.

    Attributes:
        path: Of it.
        byte_count: What it takes, in whole units.
        used_s: When it was written or read last, seconds since the epoch.
        is_record: Or one that is being written, or was.
    """

    path: str
    byte_count: int
    used_s: float
    is_record: bool


def age_class(age_s: float) -> int:
    """Put ages together that differ by less than four in a hundred: seconds, rounded down.

    What is from the future by more than clocks may differ is the oldest of all, or it would stay for ever.
    """
    if age_s < -LEFT_OVER_S:
        return 1 << 62
    seconds = max(0, int(age_s))
    digits = max(0, seconds.bit_length() - 6)
    return seconds >> digits << digits


def walk(folder: str, now_s: float, pace: Callable[[], None], level: int = 0) -> Iterator[Found]:
    """List what counts; no link is followed, and what has other names is left alone.

    Args:
        folder: The one that is shared, or one within it.
        now_s: Seconds since the epoch; folders that have been empty for long before that are removed.
        pace: Called for every entry.
        level: Of ``folder``.

    Raises:
        OSError: A folder cannot be read.
    """
    is_empty = True
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        return
    with entries:
        for entry in entries:
            is_empty = False
            pace()
            if _leads_on(entry, level):
                yield from walk(entry.path, now_s, pace, level + 1)
            elif (found := _found(entry)) is not None:
                yield found
    if is_empty and level > 1:
        with contextlib.suppress(OSError):
            if now_s - os.lstat(folder).st_mtime > LEFT_OVER_S:
                os.rmdir(folder)


def _leads_on(entry: "os.DirEntry[str]", level: int) -> bool:
    """Whether it is a folder, called as those of this level are."""
    return (
        level < len(FOLDERS)
        and FOLDERS[level].fullmatch(entry.name) is not None
        and entry.is_dir(follow_symlinks=False)
    )


def _found(entry: "os.DirEntry[str]") -> Found | None:
    is_record = RECORD.fullmatch(entry.name) is not None
    if not is_record and not TEMPORARY.fullmatch(entry.name):
        return None
    try:
        if not entry.is_file(follow_symlinks=False):
            return None
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    byte_count = -(-status.st_size // UNIT_BYTES) * UNIT_BYTES
    return Found(entry.path, byte_count, max(status.st_atime, status.st_mtime), is_record)
