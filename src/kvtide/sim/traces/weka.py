"""Sessions of coding agents that WEKA has published: https://github.com/callanjfox/kv-cache-tester, traces/.

A session a file, with the sessions of its subagents inside it; times count from its beginning, and block
numbers mean something in this session alone. When it began is not said, so it is invented: uniformly over a
span of time, from a seed. Of the sessions of a folder those are in memory that are under way.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import from_json

from kvtide.errors import ConfigError
from kvtide.sim.traces.block_names import NumberedNames, twice
from kvtide.sim.traces.faults import Faults, worded
from kvtide.sim.traces.numbered import (
    BlockTokens,
    Found,
    LastBlock,
    Numbers,
    Record,
    TokenCount,
    full_blocks,
)
from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.packed import read_whole
from kvtide.sim.traces.request import TraceRequest

Since = Annotated[float, Field(ge=0, le=1e9)]
"""Seconds since a session or a subagent began."""

DEEPEST = 16
"""Subagents within subagents."""


class SessionRecord(Record):
    """A file, its requests unread."""

    id: str = ""
    block_size: BlockTokens
    requests: list[Any]


class CallRecord(Record):
    """A request."""

    t: Since
    prompt_tokens: TokenCount = Field(alias="in")
    output_tokens: TokenCount = Field(alias="out", default=0)
    hash_ids: Numbers


class SubagentRecord(Record):
    """A subagent, its requests unread."""

    t: Since
    agent_id: str = ""
    requests: list[Any]


@dataclass(slots=True)
class Call:
    """A request of a session that is under way, as small as it can be."""

    time_s: float
    where: str
    session: str
    numbers: "array[int]"
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Session:
    """A session that is under way, the next request last."""

    block_tokens: int
    names: NumberedNames
    faults: Faults
    calls: list[Call]


def read_sessions(paths: Sequence[Path], options: TraceOptions, faults: Sequence[Faults]) -> Iterator[Found]:
    """Merge sessions by when their requests came.

    Args:
        paths: One file a session. Which session begins when depends on their order and their number.
        options: See there.
        faults: Of each file; a bad request is left out, a bad file is a session without requests.

    Yields:
        Requests in order of arrival, which counts from the beginning of the span.
    """
    draw = random.Random(options.seed)
    begins_s = [draw.uniform(0.0, options.session_span_s) for _ in paths]
    under_way: list[tuple[float, int, Session]] = []
    for index in sorted(range(len(paths)), key=begins_s.__getitem__):
        # What has begun earlier and comes before the first request of this session.
        yield from _until(begins_s[index], under_way)
        session = _open(paths[index], index, begins_s[index], options, faults[index])
        if session is not None and session.calls:
            heappush(under_way, (session.calls[-1].time_s, index, session))
    yield from _until(float("inf"), under_way)


def _until(time_s: float, under_way: list[tuple[float, int, Session]]) -> Iterator[Found]:
    while under_way and under_way[0][0] < time_s:
        _, index, session = heappop(under_way)
        call = session.calls.pop()
        hashes = session.names.of(call.numbers)
        if session.calls:
            heappush(under_way, (session.calls[-1].time_s, index, session))
        if (again := twice(hashes)) is not None:
            session.faults.note(call.where, f"hash_ids: {call.numbers[again]} twice in one prompt")
            continue
        yield (
            call.where,
            TraceRequest(
                call.time_s,
                hashes,
                session.block_tokens,
                call.prompt_tokens,
                call.output_tokens,
                call.session,
            ),
        )


def _open(path: Path, index: int, begin_s: float, options: TraceOptions, faults: Faults) -> Session | None:
    """Read a session; None when there is none in the file."""
    text = read_whole(path, faults)
    if text is None:
        return None
    try:
        record = SessionRecord.model_validate(from_json(text))
    except ValidationError as error:
        faults.note("", worded(error))
        return None
    except (ValueError, RecursionError) as error:
        faults.note("", f"no JSON: {error}")
        return None
    step = options.step(record.block_size)
    calls: list[Call] = []
    reading = _Reading(record.block_size, step, faults, calls)
    reading.take(record.requests, begin_s, record.id or path.name.partition(".")[0], "requests", 0)
    calls.sort(key=lambda call: call.time_s)
    calls.reverse()
    return Session(record.block_size * step, NumberedNames(index), faults, calls)


@dataclass(slots=True)
class _Reading:
    """The requests of one session, wherever in it they are."""

    block_tokens: int
    step: int
    faults: Faults
    calls: list[Call]

    def take(self, records: list[Any], begin_s: float, session: str, place: str, depth: int) -> None:
        for number, record in enumerate(records):
            where = f"{place}[{number}]"
            try:
                if isinstance(record, dict) and "requests" in record:
                    self._take_subagent(record, begin_s, session, where, depth)
                else:
                    self.calls.append(self._call(record, begin_s, session, where))
            except ConfigError:
                raise
            except ValidationError as error:
                self.faults.note(where, worded(error))
            except ValueError as error:
                self.faults.note(where, str(error))

    def _take_subagent(
        self, record: dict[str, Any], begin_s: float, session: str, where: str, depth: int
    ) -> None:
        if depth == DEEPEST:
            raise ValueError(f"subagents within subagents, {DEEPEST} deep")
        one = SubagentRecord.model_validate(record)
        name = f"{session}/{one.agent_id or where}"
        self.take(one.requests, begin_s + one.t, name, f"{where}.requests", depth + 1)

    def _call(self, record: Any, begin_s: float, session: str, where: str) -> Call:
        one = CallRecord.model_validate(record)
        full = full_blocks(len(one.hash_ids), one.prompt_tokens, self.block_tokens, LastBlock.EITHER)
        numbers = array("Q", one.hash_ids[self.step - 1 : full : self.step])
        return Call(begin_s + one.t, where, session, numbers, one.prompt_tokens, one.output_tokens)
