"""What ranks found in a tier when it was opened, put back into the books a little at a time.

A record tells its parent and its place: prefixes are put together from records alone. Of a prompt of which
some chunk is missing, what lies behind that is of no use and is forgotten. Knows records by name; serving
goes on meanwhile, and what it has decided in between is left as it is.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtide.jobs import InventoryPiece
from kvtide.keys import ChunkRun, make_offload_key
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.lower import LowerTier

WORK_PER_STEP = 1000
"""What one step does at most, in microseconds or so: twice that on a busy core."""

TOLD, SORTED, PUT, PROMPT, FORGOTTEN = 0.7, 0.2, 1.0, 15.0, 0.5
"""What a record costs when it is told, sorted, put into the books and forgotten, and what a prompt does."""

BATCH = 64
"""Records that are handled between two looks at what a step has done."""

BUCKETS = 64
"""Into so many ages prefixes are sorted, so that what was used last leaves last."""


@dataclass(slots=True, eq=False)
class _Segment:
    """A part of a prompt that is its own, behind what it shares with another one.

    Attributes:
        above: What it branches off from.
        start: Its first chunk.
        names: Of its chunks.
    """

    above: "_Segment | None"
    start: int
    names: list[bytes]

    def prefix(self, length: int) -> list[bytes]:
        """List the names of a prompt's first ``length`` chunks."""
        parts, segment, stop = [], self, length
        while True:
            parts.append(segment.names[: stop - segment.start])
            if segment.above is None:
                break
            segment, stop = segment.above, segment.start
        return [name for part in reversed(parts) for name in part]


SHARDS = 256
"""A dictionary of a hundred thousand names stops a step for ten milliseconds when it grows; these do not."""


@dataclass(slots=True)
class _Found:
    """Names of one group that begin with one byte.

    Attributes:
        records: Chunk index, when it was written, and the parent's hash, one after another. As bytes, which
            the garbage collector passes over: a hundred thousand tuples would stop a step for long.
        partly: Ranks that have it, while some have not said.
        parents: Names that something extends.
        settled: What has been put into the books, and where it stands; None for what is of no use.
    """

    records: dict[bytes, bytes] = field(default_factory=dict)
    partly: dict[bytes, int] = field(default_factory=dict)
    parents: set[bytes] = field(default_factory=set)
    settled: dict[bytes, _Segment | None] = field(default_factory=dict)


