"""A trace, whatever wrote it: files in, requests in order of arrival out.

Knows which files are one trace, where its time begins and that it does not run backwards. What a record looks
like is the readers' business.
"""

import heapq
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args

from kvtide.errors import ConfigError, TraceError
from kvtide.sim.traces.faults import Faults, OnError
from kvtide.sim.traces.formats import FORMATS, READERS, RECORDING, SESSIONS, format_of
from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.recording import began_s
from kvtide.sim.traces.request import TraceRequest
from kvtide.sim.traces.weka import read_sessions

SUFFIXES = (".json", ".jsonl", ".ndjson")
PACKED_SUFFIXES = ("", ".gz", ".zst")

AnyPath = str | os.PathLike[str]


def read_trace(
    paths: AnyPath | Sequence[AnyPath],
    format: str | None = None,
    on_error: OnError = "stop",
    options: TraceOptions | None = None,
) -> "Trace":
    """Open a trace.

    Args:
        paths: A file, a folder (every ``.json`` and ``.jsonl`` in it, packed or not) or several of them.
            Several files are traces of servers beside each other: each begins at 0, kvtide's own recordings
            when they began; numbers of blocks mean something in their own file; all this unless they are said
            to be ``continued``. Sessions of WEKA make one trace together.
        format: One of ``FORMATS``; None to tell by how the first file begins.
        on_error: What becomes of bad records: ``stop`` raises the first, ``skip`` counts them.
        options: What else there is to say.

    Returns:
        The trace, to go through as often as wanted. Files are opened when it is gone through.

    Raises:
        ConfigError: No such format, no such way with bad records.
        TraceError: A file is not there, or none of a known format.
    """
    if on_error not in get_args(OnError):
        raise ConfigError("on_error", on_error, "give stop or skip")
    files = _files([paths] if isinstance(paths, str | os.PathLike) else paths)
    if format is None:
        format = format_of(files[0])
    elif format not in FORMATS:
        raise ConfigError("format", format, f"known formats: {', '.join(FORMATS)}")
    return Trace(files, format, on_error, options or TraceOptions())


class Trace:
    """Requests in order of arrival; going through them reads the files anew.

    Args:
        files: That it is in.
        format: Of all of them.
        on_error: See ``read_trace``.
        options: See there.

    Attributes:
        files: That it is in.
        format: Of all of them.
        faults: Per file, what was wrong with it the last time it was gone through.
    """

    def __init__(self, files: Sequence[Path], format: str, on_error: OnError, options: TraceOptions) -> None:
        self.files = tuple(files)
        self.format = format
        self.faults: tuple[Faults, ...] = ()
        self._on_error = on_error
        self._options = options

    @property
    def skipped_count(self) -> int:
        """Bad records that were left out the last time the trace was gone through."""
        return sum(faults.count for faults in self.faults)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Go through the requests.

        Raises:
            TraceError: A file cannot be read; or a record, where reading is to stop.
            ConfigError: An option does not fit the trace.
        """
        self.faults = tuple(Faults(path, self._on_error) for path in self.files)
        if self.format == SESSIONS:
            # In order already, and counted from the beginning of the span that was asked for.
            return (request for _, request in read_sessions(self.files, self._options, self.faults))
        if self._options.continued:
            return _in_order(chain.from_iterable(self._found(faults, 0) for faults in self.faults), None)
        several = [
            _in_order(self._found(faults, space), shift_s)
            for space, (faults, shift_s) in enumerate(zip(self.faults, self._shifts_s(), strict=True))
        ]
        if len(several) == 1:
            return several[0]
        return heapq.merge(*several, key=lambda request: request.arrival_s)

    def _found(self, faults: Faults, space: int) -> Iterator[tuple[Faults, str, TraceRequest]]:
        for where, request in READERS[self.format](faults.path, space, self._options, faults):
            yield faults, where, request

    def _shifts_s(self) -> Sequence[float | None]:
        """Say when each file begins; None for each at its first request."""
        if self.format != RECORDING:
            return [None] * len(self.files)
        begins_s = [began_s(path) for path in self.files]
        first_s = min((begin_s for begin_s in begins_s if begin_s is not None), default=0.0)
        return [None if begin_s is None else begin_s - first_s for begin_s in begins_s]


def _in_order(
    found: Iterator[tuple[Faults, str, TraceRequest]], shift_s: float | None
) -> Iterator[TraceRequest]:
    """Hand on requests, with the first one at 0 where nothing else is said, and none before the last one."""
    last_s = float("-inf")
    for faults, where, request in found:
        if request.arrival_s < last_s:
            fault = f"came at {request.arrival_s:.3f} s, after one of {last_s:.3f} s: times must not decrease"
            faults.note(where, fault)
            continue
        last_s = request.arrival_s
        if shift_s is None:
            shift_s = -last_s
        yield replace(request, arrival_s=last_s + shift_s) if shift_s else request


def _files(paths: Sequence[AnyPath]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.is_file() and _is_named_like_one(one.name))
            if not inside:
                raise TraceError(str(path), "", "no .json or .jsonl file in this folder, packed or not")
            files += inside
        else:
            files.append(path)
    if not files:
        raise ConfigError("paths", list(paths), "name a file or a folder")
    return files


def _is_named_like_one(name: str) -> bool:
    return any(name.endswith(suffix + packed) for suffix in SUFFIXES for packed in PACKED_SUFFIXES)
