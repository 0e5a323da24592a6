"""Holes in files: space given back to the file system without moving what lies behind it.

Linux's ``fallocate(2)``, which Python does not offer with its modes.
"""

import ctypes
import os

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punched(descriptor: int, offset: int, byte_count: int) -> bool:
    """Give a range of a file back: it reads as zeros from then on. False where that is not possible."""
    if _fallocate is None or os.name != "posix":
        return False
    done = _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, byte_count)
    return bool(done == 0)
