"""Which chunk is where: the prefix tree, and what each tier holds of it.

A *row* is one KV cache group in one tier: a slot per entry of the tree. Full attention keeps a row without
holes within a node, so that a number per node says how far it reaches; windowed and recurrent groups may
have holes and are asked slot by slot. Closed is the union of the tiers: an entry stays in the tree while
any tier holds it, anything hangs below it, or a policy remembers its name. Pins and uses are kept for the
deepest chunk of a prefix and cover all above it. Knows no requests, no jobs and no bytes.

Positions count chunks of the finest group from the beginning of the prompt.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtide.manager.tree import ROOT, PrefixTree
from kvtide.policies import EvictionPolicy

ABSENT = -1


@dataclass(frozen=True, slots=True)
class CatalogGroup:
    """One KV cache group, as the catalog sees it.

    Attributes:
        stride: Positions one of its chunks spans.
        window: Chunks before a position that a reader needs to continue there; None for all of them.
    """

    stride: int = 1
    window: int | None = None


@dataclass(slots=True)
class Evicted:
    """What has left a tier.

    Attributes:
        slots: Per run that left, the slots it had.
        names: Per run, its group and its hashes, one after another; the last chunk left first.
        count: Slots of all of them.
    """

    slots: list[np.ndarray] = field(default_factory=list)
    names: list[tuple[int, bytes]] = field(default_factory=list)
    count: int = 0


class Catalog:
    """Residency of every chunk, in every tier.

    Args:
        groups: The KV cache groups.
        policies: One per tier, the nearest tier first; None for a tier that evicts by its own rules.

    Attributes:
        tree: The prefixes; to be read.
    """

    def __init__(self, groups: Sequence[CatalogGroup], policies: Sequence[EvictionPolicy | None]) -> None:
        self.tree = PrefixTree()
        self._groups = tuple(groups)
        self._policies = tuple(policies)
        self._tiers = range(len(policies))
        rows = len(groups) * len(policies)
        self._slots = [np.empty(0, dtype=np.int32) for _ in range(rows)]
        self._have = [array("i", [0]) for _ in range(rows)]
        self._kids = [array("i", [0]) for _ in policies]
        self._remembered: list[set[int]] = [set() for _ in policies]
        self._pins: dict[int, dict[int, int]] = {}  # node -> {handle: entries it covers}
        self._pinned_node: dict[int, int] = {}  # handle -> node
        self._handles = 0
        self._in_service = [True] * len(policies)

    # -- reading --------------------------------------------------------------------------------

    def mask(self, tier: int, in_service: bool) -> None:
        """Leave a tier out of every answer, or take it in again."""
        self._in_service[tier] = in_service

    def resident(
        self, group: int, keys: Sequence[bytes], start: int, stop: int, tier: int | None = None
    ) -> int:
        """Count the leading chunks of ``[start, stop)`` of a group that can be read.

        Args:
            group: Index of the group.
            keys: Hashes from the beginning of the prompt, one a position.
            start: First chunk.
            stop: One past the last.
            tier: Only there, in service or not; None: in any tier in service.
        """
        stride = self._groups[group].stride
        nodes, known = self.tree.find(keys, stop * stride)
        tiers = self._serving() if tier is None else (tier,)
        if self._groups[group].window is not None:
            there = self._present(group, tiers, nodes, known)[start:stop]
            return len(there) if there.all() else int(there.argmin())
        rows = [self._have[tier * len(self._groups) + group] for tier in tiers]
        position = start * stride
        for node in nodes:
            begin = self.tree.start[node]
            end = begin + self.tree.count[node]
            if end <= position:
                continue
            reach = begin + max([row[node] for row in rows], default=0)
            position = max(position, min(reach, known))
            if position < end:
                break
        return position // stride - start

    def slots(self, tier: int, group: int, keys: Sequence[bytes], start: int, stop: int) -> np.ndarray:
        """Give ``int32[n]``: slots of the chunks ``[start, stop)`` that the tier knows, ABSENT for holes."""
        stride = self._groups[group].stride
        begin, stop = start * stride, stop * stride
        row = self._slots[tier * len(self._groups) + group]
        tree, parts = self.tree, []
        nodes, known = tree.find(keys, stop)
        for node in nodes:
            first, offset = tree.start[node], max(0, begin - tree.start[node])
            last = min(first + tree.count[node], known) - first
            if last > offset:
                # The slot of a chunk lies with its last position.
                offset += (stride - 1 - first - offset) % stride
                parts.append(row[tree.entry[node] + offset : tree.entry[node] + last : stride])
        if len(parts) == 1:
            return parts[0].copy()
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def restore_point(self, keys: Sequence[bytes], stop: int) -> int:
        """Find the deepest position, ``stop`` at most, at which every group has what a reader needs."""
        nodes, known = self.tree.find(keys, stop)
        tiers = self._serving()
        reach, windowed = known, []
        for index, group in enumerate(self._groups):
            if group.window is None:
                reach = min(reach, group.stride * self.resident(index, keys, 0, known // group.stride))
            else:
                windowed.append((group, _runs_before(self._present(index, tiers, nodes, known))))
        point = reach
        settled = False
        while point and not settled:
            settled = True
            for group in self._groups:
                if point % group.stride:
                    point -= point % group.stride
                    settled = False
            for group, before in windowed:
                chunks = point // group.stride
                if point and before[chunks] < min(group.window or 0, chunks):
                    point -= group.stride
                    settled = False
        return point

    def names(self, tier: int) -> list[tuple[int, bytes]]:
        """List everything that a tier holds, as ``Evicted.names`` does."""
        found, groups = [], len(self._groups)
        for group in range(groups):
            row, have = self._slots[tier * groups + group], self._have[tier * groups + group]
            for node in self.tree.nodes():
                entry = self.tree.entry[node]
                there = row[entry : entry + have[node]] != ABSENT
                if there.any():
                    names = self.tree.hashes(node, 0, have[node])
                    found.append((group, _chosen(names, there, self.tree.width)))
        return found

    def all_slots(self, tier: int) -> list[int]:
        """List the slots of everything that a tier holds."""
        found: list[int] = []
        for row in self._slots[tier * len(self._groups) :][: len(self._groups)]:
            for node in self.tree.nodes():
                entry = self.tree.entry[node]
                slots = row[entry : entry + self.tree.count[node]]
                found += slots[slots != ABSENT].tolist()
        return found

    def held(self, tier: int, node: int) -> int:
        """Count the entries of a node up to the last that the tier holds anything of."""
        first = tier * len(self._groups)
        return max(row[node] for row in self._have[first : first + len(self._groups)])

    # -- pins and uses --------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], stop: int) -> int:
        """Keep a known prefix where it is, until ``unpin``.

        Raises:
            ValueError: The tree does not know all of it: our bug.
        """
        nodes, known = self.tree.find(keys, stop)
        if known < stop:
            raise ValueError(f"{known} of {stop} positions are known")
        self._handles += 1
        if stop:
            node = nodes[-1]
            self._pins.setdefault(node, {})[self._handles] = stop - self.tree.start[node]
            self._pinned_node[self._handles] = node
            self._review_all(node)
        return self._handles

    def unpin(self, handle: int) -> None:
        """Undo ``pin``."""
        node = self._pinned_node.pop(handle, ROOT)
        if node != ROOT:
            del self._pins[node][handle]
            if not self._pins[node]:
                del self._pins[node]
            self._review_all(node)

    @property
    def pin_count(self) -> int:
        """Prefixes that are pinned."""
        return len(self._pinned_node)

    def touch(self, keys: Sequence[bytes], stop: int, visit: int) -> None:
        """Note the use of what is known of a prefix, in every tier that holds it."""
        nodes, known = self.tree.find(keys, stop)
        if not nodes:
            return
        within = known - self.tree.start[nodes[-1]]
        if within < self.tree.count[nodes[-1]] and any(
            self.held(tier, nodes[-1]) > within for tier in self._tiers
        ):
            nodes[-1] = self._split(nodes[-1], within)
        for tier in self._tiers:
            policy = self._policies[tier]
            if policy is not None:
                for node in reversed(nodes):
                    if self.held(tier, node):
                        policy.touched(node, visit)

    def recall(self, tier: int, keys: Sequence[bytes], start: int, stop: int) -> None:
        """Tell the policy which remembered chunks of positions ``[start, stop)`` are being brought back."""
        policy, remembered = self._policies[tier], self._remembered[tier]
        if policy is None or not remembered:
            return
        nodes, known = self.tree.find(keys, stop)
        for node in reversed(nodes):
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
        """Note that chunks of a group have become resident, and their whole prefix used.

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
        nodes, known = self.tree.find(keys, end)
        last = nodes[-1] if nodes else ROOT
        if known < end:
            if last != ROOT and known < self.tree.start[last] + self.tree.count[last]:
                last = nodes[-1] = self._split(last, known - self.tree.start[last])
            nodes += self._grow(tier, last, keys, known, end, visit)
        for node in nodes:
            offset = max(0, begin - self.tree.start[node])
            if self.tree.start[node] + self.tree.count[node] > begin:
                self._put(tier, group, node, offset, end, slots, start, visit)
        self.touch(keys, end, visit)
        self._forget(tier)

    def evict(self, tier: int, wanted: int, run_limit: int) -> Evicted:
        """Let the least useful chunks of a tier go.

        Args:
            tier: Which has a policy.
            wanted: Slots.
            run_limit: Runs at most, so that no call takes long.

        Returns:
            Fewer than ``wanted`` when the rest must stay, or for the limit.
        """
        gone, policy = Evicted(), self._policies[tier]
        if policy is None:
            return gone
        while gone.count < wanted and run_limit:
            run_limit -= 1
            node = policy.victim()
            if node is None:
                break
            keep = max(self.held(tier, node) - (wanted - gone.count), self._pinned(node))
            self._drop(tier, node, keep, gone)
        self._forget(tier)
        return gone

    def check_invariants(self) -> None:
        """Check rows, pins and who may leave against the tree.

        Raises:
            AssertionError: They do not agree; says where.
        """
        nodes = self.tree.check_invariants()
        for tier in self._tiers:
            kids = dict.fromkeys((ROOT, *nodes), 0)
            for node in nodes:
                kids[self.tree.parent[node]] += self.held(tier, node) > 0
            for node in kids:
                assert kids[node] == self._kids[tier][node], f"node {node}, tier {tier}: kids miscounted"
        for node in nodes:
            count, held = self.tree.count[node], max(self.held(tier, node) for tier in self._tiers)
            kept = any(node in remembered for remembered in self._remembered)
            assert held <= count, f"node {node}: {held} of {count} entries held"
            assert held == count or kept or self.tree.kids[node], f"node {node}: entries nobody holds"
        for handle, node in self._pinned_node.items():
            assert 0 < self._pins[node][handle] <= self.tree.count[node], f"pin {handle}: outside node {node}"

    # -- inside ---------------------------------------------------------------------------------

    def _serving(self) -> list[int]:
        return [tier for tier in self._tiers if self._in_service[tier]]

    def _present(self, group: int, tiers: Sequence[int], nodes: Sequence[int], known: int) -> np.ndarray:
        """``bool[chunks]``: which chunks of a known prefix are in any of these tiers."""
        stride = self._groups[group].stride
        there = np.zeros(known // stride, dtype=bool)
        tree = self.tree
        for tier in tiers:
            row = self._slots[tier * len(self._groups) + group]
            held = self._have[tier * len(self._groups) + group]
            for node in nodes:
                first, entry = tree.start[node], tree.entry[node]
                last = min(held[node], known - first)
                offset = (stride - 1 - first) % stride
                if last > offset:
                    chunk = (first + offset) // stride
                    part = row[entry + offset : entry + last : stride] != ABSENT
                    there[chunk : chunk + len(part)] |= part
        return there

    def _pinned(self, node: int) -> int:
        pins = self._pins.get(node)
        return max(pins.values()) if pins else 0

    def _review_all(self, node: int) -> None:
        for tier in self._tiers:
            self._review(tier, node)

    def _review(self, tier: int, node: int) -> None:
        """Tell the policy whether chunks at the end of a node may leave."""
        policy = self._policies[tier]
        if policy is None or node == ROOT:
            return
        held = self.held(tier, node)
        if held:
            free = not self._kids[tier][node] and self._pinned(node) < held
        elif node in self._remembered[tier]:
            free = not self.tree.kids[node]
        else:
            return
        if free:
            policy.offer(node)
        else:
            policy.withdraw(node)

    def _cover(self, node: int) -> None:
        """Have a place for the fields of a node."""
        if node >= len(self._kids[0]):
            for fields in (*self._have, *self._kids):
                fields.extend([0] * (node + 1 - len(fields)))

    def _grow(
        self, tier: int, above: int, keys: Sequence[bytes], begin: int, end: int, visit: int
    ) -> list[int]:
        """Put ``keys[begin:end]`` into the tree below ``above``; say in which new nodes they are."""
        joins = above != ROOT and self._joins(tier, above, visit)
        grown, added = self.tree.extend(above, keys, begin, end, in_place=joins)
        capacity = self.tree.entry_capacity
        for index, row in enumerate(self._slots):
            if len(row) < capacity:
                more = np.empty(capacity - len(row), dtype=np.int32)
                self._slots[index] = np.concatenate((row, more))
        for row in self._slots:
            stop = self.tree.entry[above] + self.tree.count[above]
            row[stop - grown : stop] = ABSENT
            for node in added:
                row[self.tree.entry[node] : self.tree.entry[node] + self.tree.count[node]] = ABSENT
        for node in added:
            self._cover(node)
            for have in self._have:
                have[node] = 0
            for kids in self._kids:
                kids[node] = 0
        self._review_all(above)
        return added

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
                policy.inserted(node, more, visit)
            self._review(tier, tree.parent[node])
        elif more > 0 and policy is not None:
            policy.grown(node, more)
        self._review(tier, node)

    def _split(self, node: int, at: int) -> int:
        """Cut a node after ``at`` entries in the tree, in every row and in every policy."""
        held = [self.held(tier, node) for tier in self._tiers]
        head = self.tree.split(node, at)
        self._cover(head)
        for have in self._have:
            have[head], have[node] = min(have[node], at), max(0, have[node] - at)
        pins = self._pins.pop(node, {})
        for handle, covered in pins.items():
            part, rest = (head, covered) if covered <= at else (node, covered - at)
            self._pins.setdefault(part, {})[handle] = rest
            self._pinned_node[handle] = part
        for tier in self._tiers:
            self._kids[tier][head] = held[tier] > at
            policy, remembered = self._policies[tier], self._remembered[tier]
            if policy is not None and (held[tier] or node in remembered):
                policy.split(node, head, min(at, held[tier] or at))
                if 0 < held[tier] <= at:
                    policy.removed(node)
                elif not held[tier]:
                    remembered.add(head)
        self._review_all(head)
        self._review_all(node)
        return head

    def _drop(self, tier: int, node: int, keep: int, gone: Evicted) -> None:
        """Take what a tier holds of a node from entry ``keep`` on."""
        tree, policy = self.tree, self._policies[tier]
        assert policy is not None
        if keep and policy.remembers:
            self._split(node, keep)
            keep = 0
        left = self.held(tier, node) - keep
        entry, groups = tree.entry[node], len(self._groups)
        for group in range(groups):
            have, row = self._have[tier * groups + group], self._slots[tier * groups + group]
            if have[node] > keep:
                part = row[entry + keep : entry + have[node]].copy()
                row[entry + keep : entry + have[node]] = ABSENT
                names = tree.hashes(node, keep, have[node])
                if groups > 1 or self._groups[group].stride > 1:
                    names = _chosen(names, part != ABSENT, tree.width)
                    part = part[part != ABSENT]
                gone.slots.append(part)
                gone.names.append((group, names))
                gone.count += len(part)
                have[node] = keep
        if keep:
            policy.shrunk(node, left)
            self._prune(node)
            self._review(tier, node)
            return
        above = tree.parent[node]
        self._kids[tier][above] -= 1
        if policy.remember(node):
            self._remembered[tier].add(node)
            self._review(tier, node)
        else:
            self._prune(node)
        self._review(tier, above)

    def _prune(self, node: int) -> None:
        """Cut from the tree what no tier holds, nothing extends and no policy remembers."""
        tree = self.tree
        while node != ROOT and not tree.kids[node]:
            if any(node in remembered for remembered in self._remembered):
                return
            keep = max(self.held(tier, node) for tier in self._tiers)
            above = tree.parent[node]
            if keep < tree.count[node]:
                tree.cut(node, keep)
            if keep:
                return
            self._review_all(above)
            node = above

    def _forget(self, tier: int) -> None:
        """Drop the names that the policy no longer wants."""
        policy = self._policies[tier]
        while policy is not None and (told := policy.forgotten()) is not None:
            node, count = told
            keep = self.tree.count[node] - count
            if keep and any(self.held(other, node) > keep for other in self._tiers):
                self._split(node, keep)
            elif keep:
                policy.shrunk(node, count)
                self.tree.cut(node, keep)
                continue
            policy.removed(node)
            self._remembered[tier].discard(node)
            self._prune(node)


def _runs_before(there: np.ndarray) -> np.ndarray:
    """``int[n + 1]``: how many chunks in a row are there just before chunk i."""
    before = np.zeros(len(there) + 1, dtype=np.int64)
    index = np.arange(1, len(there) + 1)
    missing = np.where(there, 0, index)
    before[1:] = index - np.maximum.accumulate(missing) if len(there) else 0
    return before


def _chosen(names: bytes, chosen: np.ndarray, width: int) -> bytes:
    return b"".join(names[i * width : (i + 1) * width] for i in np.flatnonzero(chosen))
