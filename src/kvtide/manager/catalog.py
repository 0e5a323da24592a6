"""Which chunk is where, and for how long it must stay.

Closed is the union of the tiers: an entry stays in the tree while any tier holds it, anything hangs below
it, or a policy remembers its name. Pins and uses are kept for the deepest chunk of a prefix and cover all
above it. Knows no requests, no jobs and no bytes. Reading is in ``residency``, leaving in ``departures``.
"""

from collections.abc import Sequence

import numpy as np

from kvtide.manager.departures import Departures, Evicted
from kvtide.manager.residency import ABSENT, CatalogGroup
from kvtide.manager.tree import ROOT, Path
from kvtide.policies import EvictionPolicy

__all__ = ["ABSENT", "Catalog", "CatalogGroup", "Evicted"]


class Catalog(Departures):
    """Residency of every chunk in every tier, from its coming to its leaving.

    Args:
        groups: The KV cache groups.
        policies: One per tier, the nearest tier first; None for a tier that evicts by its own rules.
    """

    def __init__(self, groups: Sequence[CatalogGroup], policies: Sequence[EvictionPolicy | None]) -> None:
        super().__init__(groups, policies)
        self._handles = 0
        # With one tier, full attention has none.
        self._gaps = len(policies) > 1 or self._windowed

    def clear(self) -> list[dict[bytes, int]]:
        """Forget everything; handles of before mean nothing any more, and no later one is equal to them.

        Returns:
            What is left to be freed: a million keys take a while.
        """
        remains, handles = self.tree.surrender(), self._handles
        self.__init__(self._groups, self._policies)  # type: ignore[misc]
        self._handles = handles
        return remains

    def policy(self, tier: int) -> EvictionPolicy | None:
        """Who decides what leaves a tier; None where the tier itself does."""
        return self._policies[tier]

    def reserve(self, chunk_count: int) -> None:
        """Have a place for so many resident chunks, and for the names that policies remember beside them.

        Growing later costs a copy; address space costs nothing.
        """
        entries = chunk_count * (1 + self._remembering) + chunk_count // 4
        self.tree.reserve(entries)
        self._cover_entries(entries)

    # -- pins and uses --------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], stop: int) -> int:
        """Keep a known prefix where it is, until ``unpin``.

        Raises:
            ValueError: The tree does not know all of it: our bug.
        """
        path = self.tree.find(keys, stop)
        if path[1] < stop:
            raise ValueError(f"{path[1]} of {stop} positions are known")
        return self._pin(path, stop)

    def begin_store(
        self, tier: int, group: int, keys: Sequence[bytes], stop: int, visit: int
    ) -> tuple[int, int, int | None]:
        """Note the use of a prefix that is about to be extended, and keep what the tier holds of it.

        One walk for what ``resident``, ``touch``, ``pin`` and ``slots`` would say of chunks ``[0, stop)``.

        Returns:
            How many chunks are resident in the tier, the handle of their pin, and the slot of the last.
        """
        stride = self._groups[group].stride
        path = self.tree.find(keys, stop * stride)
        ready = self._resident(group, path, 0, stop, (tier,))
        self._touch(path, visit)
        slot = None
        if ready:
            last = self._slots_on((path[0], ready * stride), tier, group, ready * stride - 1)
            slot = int(last[0])
        # What other groups hold of it is of use only with this one: it is no victim of what is stored now.
        return ready, self._pin(path, path[1] if self._windowed else ready * stride), slot

    def unpin(self, handle: int) -> None:
        """Undo ``pin``."""
        for node in self._pinned_nodes.pop(handle, ()):
            del self._pins[node][handle]
            if not self._pins[node]:
                del self._pins[node]
                self._prune(node)
            self._review_all(node)

    @property
    def pin_count(self) -> int:
        """Prefixes that are pinned."""
        return len(self._pinned_nodes)

    def touch(self, keys: Sequence[bytes], stop: int, visit: int) -> None:
        """Note the use of what is known of a prefix, in every tier that holds it."""
        self._touch(self.tree.find(keys, stop), visit)

    def visited(self, keys: Sequence[bytes], stop: int, visit: int, now_s: float) -> None:
        """Tell policies that learn from them of a prompt and what each tier holds of it."""
        if not any(self._learning):
            return
        tree, (nodes, known) = self.tree, self.tree.find(keys, stop)
        for tier, policy in enumerate(self._learning):
            if policy is not None:
                runs = []
                for node in nodes:
                    held = self.held(tier, node)
                    if held:
                        runs.append((node, min(known, tree.start[node] + held)))
                    if held < tree.count[node]:
                        break
                policy.visited(visit, now_s, keys[:stop], runs)

    def recall(self, tier: int, keys: Sequence[bytes], start: int, stop: int) -> None:
        """Tell the policy which remembered chunks of positions ``[start, stop)`` are being brought back."""
        policy, remembered = self._policies[tier], self._remembered[tier]
        if policy is None or not remembered:
            return
        nodes, known = self.tree.find(keys, stop)
        for node in reversed(nodes) if known > start else ():
            begin = self.tree.start[node]
            if node not in remembered or begin + self.tree.count[node] <= start:
                continue
            if begin < start:
                self._split(node, start - begin)
                begin = start
            if begin + self.tree.count[node] > known:
                policy.recalled(self._split(node, known - begin))
            else:
                policy.recalled(node)

    # -- changing -------------------------------------------------------------------------------

    def insert(
        self,
        tier: int,
        group: int,
        keys: Sequence[bytes],
        start: int,
        slots: np.ndarray,
        visit: int,
    ) -> None:
        """Note that chunks of a group have become resident, and their whole prefix used, in that tier.

        In others nothing is used by it: what is copied down before it leaves has to leave next all the same.

        Args:
            tier: Where.
            group: Index of the group.
            keys: Hashes from the beginning of the prompt, one a position.
            start: First chunk.
            slots: ``int32[n]``, one per chunk.
            visit: Who used them.
        """
        stride = self._groups[group].stride
        begin, end = start * stride, (start + len(slots)) * stride
        tree = self.tree
        nodes, known = tree.find(keys, end)
        last = nodes[-1] if nodes else ROOT
        if known < end:
            if last != ROOT and known < tree.start[last] + tree.count[last]:
                last = nodes[-1] = self._split(last, known - tree.start[last])
            nodes += self._grow(tier, last, keys, known, end, visit)
        if (learning := self._learning[tier]) is not None:
            self._cut(nodes, learning.seams(visit, begin, end))
        node_count = tree.node_count
        for node in nodes:
            if tree.start[node] + tree.count[node] > begin:
                offset = max(0, begin - tree.start[node])
                self._put(tier, group, node, offset, end, slots, start, visit)
        path = (nodes, end) if tree.node_count == node_count else tree.find(keys, end)
        self._touch(path, visit, (tier,))
        self._forget(tier)

    def check_invariants(self) -> None:
        """Check rows, pins and who may leave against the tree.

        Raises:
            AssertionError: They do not agree; says where.
        """
        nodes = self.tree.check_invariants()
        assert not self._have or len(self._slots[0]) >= self.tree.entry_capacity, "entries without slots"
        for tier in self._tiers:
            kids = dict.fromkeys((ROOT, *nodes), 0)
            for node in nodes:
                kids[self.tree.parent[node]] += self.held(tier, node) > 0
            for node in kids:
                assert kids[node] == self._kids[tier][node], f"node {node}, tier {tier}: kids miscounted"
        for node in nodes:
            count, held = self.tree.count[node], max(self._kept(node), self._pinned(node))
            kept = self._is_remembered(node)
            assert held <= count, f"node {node}: {held} of {count} entries held"
            above = self.tree.parent[node]
            closed = above == ROOT or not self._kept(node) or self._kept(above) == self.tree.count[above]
            assert closed or self._windowed or self.has_holes, f"node {node} is held, what it extends is not"
            assert held == count or kept or self.tree.kids[node], f"node {node}: entries nobody holds"
        for handle, pinned in self._pinned_nodes.items():
            for node in pinned:
                covered = self._pins[node][handle]
                assert 0 < covered <= self.tree.count[node], f"pin {handle}: outside node {node}"

    # -- inside ---------------------------------------------------------------------------------

    def _pin(self, path: Path, stop: int) -> int:
        self._handles += 1
        nodes, starts, pinned = path[0], self.tree.start, set()
        deepest = len(nodes) - 1
        while deepest >= 0 and starts[nodes[deepest]] >= stop:
            deepest -= 1
        if deepest >= 0:
            pinned.add(nodes[deepest])
            for tier in self._tiers:
                pinned |= self._ends(tier, nodes[: deepest + 1])
        if pinned:
            self._pinned_nodes[self._handles] = pinned
        for node in pinned:
            covered = min(stop - starts[node], self.tree.count[node])
            self._pins.setdefault(node, {})[self._handles] = covered
            self._review_all(node)
        return self._handles

    def _ends(self, tier: int, nodes: Sequence[int]) -> set[int]:
        """Where what a tier holds of a path ends: the deepest node, and with gaps the one above each."""
        ends, below_held = set(), False
        for node in reversed(nodes):
            held = self.held(tier, node) > 0
            if held and not below_held:
                ends.add(node)
                if not self._gaps:
                    break
            below_held = held
        return ends

    def _touch(self, path: Path, visit: int, tiers: Sequence[int] | None = None) -> None:
        nodes, known = path
        if not nodes:
            return
        last = nodes[-1]
        within = known - self.tree.start[last]
        if within < self.tree.count[last] and self._kept(last) > within:
            # What is used alone has a history of its own.
            nodes[-1] = self._split(last, within)
        for tier in self._tiers if tiers is None else tiers:
            policy = self._policies[tier]
            if policy is not None:
                for node in reversed(nodes):
                    if self.held(tier, node):
                        policy.touched(node, visit)

    def _grow(
        self, tier: int, above: int, keys: Sequence[bytes], begin: int, end: int, visit: int
    ) -> list[int]:
        """Put ``keys[begin:end]`` into the tree below ``above``; say in which new nodes they are."""
        joins = above != ROOT and self._joins(tier, above, visit)
        grown, added = self.tree.extend(above, keys, begin, end, in_place=joins)
        self._cover_entries(self.tree.entry_capacity)
        for row in self._slots:
            stop = self.tree.entry[above] + self.tree.count[above]
            row[stop - grown : stop] = ABSENT
            for node in added:
                row[self.tree.entry[node] : self.tree.entry[node] + self.tree.count[node]] = ABSENT
        for node in added:
            for have in self._have:
                have[node] = 0
            for kids in self._kids:
                kids[node] = 0
        self._review_all(above)
        return added

    def _cover_entries(self, capacity: int) -> None:
        """Have a place for the slots of so many entries; memory is taken when they are written."""
        for index, row in enumerate(self._slots):
            if len(row) < capacity:
                self._slots[index] = np.empty(capacity, dtype=np.int32)
                self._slots[index][: len(row)] = row

    def _cut(self, nodes: list[int], positions: Sequence[int]) -> None:
        """Split nodes of a path where one of these positions lies inside."""
        tree = self.tree
        for position in positions:
            for index, node in enumerate(nodes):
                at = position - tree.start[node]
                if 0 < at < tree.count[node]:
                    nodes.insert(index, self._split(node, at))
                    break

    def _joins(self, tier: int, node: int, visit: int) -> bool:
        """Whether new chunks may lie in the node above them: its history is theirs, in every tier."""
        for other in self._tiers:
            policy, held = self._policies[other], self.held(other, node)
            full = held == self.tree.count[node]
            if other == tier and not (full and (policy is None or policy.joins(node, visit))):
                return False
            if other != tier and (held or node in self._remembered[other]):
                return False
        return True

    def _put(
        self,
        tier: int,
        group: int,
        node: int,
        offset: int,
        end: int,
        slots: np.ndarray,
        start: int,
        visit: int,
    ) -> None:
        """Write the slots of one group into a node, from ``offset`` to its end or position ``end``."""
        tree, row = self.tree, tier * len(self._groups) + group
        have = self._have[row]
        if offset and have[node] < offset and self._groups[group].window is None:
            self._split(node, offset)
            offset = 0
        if node in self._remembered[tier] and tree.start[node] + tree.count[node] > end:
            node = self._split(node, end - tree.start[node])
        stride, first = self._groups[group].stride, tree.start[node]
        last = min(tree.count[node], end - first)
        chunk_end = offset + (stride - 1 - first - offset) % stride
        if chunk_end < last:
            at = (first + chunk_end) // stride - start
            count = -(-(last - chunk_end) // stride)
            entry = tree.entry[node]
            self._slots[row][entry + chunk_end : entry + last : stride] = slots[at : at + count]
        before = self.held(tier, node)
        have[node] = max(have[node], last)
        more = have[node] - before
        policy = self._policies[tier]
        if not before:
            self._kids[tier][tree.parent[node]] += 1
            self._remembered[tier].discard(node)
            if policy is not None:
                policy.inserted(node, more, visit, first)
            self._review_all(tree.parent[node])
        elif more > 0 and policy is not None:
            policy.grown(node, more)
        self._review_all(node)
