"""The compiled loop that copies pieces, without the interpreter lock.

One call copies many pieces: a Python loop would have to win the interpreter lock back from the engine
after each. Compiled by numba at start; torch is not called here, its thread pools stall when entered
from a second thread.
"""

import contextlib
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import ffi
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

SEGMENT_BYTES = 1 << 20
"""A copy looks at its cancel flag at least this often."""


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(_typing: Any, _target: Any, _source: Any, _size: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        target = builder.inttoptr(args[0], byte_pointer)
        source = builder.inttoptr(args[1], byte_pointer)
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return args[2]

    return types.int64(types.int64, types.int64, types.int64), codegen


def _copy_pieces(
    source: np.ndarray,
    target: np.ndarray,
    size: np.ndarray,
    position: np.ndarray,
    budget_bytes: int,
    cancelled: np.ndarray,
) -> int:
    """Copy on from ``position`` for about ``budget_bytes``.

    Args:
        source: ``int64[pieces]``, addresses.
        target: ``int64[pieces]``, addresses.
        size: ``int64[pieces]``, bytes.
        position: ``int64[2]``, piece and byte within it; moved on.
        budget_bytes: When to return although there is more.
        cancelled: ``uint8[1]``, nonzero ends the copy within a segment.

    Returns:
        Bytes copied.
    """
    piece, at, done = position[0], position[1], 0
    while piece < len(size) and done < budget_bytes and cancelled[0] == 0:
        count = min(size[piece] - at, SEGMENT_BYTES)
        _memcpy(target[piece] + at, source[piece] + at, count)
        done += count
        at += count
        if at == size[piece]:
            piece += 1
            at = 0
    position[0] = piece
    position[1] = at
    return done


_SIGNATURE = types.int64(
    types.int64[::1], types.int64[::1], types.int64[::1], types.int64[::1], types.int64, types.uint8[::1]
)


def _be_quiet_when_looked_at() -> None:
    # vLLM 0.32 looks at every name of every loaded module when a CPU worker starts
    # (triton_utils/dispatcher.py). llvmlite's library answers any name, "__dict__" too, with a function of
    # that name, and the start ends there: the second engine of a process that has loaded us.
    with contextlib.suppress(AttributeError):  # another llvmlite keeps its functions elsewhere
        ffi.lib._fntab.setdefault("__dict__", {})


def _compiled() -> Any:
    try:
        return njit(_SIGNATURE, nogil=True, cache=True)(_copy_pieces)
    except RuntimeError:  # numba found no place it may write its cache to
        return njit(_SIGNATURE, nogil=True)(_copy_pieces)


copy_pieces = _compiled()
_be_quiet_when_looked_at()
