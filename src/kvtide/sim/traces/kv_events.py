"""Requests out of vLLM's KV events, as JSON lines: ``[time, [event, ...], rank]``.

An event says which blocks were stored behind which other one. What a request found in the cache is not told
(unless vLLM reports it, ``kv_cache_report_mode: full``): whatever is stored behind a known prefix stands for
a request with that prefix, and one that found everything leaves no trace. Only the device's own blocks count,
of one group of layers that looks back to the beginning.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import FailFast, Field, TypeAdapter, ValidationError

from kvtide.sim.traces.faults import Faults, line_of, worded
from kvtide.sim.traces.numbered import BlockTokens, Found, Record, Time
from kvtide.sim.traces.options import TraceOptions
from kvtide.sim.traces.packed import read_lines
from kvtide.sim.traces.request import TraceRequest

KNOWN = 1 << 21
"""Blocks whose parents are remembered; forgotten is what was used longest ago, leaves first."""

WINDOWED = ("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba")

FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
"""Of an event that is written as a list, as older servers do."""

EventHash = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | Annotated[str, Field(max_length=256)]


class StoredEvent(Record):
    """Blocks were stored."""

    type: Literal["BlockStored"]
    block_hashes: Annotated[list[EventHash], FailFast()]
    parent_block_hash: EventHash | None = None
    block_size: BlockTokens
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Batch(Record):
    """A line."""

    ts: Time
    events: list[Any]


_LISTED = TypeAdapter(list[Any])


@dataclass(slots=True, eq=False)
class _Growing:
    """A request that may store more."""

    where: str
    arrival_s: float
    last_s: float
    chain: list[bytes]
    prompt_blocks: int


def read_kv_events(path: Path, space: int, options: TraceOptions, faults: Faults) -> Iterator[Found]:
    """Read a file of this format; hashes are of contents and need no ``space``."""
    reading = _Reading(options, faults)
    for number, line, _ in read_lines(path, faults):
        where = line_of(number)
        try:
            batch = _batch(line)
        except ValidationError as error:
            faults.note(where, worded(error))
            continue
        if batch.ts < reading.now_s:
            faults.note(where, f"ts: {batch.ts} comes after {reading.now_s}, times must not decrease")
            continue
        reading.now_s = batch.ts
        yield from reading.ended()
        for event in batch.events:
            try:
                reading.take(where, event)
            except ValidationError as error:
                faults.note(where, worded(error))
            except _BadEvent as error:
                faults.note(where, str(error))
    reading.now_s = float("inf")
    yield from reading.ended()


class _BadEvent(Exception):
    pass


class _Reading:
    """What is known of the blocks so far, and the requests that still grow."""

    def __init__(self, options: TraceOptions, faults: Faults) -> None:
        self._options = options
        self._faults = faults
        self._parents: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._growing: deque[_Growing] = deque()  # in order of arrival
        self._by_end: dict[bytes, _Growing] = {}
        self._group: int | None = None
        self._block_tokens = 0
        self.now_s = float("-inf")

    def take(self, where: str, event: Any) -> None:
        """Take in an event.

        Raises:
            _BadEvent: It does not fit what came before.
            ValidationError: It is none.
        """
        if isinstance(event, list):
            event = dict(zip(FIELDS, event, strict=False))
        kind = event.get("type") if isinstance(event, dict) else None
        if kind in ("BlockRemoved", "AllBlocksCleared"):
            return  # a hash stands for its prefix whether somebody has it or not
        one = StoredEvent.model_validate(event)
        if one.medium not in (None, "GPU") or one.kv_cache_spec_kind in WINDOWED or not one.block_hashes:
            return
        if not self._block_tokens:
            self._block_tokens, self._group = one.block_size, one.group_idx
            self._options.step(self._block_tokens)
        if one.group_idx != self._group or one.block_size != self._block_tokens:
            return  # another group of layers, or a part of a block
        parent = None if one.parent_block_hash is None else _name(one.parent_block_hash)
        self._grow(where, parent, [_name(block) for block in one.block_hashes])

    def ended(self) -> Iterator[Found]:
        """Hand out requests that have ended, in order of arrival."""
        while self._growing and self.now_s - self._growing[0].last_s > self._options.pause_s:
            one = self._growing.popleft()
            if self._by_end.get(one.chain[-1]) is one:
                del self._by_end[one.chain[-1]]
            self._use(reversed(one.chain))
            yield one.where, self._request(one)

    def _grow(self, where: str, parent: bytes | None, blocks: list[bytes]) -> None:
        one = None if parent is None else self._by_end.get(parent)
        if one is None or self.now_s - one.last_s > self._options.pause_s:
            chain = [*self._path(parent), *blocks]
            self._learn(parent, blocks)
            one = _Growing(where, self.now_s, self.now_s, chain, len(chain))
            self._growing.append(one)
        else:
            self._learn(parent, blocks)
            del self._by_end[one.chain[-1]]
            one.chain += blocks
            one.last_s = self.now_s
            if len(blocks) > 1:
                # Several at once are computed, not generated; so was all before them.
                one.prompt_blocks = len(one.chain)
        self._by_end[blocks[-1]] = one

    def _learn(self, parent: bytes | None, blocks: list[bytes]) -> None:
        for block in blocks:
            if self._parents.setdefault(block, parent) != parent:
                raise _BadEvent("block_hashes: a block was behind another one before")
            parent = block
        while len(self._parents) > KNOWN:
            self._parents.popitem(last=False)

    def _path(self, last: bytes | None) -> list[bytes]:
        """The blocks from the beginning to one of them, which are used by that."""
        path: list[bytes] = []
        while last is not None:
            if last not in self._parents:
                raise _BadEvent(
                    "parent_block_hash: nobody has stored it, or its beginning: was a message lost?"
                )
            if len(path) > KNOWN:
                raise _BadEvent("parent_block_hash: it comes before itself")
            path.append(last)
            last = self._parents[last]
        self._use(path)
        path.reverse()
        return path

    def _use(self, blocks: Iterable[bytes]) -> None:
        """Take note that blocks were used, the deepest first: so it is forgotten first."""
        for block in blocks:
            if block in self._parents:
                self._parents.move_to_end(block)

    def _request(self, one: _Growing) -> TraceRequest:
        step = self._options.step(self._block_tokens)
        prompt = one.prompt_blocks // step
        names = one.chain[step - 1 :: step]
        return TraceRequest(
            one.arrival_s,
            names[:prompt],
            self._block_tokens * step,
            one.prompt_blocks * self._block_tokens,
            (len(one.chain) - one.prompt_blocks) * self._block_tokens,
            generated_hashes=names[prompt:],
        )


def _batch(line: bytes) -> Batch:
    if line.lstrip().startswith(b"["):
        listed = _LISTED.validate_json(line)
        return Batch.model_validate(dict(zip(("ts", "events"), listed, strict=False)))
    return Batch.model_validate_json(line)


def _name(block: int | str) -> bytes:
    return xxhash.xxh3_128_digest(repr(block).encode())