class Warming:
    """One tier after its opening.

    Args:
        tier: Its books.
        groups: The KV cache groups.
        rank_count: Ranks that tell.

    Attributes:
        found_count: Chunks that were put into the books.
        is_done: Nothing more is expected.
    """

    def __init__(self, tier: LowerTier, groups: Sequence[CatalogGroup], rank_count: int) -> None:
        self._tier = tier
        self._groups = tuple(groups)
        self._rank_count = rank_count
        spines = [index for index, group in enumerate(groups) if group.stride == 1]
        # What needs all before a point is the least likely to have gaps.
        self._spine = min(spines, key=lambda index: groups[index].window is not None, default=None)
        self.found_count = 0
        self.begin(0)

    def begin(self, generation: int, expected: bool = True) -> None:
        """Begin anew.

        Args:
            generation: Of the catalog; pieces of another one mean nothing.
            expected: Whether anything will come.
        """
        self._generation = generation
        self._pieces: deque[InventoryPiece] = deque()
        # Of each group, by the first byte of a name.
        self._found = [tuple(_Found() for _ in range(SHARDS)) for _ in self._groups]
        self._segments: list[_Segment] = []
        self._oldest_s = self._newest_s = 0
        self._lasts = 0
        self._visit = 0
        self._work = self._all()
        self.is_done = not expected
        self._tier.note_decisions(expected)

    def take(self, piece: InventoryPiece) -> None:
        """Take in what one rank says; it is looked at in ``step``."""
        if piece.generation == self._generation and not self.is_done:
            self._pieces.append(piece)

    def step(self) -> bool:
        """Go on for a bounded while; True when something has changed for readers."""
        if self.is_done:
            return False
        before, left = self.found_count, float(WORK_PER_STEP)
        for cost in self._work:
            left -= cost
            if left <= 0 or not cost:
                break
        else:
            self.is_done = True
            self._tier.note_decisions(False)
        return self.found_count > before

    # -- inside ---------------------------------------------------------------------------------

    def _all(self) -> Iterator[float]:
        """Everything there is to do; yields what each bit of it has cost, 0 when there is nothing yet."""
        while self._lasts < self._rank_count or self._pieces:
            if self._pieces:
                yield from self._hear(self._pieces.popleft())
            else:
                yield 0.0
        if self._spine is not None:
            leaves: list[list[bytes]] = [[] for _ in range(BUCKETS)]
            yield from self._sort(self._spine, leaves)
            for of_one_age in leaves:
                for leaf in of_one_age:
                    yield from self._take_in(self._spine, leaf)
        yield from self._forget_the_rest()

    def _hear(self, piece: InventoryPiece) -> Iterator[float]:
        """Note what one rank says."""
        width, hashes, parents = piece.hash_bytes, piece.hashes, piece.parent_hashes
        groups = np.frombuffer(piece.group_index, dtype=np.uint16).tolist()
        indices, written, nothing = piece.chunk_index, piece.written_at_s, bytes(width)
        for at, group in enumerate(groups):
            if not at % BATCH:
                yield BATCH * TOLD
            if group >= len(self._found):
                continue
            name = hashes[at * width : (at + 1) * width]
            found, wanted = self._found[group][name[0]], piece.shard_counts[group]
            if name in found.records:
                continue  # more ranks can read it than have to
            if wanted > 1:
                said = found.partly.get(name, 0) + 1
                if said < wanted:
                    found.partly[name] = said
                    continue
                found.partly.pop(name, None)
            parent = parents[at * width : (at + 1) * width]
            found.records[name] = indices[4 * at : 4 * at + 4] + written[8 * at : 8 * at + 8] + parent
            if group == self._spine and parent != nothing:
                self._found[group][parent[0]].parents.add(parent)
        if written:
            times = np.frombuffer(written, dtype=np.uint64)
            self._oldest_s = min(self._oldest_s or int(times.min()), int(times.min()))
            self._newest_s = max(self._newest_s, int(times.max()))
        self._lasts += piece.last

    def _sort(self, spine: int, leaves: list[list[bytes]]) -> Iterator[float]:
        """Put what nothing extends into ``leaves``, by age."""
        span_s = max(1, self._newest_s - self._oldest_s)
        for found in self._found[spine]:
            for name, record in found.records.items():
                if name not in found.parents:
                    written_at_s = int.from_bytes(record[4:12], sys.byteorder)
                    leaves[(written_at_s - self._oldest_s) * (BUCKETS - 1) // span_s].append(name)
            yield SORTED * (1 + len(found.records))

    def _take_in(self, spine: int, leaf: bytes) -> Iterator[float]:
        """Put one prompt into the books, or have it forgotten."""
        group = self._found[spine]
        own: list[bytes] = []
        name: bytes | None = leaf
        index = _place_of(group[leaf[0]].records[leaf])
        # A record that stands where it cannot is none; with that no chain of parents is endless.
        while name is not None and name not in group[name[0]].settled:
            record = group[name[0]].records.get(name)
            if record is None or _place_of(record) != index:
                break
            own.append(name)
            parent = record[12:]
            name, index = parent if any(parent) else None, index - 1
            if not len(own) % BATCH:
                yield BATCH * TOLD
        above, whole = None, name is None and index < 0
        if name is not None:
            above = group[name[0]].settled.get(name)
            whole = above is not None and _place_of(group[name[0]].records[name]) == index
        if whole:
            own.reverse()
            yield from self._put_all(spine, _Segment(above, index + 1, own))
        else:
            yield from self._forget(spine, own)

    def _put_all(self, spine: int, segment: _Segment) -> Iterator[float]:
        """Put what a prompt does not share with others before it into the books."""
        group, first = self._found[spine], segment.start
        self._segments.append(segment)
        names = segment.prefix(first + len(segment.names))
        self._visit -= 1
        yield PROMPT + len(names) / 256
        for start in range(first, len(names), 2 * BATCH):
            stop = min(start + 2 * BATCH, len(names))
            for name in names[start:stop]:
                group[name[0]].settled[name] = segment
            self._put(ChunkRun(names, spine, 1, start, stop))
            for other, shape in enumerate(self._groups):
                if other != spine:
                    self._put_beside(other, shape, names, start, stop)
            # Whatever is asked of a long prompt looks at all of it.
            yield PUT * (stop - start) * len(self._groups) + len(names) / 512

    def _put_beside(self, index: int, shape: CatalogGroup, names: list[bytes], start: int, stop: int) -> None:
        """Put what another group has along positions ``[start, stop)`` of a prompt into the books."""
        first, last = -1, stop // shape.stride
        for chunk in range(start // shape.stride, last + 1):
            there = False
            if chunk < last:
                name = names[(chunk + 1) * shape.stride - 1]
                found = self._found[index][name[0]]
                record = found.records.get(name)
                there = record is not None and _place_of(record) == chunk and name not in found.settled
            if there:
                found.settled[name] = None
                first = chunk if first < 0 else first
            elif first >= 0:
                self._put(ChunkRun(names, index, shape.stride, first, chunk))
                first = -1

    def _put(self, run: ChunkRun) -> None:
        self.found_count += self._tier.found(run, self._visit)

    def _forget(self, index: int, names: Sequence[bytes]) -> Iterator[float]:
        """Have forgotten what is part of no whole prompt."""
        group = self._found[index]
        for at in range(0, len(names), BATCH):
            part = names[at : at + BATCH]
            for name in part:
                group[name[0]].settled[name] = None
            self._tier.forget_found([make_offload_key(name, index) for name in part])
            yield FORGOTTEN * BATCH
        yield FORGOTTEN

    def _forget_the_rest(self) -> Iterator[float]:
        """Have forgotten what is of no use, or what not every rank has; and let go of all, bit by bit."""
        for index, group in enumerate(self._found):
            for found in group:
                rest = [name for name in (*found.records, *found.partly) if name not in found.settled]
                yield from self._forget(index, rest)
                yield SORTED * (1 + len(found.records))
                found.records, found.partly, found.parents, found.settled = {}, {}, set(), {}
        while self._segments:
            names = self._segments[-1].names
            count = min(BATCH, len(names))
            del names[-BATCH:]
            if not names:
                self._segments.pop()
            yield SORTED * (1 + count)


def _place_of(record: bytes) -> int:
    """Where a chunk stands in its prompt, as its record says."""
    return int.from_bytes(record[:4], sys.byteorder)
