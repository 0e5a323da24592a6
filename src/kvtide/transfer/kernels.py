"""The compiled loop that copies pieces, without the interpreter lock.

One call copies all it can get of a copy: a Python loop would have to win the interpreter lock back from the
engine after each piece. Several threads may be inside with the same copy: each takes the next segment, by
one atomic addition, until none is left. Compiled by numba at start; torch is not called here, its thread
pools stall when entered from a second thread.

Bytes go past the cache (non-temporal stores): a plain store first fetches the line it overwrites, half as
much traffic again, and pushes out of the cache what the model keeps there. A piece is copied at several
places at once, a few lines of each in turn: memory has banks that work side by side, and the processor's own
prefetcher follows several streams, none of them beyond its page. And the next piece is announced before this
one is copied: the prefetcher begins anew with each, and where pages lie in memory has to be looked up.
"""

import contextlib
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import ffi
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

SEGMENT_BYTES = 1 << 20
"""What a thread takes at once, and how often at least it looks at the flag that stops it."""

LINE_BYTES = 64
STREAMED_BYTES = 512
"""Shorter pieces are copied as they are."""

FIRST_BYTES = 1024
"""Of the next piece, asked for before this one is copied."""

PAGE_BYTES = 4096
ANNOUNCED_BYTES = 4 * PAGE_BYTES
"""Of the next piece; further pages are looked up while it is copied."""

MOST_STREAMS, LEAST_STREAMS = 8, 3
"""Pages of a piece that are copied at once. With 8, pieces of 1 MiB take four fifths of the time of 1."""

TURN_BYTES = 4 * LINE_BYTES
"""Of each stream, before the next one has its turn."""

STREAMS_BYTES = 2 * PAGE_BYTES
"""Less than this is copied line after line."""

_ADDRESS = ir.IntType(8).as_pointer()
_WORD = ir.IntType(64)
_LINE = ir.VectorType(_WORD, LINE_BYTES // 8)


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(_typing: Any, _target: Any, _source: Any, _size: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(one, _ADDRESS) for one in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return args[2]

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(_typing: Any, _target: Any, _source: Any) -> Any:
    """Copy one line past the cache; the target has to be aligned to it."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(one, _LINE.as_pointer()) for one in args)
        line = builder.load(source)
        line.align = 1
        stored = builder.store(line, target)
        stored.align = LINE_BYTES
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return args[0]

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _ask_for(_typing: Any, _source: Any) -> Any:
    """Begin to fetch a line that is going to be read."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS, number, number, number])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        # For reading, to be kept in all caches, data.
        builder.call(fetch, [builder.inttoptr(args[0], _ADDRESS), number(0), number(3), number(1)])
        return args[0]

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _add(_typing: Any, _address: Any, _amount: Any) -> Any:
    """Add to a word as one step; returns what was there before."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _settle(_typing: Any) -> Any:
    """Let no store of before be seen after a store of later: those past the cache keep no order."""

    def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        builder.fence("seq_cst")
        return _WORD(0)

    return types.int64(), codegen


@njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _announce(target: int, source: int, size: int) -> None:
    for at in range(0, min(size, FIRST_BYTES), LINE_BYTES):
        _ask_for(source + at)
    for at in range(0, min(size, ANNOUNCED_BYTES), PAGE_BYTES):
        _ask_for(source + at)
        _ask_for(target + at)


@njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _copy_piece(target: int, source: int, size: int) -> None:
    if size < STREAMED_BYTES:
        _memcpy(target, source, size)
        return
    at = -target % LINE_BYTES
    if at:
        _memcpy(target, source, at)
    while size - at >= STREAMS_BYTES:
        streams = min(MOST_STREAMS, max(LEAST_STREAMS, (size - at) // PAGE_BYTES))
        each = min(PAGE_BYTES, (size - at) // streams // TURN_BYTES * TURN_BYTES)
        for turn in range(at, at + each, TURN_BYTES):
            for begin in range(turn, turn + streams * each, each):
                for line in range(begin, begin + TURN_BYTES, LINE_BYTES):
                    _stream_line(target + line, source + line)
        at += streams * each
    while at + LINE_BYTES <= size:
        _stream_line(target + at, source + at)
        at += LINE_BYTES
    if at < size:
        _memcpy(target + at, source + at, size - at)


def _copy_share(
    source: np.ndarray, target: np.ndarray, end: np.ndarray, claimed: np.ndarray, stop: np.ndarray
) -> int:
    """Copy segments until none is left, or ``stop`` is set.

    Args:
        source: ``int64[pieces]``, addresses.
        target: ``int64[pieces]``, addresses.
        end: ``int64[pieces]``, bytes up to the end of each piece, from that of the first on.
        claimed: ``int64[1]``, bytes that somebody has taken, from the first on; moved on, at last beyond
            the end.
        stop: ``uint8[1]``; once it is not zero, the caller returns within a segment.

    Returns:
        Bytes copied by this call. What was taken by it is copied when it returns.
    """
    total = end[-1] if len(end) else 0
    done = 0
    while stop[0] == 0:
        at = _add(claimed.ctypes.data, SEGMENT_BYTES)
        if at >= total:
            break
        until = min(at + SEGMENT_BYTES, total)
        done += until - at
        piece = np.searchsorted(end, at, side="right")
        while at < until:
            begin = end[piece - 1] if piece else 0
            count = min(end[piece], until) - at
            if end[piece] < until:
                _announce(target[piece + 1], source[piece + 1], end[piece + 1] - end[piece])
            _copy_piece(target[piece] + at - begin, source[piece] + at - begin, count)
            at += count
            piece += 1
    _settle()
    return done


_SIGNATURE = types.int64(
    types.int64[::1], types.int64[::1], types.int64[::1], types.int64[::1], types.uint8[::1]
)


def _be_quiet_when_looked_at() -> None:
    # vLLM 0.32 looks at every name of every loaded module when a CPU worker starts
    # (triton_utils/dispatcher.py). llvmlite's library answers any name, "__dict__" too, with a function of
    # that name, and the start ends there: the second engine of a process that has loaded us.
    with contextlib.suppress(AttributeError):  # another llvmlite keeps its functions elsewhere
        ffi.lib._fntab.setdefault("__dict__", {})


def _compiled() -> Any:
    try:
        return njit(_SIGNATURE, nogil=True, cache=True)(_copy_share)
    except RuntimeError:  # numba found no place it may write its cache to
        return njit(_SIGNATURE, nogil=True)(_copy_share)


copy_share = _compiled()
_be_quiet_when_looked_at()
