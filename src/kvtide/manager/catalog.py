"""Which chunk is where, for how long it must stay, and who leaves.

Closed is the union of the tiers: an entry stays in the tree while any tier holds it, anything hangs below
it, or a policy remembers its name. Pins and uses are kept for the deepest chunk of a prefix and cover all
above it. Knows no requests, no jobs and no bytes; reading is in ``residency``.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtide.manager.residency import ABSENT, CatalogGroup, Residency, chosen_names
from kvtide.manager.tree import ROOT, Path
from kvtide.policies import EvictionPolicy

__all__ = ["ABSENT", "Catalog", "CatalogGroup", "Evicted"]


@dataclass(slots=True)
class Evicted:
    """What has left a tier.

    Attributes:
        slots: Per run that left, the slots it had; to be read before anything is inserted.
        names: Per run, its group and its hashes, one after another; the last chunk left first.
        count: Slots of all of them.
        run_count: Runs looked at.
    """

    slots: list[np.ndarray] = field(default_factory=list)
    names: list[tuple[int, bytes]] = field(default_factory=list)
    count: int = 0
    run_count: int = 0


class Catalog(Residency):
    """Residency of every chunk in every tier, and who leaves.

    Args:
        groups: The KV cache groups.
        policies: One per tier, the nearest tier first; None for a tier that evicts by its own rules.
    """

    def __init__(self, groups: Sequence[CatalogGroup], policies: Sequence[EvictionPolicy | None]) -> None:
        super().__init__(groups, len(policies))
        self._policies = tuple(policies)
        self._kids = [array("i", [0]) for _ in policies]
        self._remembering = any(policy is not None and policy.remembers for policy in policies)
        self._remembered: list[set[int]] = [set() for _ in policies]
        self._pins: dict[int, dict[int, int]] = {}  # node -> {handle: entries it covers}
        self._pinned_nodes: dict[int, set[int]] = {}  # handle -> nodes
        self._handles = 0
        # With one tier, full attention has none.
        self._windowed = any(group.window is not None for group in groups)
        self._gaps = len(policies) > 1 or self._windowed

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
        return ready, self._pin(path, ready * stride), slot

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
        tree = self.tree
        nodes, known = tree.find(keys, end)
        last = nodes[-1] if nodes else ROOT
        if known < end:
            if last != ROOT and known < tree.start[last] + tree.count[last]:
                last = nodes[-1] = self._split(last, known - tree.start[last])
            nodes += self._grow(tier, last, keys, known, end, visit)
        node_count = tree.node_count
        for node in nodes:
            if tree.start[node] + tree.count[node] > begin:
                offset = max(0, begin - tree.start[node])
                self._put(tier, group, node, offset, end, slots, start, visit)
        self._touch((nodes, end) if tree.node_count == node_count else tree.find(keys, end), visit)
        self._forget(tier)

    def evict(self, tier: int, wanted: int, run_limit: int) -> Evicted:
        """Let the least useful chunks of a tier go.

        Args:
            tier: Which has a policy.
            wanted: Slots. With several groups an entry has several, and more may leave.
            run_limit: Runs at most, so that no call takes long.

        Returns:
            Fewer than ``wanted`` when the rest must stay, or for the limit.
        """
        gone, policy = Evicted(), self._policies[tier]
        if policy is None:
            return gone
        kids, simple = self.tree.kids, not policy.remembers and len(self._slots) == 1
        while gone.count < wanted and gone.run_count < run_limit:
            named = policy.victim()
            if named is None:
                break
            gone.run_count += 1
            node, most = named
            keep = max(self.held(tier, node) - min(wanted - gone.count, most), self._pinned(node))
            if simple and not keep and not kids[node]:
                self._drop_all(tier, node, gone)
            else:
                self._drop(tier, node, keep, gone)
        self._forget(tier)
        return gone

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
            assert closed or self._windowed, f"node {node} is held and what it extends is not"
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

    def _touch(self, path: Path, visit: int) -> None:
        nodes, known = path
        if not nodes:
            return
        last = nodes[-1]
        within = known - self.tree.start[last]
        if within < self.tree.count[last] and self._kept(last) > within:
            # What is used alone has a history of its own.
            nodes[-1] = self._split(last, within)
        for tier in self._tiers:
            policy, reach = self._policies[tier], self._reach[tier]
            if policy is not None:
                for node in reversed(nodes):
                    if reach[0][node] if len(reach) == 1 else self.held(tier, node):
                        policy.touched(node, visit)

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
            free = free and (len(self._tiers) == 1 or self._dispensable(tier, node, held))
        elif node in self._remembered[tier]:
            free = not self.tree.kids[node] and node not in self._pins
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
        self._cover_entries(self.tree.entry_capacity)
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

    def _cover_entries(self, capacity: int) -> None:
        """Have a place for the slots of so many entries; memory is taken when they are written."""
        for index, row in enumerate(self._slots):
            if len(row) < capacity:
                self._slots[index] = np.empty(capacity, dtype=np.int32)
                self._slots[index][: len(row)] = row

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
            self._review_all(tree.parent[node])
        elif more > 0 and policy is not None:
            policy.grown(node, more)
        self._review_all(node)

    def _split(self, node: int, at: int) -> int:
        """Cut a node after ``at`` entries in the tree, in every row and in every policy."""
        held = [self.held(tier, node) for tier in self._tiers]
        head = self.tree.split(node, at)
        self._cover(head)
        for have in self._have:
            have[head], have[node] = min(have[node], at), max(0, have[node] - at)
        pins = self._pins.pop(node, {})
        for handle, covered in pins.items():
            self._pins.setdefault(head, {})[handle] = min(covered, at)
            self._pinned_nodes[handle].add(head)
            if covered > at:
                self._pins.setdefault(node, {})[handle] = covered - at
            else:
                self._pinned_nodes[handle].discard(node)
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

    def _dispensable(self, tier: int, node: int, held: int) -> bool:
        """Whether what other tiers hold below a node would still be reached without this tier's part."""
        others = [other for other in self._tiers if other != tier]
        if any(self.held(other, node) >= held for other in others):
            return True
        return not any(self._kids[other][node] for other in others)

    def _drop_all(self, tier: int, node: int, gone: Evicted) -> None:
        """Do what ``_drop`` does where a whole run vanishes and there is one row: the usual case."""
        tree, policy, have = self.tree, self._policies[tier], self._have[0]
        assert policy is not None
        entry, held, above = tree.entry[node], have[node], tree.parent[node]
        # Not copied: an entry that has left is written when it is given to somebody else.
        slots, names = self._slots[0][entry : entry + held], tree.remove(node)
        if self._may_have_holes(0):
            names = chosen_names(names, slots != ABSENT, tree.width)
            slots = slots[slots != ABSENT]
        gone.slots.append(slots)
        gone.names.append((0, names))
        gone.count += len(slots)
        have[node] = 0
        self._kids[tier][above] -= 1
        policy.removed(node)
        if above != ROOT:
            self._prune(above)
            self._review(tier, above)

    def _drop(self, tier: int, node: int, keep: int, gone: Evicted) -> None:
        """Take what a tier holds of a node from entry ``keep`` on."""
        tree, policy = self.tree, self._policies[tier]
        assert policy is not None
        if policy.remembers:
            # What is remembered is a whole node: neither what stays nor what only another tier holds.
            if self.held(tier, node) < tree.count[node]:
                node = self._split(node, self.held(tier, node))
            if keep:
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
                if self._may_have_holes(group):
                    names = chosen_names(names, part != ABSENT, tree.width)
                    part = part[part != ABSENT]
                gone.slots.append(part)
                gone.names.append((group, names))
                gone.count += len(part)
                have[node] = keep
        if keep:
            policy.shrunk(node, left)
            self._prune(node)
            self._review_all(node)
            return
        above = tree.parent[node]
        self._kids[tier][above] -= 1
        if policy.remember(node):
            self._remembered[tier].add(node)
        else:
            self._prune(node)
        self._review_all(node)
        self._review_all(above)

    def _may_have_holes(self, group: int) -> bool:
        """Whether an entry that a tier holds may be without a slot of this group."""
        wanted = self._groups[group]
        return len(self._groups) > 1 or wanted.stride > 1 or wanted.window is not None

    def _prune(self, node: int) -> None:
        """Cut from the tree what no tier holds, nothing extends and no policy remembers."""
        tree = self.tree
        while node != ROOT and not tree.kids[node]:
            if self._is_remembered(node):
                return
            keep = max(self._kept(node), self._pinned(node))
            above = tree.parent[node]
            if keep < tree.count[node]:
                tree.cut(node, keep)
            if keep:
                return
            if above != ROOT:
                self._review_all(above)
            node = above

    def _kept(self, node: int) -> int:
        if len(self._tiers) == 1:
            return self.held(0, node)
        return max(self.held(tier, node) for tier in self._tiers)

    def _is_remembered(self, node: int) -> bool:
        return self._remembering and any(node in remembered for remembered in self._remembered)

    def _forget(self, tier: int) -> None:
        """Drop the names that the policy no longer wants."""
        policy = self._policies[tier]
        while policy is not None and (told := policy.forgotten()) is not None:
            node, count = told
            keep = self.tree.count[node] - count
            if keep and any(
                self.held(other, node) > keep or (other != tier and node in self._remembered[other])
                for other in self._tiers
            ):
                self._split(node, keep)
            elif keep:
                policy.shrunk(node, count)
                self.tree.cut(node, keep)
                continue
            policy.removed(node)
            self._remembered[tier].discard(node)
            self._prune(node)
