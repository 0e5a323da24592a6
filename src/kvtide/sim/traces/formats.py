"""Formats by name, and which one a file has, told from how it begins.

Knows what the first line of each format looks like. Does not know records.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvtide.errors import TraceError
from kvtide.sim.traces.bailian import read_bailian
from kvtide.sim.traces.faults import Faults
from kvtide.sim.traces.kv_events import read_kv_events
from kvtide.sim.traces.lmcache_agent import read_lmcache_agent
from kvtide.sim.traces.mooncake import read_mooncake
from kvtide.sim.traces.numbered import Found
from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.packed import UNPACKING_ERRORS, open_trace
from kvtide.sim.traces.prompts import read_prompts
from kvtide.sim.traces.recording import read_recording

Reader = Callable[[Path, int, TraceOptions, Faults], Iterator[Found]]

SESSIONS = "weka"
"""The format of which a file is a session, and a trace many files."""

RECORDING = "kvtide"

READERS: Mapping[str, Reader] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "lmcache-agent": read_lmcache_agent,
    "prompts": read_prompts,
    "kv-events": read_kv_events,
    RECORDING: read_recording,
}

FORMATS = (SESSIONS, *READERS)

HEAD_BYTES = 1 << 16

_KEY = re.compile(rb'(?<![\\\w])"(\w{1,40})"\s*:')
_LISTED_EVENT = re.compile(rb'"(BlockStored|BlockRemoved|AllBlocksCleared)"')

_SIGNS: tuple[tuple[str, frozenset[bytes]], ...] = (
    # The first whose keys are all there: those that say most come first.
    (RECORDING, frozenset({b"kvtide_trace"})),
    (SESSIONS, frozenset({b"requests", b"block_size"})),
    ("kv-events", frozenset({b"ts", b"events"})),
    ("bailian", frozenset({b"chat_id", b"hash_ids"})),
    ("lmcache-agent", frozenset({b"session_id", b"block_size", b"hash_ids"})),
    ("mooncake", frozenset({b"timestamp", b"input_length"})),
    ("prompts", frozenset({b"messages"})),
    ("prompts", frozenset({b"prompt"})),
    ("prompts", frozenset({b"text"})),
)


def format_of(path: Path) -> str:
    """Name the format of a file.

    Raises:
        TraceError: It cannot be opened, is empty, or has none that is known.
    """
    with open_trace(path) as stream:
        try:
            head = stream.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        except UNPACKING_ERRORS as error:
            raise TraceError(str(path), "", f"cannot be unpacked: {error}") from None
    if not head:
        raise TraceError(str(path), "", "is empty")
    if head.startswith(b"["):
        if _LISTED_EVENT.search(head) or re.match(rb"\[\s*[\d.e+-]+\s*,\s*\[", head):
            return "kv-events"
    elif head.startswith(b"{"):
        # A session's keys may stand on lines of their own, and its requests have a hash_ids each.
        line = head.partition(b"\n")[0]
        keys = set(_KEY.findall(head if line.count(b"}") == 0 else line))
        for name, signs in _SIGNS:
            if signs <= keys:
                return name
    raise TraceError(
        str(path), "", f"begins like no trace that is known: name its format, one of {', '.join(FORMATS)}"
    )
