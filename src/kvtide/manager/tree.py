"""A compressed prefix tree over block hashes, in flat arrays.

A run of neighbouring chunks nobody branches off from is one node; a chunk is one entry. Both are
numbers, their fields lie in arrays, and there is one dictionary entry a run: nothing here is seen by the
garbage collector or costs a call per chunk. Hashes are chained, so two runs that agree on their last
hash agree on all of it. Does not know what is resident, pinned or recent.
"""

import mmap
from collections.abc import Sequence

from kvtide.manager.extents import ExtentAllocator
from kvtide.policies.columns import Columns

ROOT = 0
"""The empty prefix. Also "no node", where a node is asked for."""

Path = tuple[list[int], int]
"""Nodes from the top down, the root left out, and how many positions they cover, the last one in part."""

# A dictionary of a million keys stops the world for tens of milliseconds when it grows; 256 do not.
_SHARDS = 256
_FIRST_ENTRIES = 1024
_GROWTH_RESERVE = 128
_GROWING_SHARE = 16


class PrefixTree:
    """Nodes, entries and their hashes.

    Attributes:
        parent: Per node, the one above.
        start: Per node, its first position, counted in chunks of the finest group from the beginning.
        count: Per node, its entries.
        entry: Per node, its first entry; the others follow it.
        kids: Per node, how many nodes hang at its end.
        columns: All these; what others keep per node grows with them.
    """

    def __init__(self) -> None:
        self.columns = columns = Columns()
        self.parent, self.start, self.count = columns.ints(), columns.ints(), columns.ints()
        self.entry, self.kids = columns.ints(), columns.ints()
        columns.cover(ROOT)
        self._made = ROOT  # the highest number that was given to a node
        self._unused: list[int] = []
        self._first: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._entries = ExtentAllocator(_GROWTH_RESERVE, _GROWING_SHARE)
        self._loose: dict[
            int, int
        ] = {}  # extents of entries that were cut: joined before they are given back
        self._loose_count = 0
        self._arena: mmap.mmap | None = None
        self._planned = _FIRST_ENTRIES
        self.width = 0

    def reserve(self, entries: int) -> None:
        """Note how many entries there will be; growing later has the system move what is there."""
        self._planned = max(entries, self._planned)

    @property
    def entry_capacity(self) -> int:
        """Entries that have a place; per-entry fields of others are as long."""
        return self._entries.capacity

    @property
    def entry_count(self) -> int:
        """Entries in use."""
        return self._entries.capacity - self._entries.free_count - self._loose_count

    @property
    def node_count(self) -> int:
        """Nodes in use, the root left out."""
        return self._made - len(self._unused)

    # -- reading --------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], stop: int) -> Path:
        """Walk down as far as the tree knows ``keys[:stop]``.

        Returns:
            The nodes on the way, the root left out, and how many positions they cover. The last node may
            be covered in part.
        """
        nodes: list[int] = []
        position = 0
        shards, counts, entries, arena, width = self._first, self.count, self.entry, self._arena, self.width
        while position < stop:
            key = keys[position]
            node = shards[key[0]].get(key)
            if node is None:
                break
            nodes.append(node)
            count = counts[node]
            end = position + count
            last = (entries[node] + count) * width
            if end > stop or arena[last - width : last] != keys[end - 1]:  # type: ignore[index]
                return nodes, position + self._agreed(node, keys, position, min(count, stop - position))
            position = end
        return nodes, position

    def hashes(self, node: int, begin: int, end: int) -> bytes:
        """Hashes of entries ``[begin, end)`` of a node, one after another, ``width`` bytes each."""
        if self._arena is None:
            return b""
        at = self.entry[node] * self.width
        return self._arena[at + begin * self.width : at + end * self.width]

    def prefix(self, node: int, count: int) -> list[bytes]:
        """List the hashes of a whole prefix, up to the first ``count`` entries of a node."""
        parts, width = [self.hashes(node, 0, count)], self.width
        while (node := self.parent[node]) != ROOT:
            parts.append(self.hashes(node, 0, self.count[node]))
        names = b"".join(reversed(parts))
        return [names[at : at + width] for at in range(0, len(names), width)]

    def _agreed(self, node: int, keys: Sequence[bytes], position: int, limit: int) -> int:
        """Count the entries of a node, at least one, that agree with ``keys`` from ``position`` on."""
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.hashes(node, middle - 1, middle) == keys[position + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    # -- changing -------------------------------------------------------------------------------

    def extend(
        self, node: int, keys: Sequence[bytes], begin: int, end: int, in_place: bool
    ) -> tuple[int, list[int]]:
        """Hang ``keys[begin:end]`` below the end of ``node``.

        Args:
            node: Ends at position ``begin``.
            keys: From the beginning of the prompt.
            begin: First new position.
            end: One past the last.
            in_place: Whether a node without children may grow instead of getting one.

        Returns:
            Entries that ``node`` has grown by, and the nodes that were added, each below the last.
        """
        if not self.width:
            self.width = len(keys[begin])
        wanted = end - begin
        self._give_back()
        self._make_room(wanted)
        behind = self.entry[node] + self.count[node]
        grows = in_place and node != ROOT and not self.kids[node]
        grown, added = 0, []
        for first, count in self._entries.allocate(wanted, behind - 1 if grows else None):
            self._write(first, keys, begin, count)
            if grows and first == behind:
                grown = count
                self.count[node] += count
            else:
                node = self._add(node, begin, count, first)
                added.append(node)
                self._shard(keys[begin])[keys[begin]] = node
            begin += count
        return grown, added

    def split(self, node: int, at: int) -> int:
        """Cut a node after its first ``at`` entries, no key is copied.

        Returns:
            The new node: the upper part. The old number stays with the lower one, so that whoever
            hangs below, or remembers the deepest chunk, need not be told.
        """
        above, first = self.parent[node], self.entry[node]
        head = self._add(above, self.start[node], at, first)
        self.kids[above] -= 1  # one went, one came
        self.kids[head] = 1
        self.parent[node] = head
        self.start[node] += at
        self.count[node] -= at
        self.entry[node] += at
        for part in (head, node):
            key = self.hashes(part, 0, 1)
            self._shard(key)[key] = part
        return head

    def cut(self, node: int, keep: int) -> None:
        """Drop the entries of a node without children from ``keep`` on; with none left, the node."""
        if not keep:
            self.remove(node)
            return
        first, count = self.entry[node], self.count[node]
        self.count[node] = keep
        self._loose[first + keep] = count - keep
        self._loose_count += count - keep

    def remove(self, node: int) -> bytes:
        """Drop a node without children; give back the hashes of its entries, one after another."""
        count, entry, width = self.count[node], self.entry[node], self.width
        names = self._arena[entry * width : (entry + count) * width]  # type: ignore[index]
        key = names[:width]
        del self._first[key[0]][key]
        self.kids[self.parent[node]] -= 1
        self._unused.append(node)
        self._loose[entry] = count
        self._loose_count += count
        self.count[node] = 0
        return names

    def nodes(self) -> list[int]:
        """List every node in use, in no order."""
        return [node for shard in self._first for node in shard.values()]

    def surrender(self) -> list[dict[bytes, int]]:
        """Hand out the dictionaries of a tree nobody uses any more: freeing a million keys takes a while."""
        return self._first

    def check_invariants(self) -> list[int]:
        """Check the structure.

        Returns:
            Every node in use.

        Raises:
            AssertionError: It does not hold together; says where.
        """
        nodes = self.nodes()
        assert len(nodes) == len(set(nodes)) == self.node_count, f"{len(nodes)} keys, {self.node_count} nodes"
        entries = sum(self.count[node] for node in nodes)
        assert entries == self.entry_count, f"nodes have {entries} entries, {self.entry_count} are in use"
        kids = [0] * (self._made + 1)
        for node in nodes:
            above = self.parent[node]
            kids[above] += 1
            assert self.count[node] > 0, f"node {node} is empty"
            assert self.start[node] == self.start[above] + self.count[above], (
                f"node {node}: not below {above}"
            )
            assert self._shard(key := self.hashes(node, 0, 1)).get(key) == node, f"node {node}: wrong key"
        for node in (ROOT, *nodes):
            assert kids[node] == self.kids[node], f"node {node}: {self.kids[node]} kids, {kids[node]} found"
        return nodes

    # -- inside ---------------------------------------------------------------------------------

    def _shard(self, key: bytes) -> dict[bytes, int]:
        return self._first[key[0]]

    def _add(self, parent: int, start: int, count: int, entry: int) -> int:
        self.kids[parent] += 1
        if self._unused:
            node = self._unused.pop()
        else:
            self._made = node = self._made + 1
            self.columns.cover(node)
        self.parent[node], self.start[node] = parent, start
        self.count[node], self.entry[node], self.kids[node] = count, entry, 0
        return node

    def _write(self, first: int, keys: Sequence[bytes], begin: int, count: int) -> None:
        blob = b"".join(keys if count == len(keys) else keys[begin : begin + count])
        if len(blob) != count * self.width:
            raise ValueError(f"block hashes of {self.width} bytes are expected throughout")
        self._arena[first * self.width : first * self.width + len(blob)] = blob  # type: ignore[index]

    def _give_back(self) -> None:
        """Free what was cut: runs that leave together often lie together."""
        start = end = 0
        loose = self._loose
        for first in sorted(loose):
            if first != end:
                if end > start:
                    self._entries.free(start, end - start)
                start = first
            end = first + loose[first]
        if end > start:
            self._entries.free(start, end - start)
        self._loose, self._loose_count = {}, 0

    def _make_room(self, wanted: int) -> None:
        """Add entries while they are needed, or to get one extent; but not for ever: crumbs are used too."""
        allocator = self._entries
        while allocator.free_count < wanted or (
            allocator.longest < wanted and allocator.free_count < self.entry_count // 4 + wanted
        ):
            capacity = max(self._planned, allocator.capacity + max(wanted, allocator.capacity // 4))
            if self._arena is None:
                # Private: a shared mapping cannot be used beyond the size it began with.
                self._arena = mmap.mmap(-1, capacity * self.width, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                self._arena.resize(capacity * self.width)
            allocator.grow(capacity)
