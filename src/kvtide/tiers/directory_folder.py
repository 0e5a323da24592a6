"""The folder itself: whether it is there, whether it is the one it was, and folders within it.

A shared file system comes and goes under its mount point. What is written when it is not there would fill the
host's own disk and be found by nobody; so the folder has a file that says that it is the one, and only its
last component is made. Knows folders; does not know records.
"""

import contextlib
import os
import stat
from pathlib import Path

from kvtide.errors import TierUnavailableError
from kvtide.tiers.directory_files import FULL, tier_error
from kvtide.tiers.directory_names import MARKER

SAID = b"kvtide keeps KV cache here; whoever may write here may change it\n"


class SharedFolder:
    """A folder on a file system that many hosts may share.

    Args:
        path: Absolute.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._device: int | None = None

    def open(self) -> list[str]:
        """Make it if need be, mode 0700, and try whether it can be written to.

        Returns:
            What somebody should know of it.

        Raises:
            TierUnavailableError: It cannot be used; says what would do.
        """
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            status = os.stat(self.path)
            if not stat.S_ISDIR(status.st_mode):
                raise TierUnavailableError(f"{self.path}: not a folder; tiers.options.path has to name one")
            self._make_marker()
        except FileNotFoundError:
            above = os.path.dirname(self.path)
            raise TierUnavailableError(
                f"{self.path}: there is no folder {above}; mount the file system, or make it"
            ) from None
        except OSError as error:
            raise tier_error(self.path, error) from None
        self._device = status.st_dev
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return [f"{self.path}: others than its owner may write there, and what they write may be served"]
        return []

    def make(self, folder: str) -> None:
        """Make a folder within this one, mode 0700.

        Raises:
            TierUnavailableError: This folder is not where it was.
            OSError: It cannot be made.
        """
        self._check_place()
        self._make(folder)

    def _make(self, folder: str) -> None:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            return
        except FileNotFoundError:
            above = os.path.dirname(folder)
            if above == self.path:
                raise
            self._make(above)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)

    def _check_place(self) -> None:
        """See that the file system is still mounted; one that was mounted anew is as good."""
        try:
            device = os.stat(self.path).st_dev
            if device == self._device:
                self._make_marker()  # somebody may have emptied the folder
            else:
                os.stat(f"{self.path}/{MARKER}")
                self._device = device
        except FileNotFoundError:
            raise TierUnavailableError(
                f"{self.path}: not the folder it was; is the file system mounted?"
            ) from None

    def _make_marker(self) -> None:
        """Put it there, unless there is no room for it: what is there can be read all the same."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(f"{self.path}/{MARKER}", flags, 0o600)
            try:
                os.write(descriptor, SAID)
            finally:
                os.close(descriptor)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in FULL:
                raise


def file_system_of(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Name the kind of file system on which ``path`` is, such as ``nfs4``; ``unknown`` if nothing says it."""
    with contextlib.suppress(OSError):
        number = os.stat(path).st_dev
        wanted = f"{os.major(number)}:{os.minor(number)}"
        for line in mounts.read_text(errors="replace").splitlines():
            fields = line.split()
            if len(fields) > 4 and fields[2] == wanted and "-" in fields[:-1]:
                return fields[fields.index("-") + 1]
    return "unknown"
