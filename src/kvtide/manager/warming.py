"""What ranks found in a tier when it was opened, put back into the books a little at a time.

A record tells its parent and its place: prefixes are put together from records alone. Of a prompt of which
some chunk is missing, what lies behind that is of no use and is forgotten. Knows records by name; serving
goes on meanwhile, and what is written in between is found in the books already.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtide.jobs import InventoryPiece
from kvtide.keys import ChunkRun, make_offload_key
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.lower import LowerTier

RECORDS_PER_STEP = 512
"""Records looked at in one step at most: about two milliseconds."""

BUCKETS = 64
"""Into so many ages prefixes are sorted, so that what was used last leaves last."""

IN_BOOKS = 1
FORGOTTEN = 2


@dataclass(slots=True)
class _Found:
    """Of one group, by hash: chunk index, when it was written, and the parent's hash, one after another.

    As bytes, which the garbage collector passes over: a hundred thousand tuples would stop a step for long.
    """

    records: dict[bytes, bytes] = field(default_factory=dict)
    partly: dict[bytes, int] = field(default_factory=dict)  # ranks that have it, while some have not said
    settled: dict[bytes, int] = field(default_factory=dict)


class Warming:
    """One tier after its opening.

    Args:
        tier: Its books.
        groups: The KV cache groups.
        rank_count: Ranks that tell.
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
        self._found = [_Found() for _ in self._groups]
        self._parents: set[bytes] = set()
        self._oldest_s = self._newest_s = 0
        self._lasts = 0
        self._visit = 0
        self._work: Iterator[int] | None = None
        self.is_done = not expected

    def take(self, piece: InventoryPiece) -> None:
        """Take in what one rank says."""
        if piece.generation != self._generation or self.is_done:
            return
        width, nothing = piece.hash_bytes, bytes(piece.hash_bytes)
        groups = np.frombuffer(piece.group_index, dtype=np.uint16).tolist()
        indices, written = piece.chunk_index, piece.written_at_s
        for at, group in enumerate(groups):
            if group >= len(self._found):
                continue
            name = piece.hashes[at * width : (at + 1) * width]
            parent = piece.parent_hashes[at * width : (at + 1) * width]
            found, wanted = self._found[group], piece.shard_counts[group]
            if wanted > 1:
                found.partly[name] = found.partly.get(name, 0) + 1
                if found.partly[name] < wanted:
                    continue
                del found.partly[name]
            found.records[name] = indices[4 * at : 4 * at + 4] + written[8 * at : 8 * at + 8] + parent
            if group == self._spine and parent != nothing:
                self._parents.add(parent)
        if written:
            times = np.frombuffer(written, dtype=np.uint64)
            self._oldest_s = min(self._oldest_s or int(times.min()), int(times.min()))
            self._newest_s = max(self._newest_s, int(times.max()))
        self._lasts += piece.last

    def step(self) -> bool:
        """Go on for a bounded while; True when something has changed for readers."""
        if self.is_done or self._lasts < self._rank_count:
            return False
        if self._work is None:
            self._work = self._all()
        before, left = self.found_count, RECORDS_PER_STEP
        for cost in self._work:
            left -= cost
            if left <= 0:
                break
        else:
            self.is_done = True
        return self.found_count > before

    # -- inside ---------------------------------------------------------------------------------

    def _all(self) -> Iterator[int]:
        """Everything there is to do; yields what each bit of it has cost, in records."""
        if self._spine is not None:
            records = self._found[self._spine].records
            # No dictionary is iterated over that grows meanwhile: pieces come before this begins.
            leaves: list[list[bytes]] = [[] for _ in range(BUCKETS)]
            span_s = max(1, self._newest_s - self._oldest_s)
            for number, (name, record) in enumerate(records.items()):
                if not number % 4:  # looking at one costs a quarter of putting it into the books
                    yield 1
                if name not in self._parents:
                    written_at_s = int.from_bytes(record[4:12], sys.byteorder)
                    bucket = (written_at_s - self._oldest_s) * (BUCKETS - 1) // span_s
                    leaves[bucket].append(name)
            for of_one_age in leaves:
                for leaf in of_one_age:
                    yield self._take_in(leaf)
        yield from self._forget_the_rest()

    def _take_in(self, leaf: bytes) -> int:
        """Put one prompt into the books, or have it forgotten; says what that has cost."""
        spine = self._spine
        assert spine is not None
        found = self._found[spine]
        names: list[bytes] = []
        record = found.records[leaf]
        name, nothing = leaf, bytes(len(record) - 12)
        length = int.from_bytes(record[:4], sys.byteorder) + 1
        while name != nothing and len(names) < length and (record := found.records.get(name, b"")):
            names.append(name)
            name = record[12:]
        if name != nothing or len(names) != length:
            names = [one for one in names if one not in found.settled]
            self._forget(spine, names)
            return 1 + len(names)
        names.reverse()
        first = next((at for at, one in enumerate(names) if one not in found.settled), length)
        self._visit -= 1
        self._note(ChunkRun(names, spine, 1, first, length), names[first:], found)
        for index, group in enumerate(self._groups):
            if index != spine:
                self._take_in_beside(index, group, names)
        return 1 + length

    def _take_in_beside(self, index: int, group: CatalogGroup, names: list[bytes]) -> None:
        """Put what another group has along a prompt into the books."""
        found = self._found[index]
        ends = names[group.stride - 1 :: group.stride]
        start = 0
        while found.records and start < len(ends):
            if ends[start] not in found.records:
                if group.window is None:
                    return
                start += 1
                continue
            stop = start + 1
            while stop < len(ends) and ends[stop] in found.records:
                stop += 1
            part = [one for one in ends[start:stop] if one not in found.settled]
            if part:
                self._note(ChunkRun(names, index, group.stride, start, stop), part, found)
            start = stop

    def _note(self, run: ChunkRun, names: Sequence[bytes], found: _Found) -> None:
        self.found_count += self._tier.found(run, self._visit)
        found.settled.update(dict.fromkeys(names, IN_BOOKS))

    def _forget(self, group_index: int, names: Sequence[bytes]) -> None:
        self._found[group_index].settled.update(dict.fromkeys(names, FORGOTTEN))
        self._tier.discard([make_offload_key(name, group_index) for name in names])

    def _forget_the_rest(self) -> Iterator[int]:
        """Have forgotten what is part of no prompt, or what not every rank has; and let go of it all.

        A little at a time: to free a large dictionary at once takes long.
        """
        for index, found in enumerate(self._found):
            for known in (found.records, found.partly):
                while known:
                    name, _ = known.popitem()
                    if found.settled.pop(name, None) is None:
                        self._tier.discard([make_offload_key(name, index)])
                    yield 1
        while self._parents:
            self._parents.pop()
            yield 1
