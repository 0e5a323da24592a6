"""Who leaves a tier, and what leaving changes.

A policy names runs; this says which may leave (nothing extends them in their tier, nobody has pinned them, no
other tier relies on them), takes their last chunks out of the tier, and entries that nobody holds,
extends or remembers out of the tree. Splits live here, too: whoever splits a node splits what policies,
pins and rows know of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtide.manager.residency import ABSENT, CatalogGroup, Residency, chosen_names
from kvtide.manager.tree import ROOT
from kvtide.policies import EvictionPolicy, LearningPolicy


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


class Departures(Residency):
    """Rows that shrink.

    Args:
        groups: The KV cache groups.
        policies: One per tier, the nearest tier first; None for a tier that evicts by its own rules.
    """

    def __init__(self, groups: Sequence[CatalogGroup], policies: Sequence[EvictionPolicy | None]) -> None:
        super().__init__(groups, len(policies))
        self._policies = tuple(policies)
        self._learning = tuple(one if isinstance(one, LearningPolicy) else None for one in policies)
        self._kids = [self.tree.columns.ints() for _ in policies]
        self._remembering = any(policy is not None and policy.remembers for policy in policies)
        self._remembered: list[set[int]] = [set() for _ in policies]
        self._pins: dict[int, dict[int, int]] = {}  # node -> {handle: entries it covers}
        self._windowed = any(group.window is not None for group in groups)
        self.has_holes = False  # a tier has lost chunks that others extend
        self._pinned_nodes: dict[int, set[int]] = {}  # handle -> nodes

    def evict(
        self, tier: int, wanted: int, run_limit: int, newcomer: tuple[int, int] | None = None
    ) -> Evicted:
        """Let the least useful chunks of a tier go.

        Args:
            tier: Which has a policy.
            wanted: Slots. With several groups an entry has several, and more may leave.
            run_limit: Runs at most, so that no call takes long.
            newcomer: Visit and position of a chunk for which they leave; nothing does that is worth more.

        Returns:
            Fewer than ``wanted`` when the rest must stay, or for the limit, or is worth more.
        """
        gone, policy = Evicted(), self._policies[tier]
        if policy is None:
            return gone
        if (
            newcomer is None
            and not policy.remembers
            and len(self._slots) == 1
            and not self._may_have_holes(0)
        ):
            self._drop_runs(tier, policy, wanted, run_limit, gone)
            return gone
        while gone.count < wanted and gone.run_count < run_limit:
            if newcomer is not None and self._yields(tier, *newcomer):
                break
            named = policy.victim()
            if named is None:
                break
            gone.run_count += 1
            node, most = named
            keep = max(self.held(tier, node) - min(wanted - gone.count, most), self._pinned(node))
            self._drop(tier, node, keep, gone)
        self._forget(tier)
        return gone

    def refuses(self, tier: int) -> bool:
        """Whether a tier's policy ever says that something is not worth a place."""
        return self._learning[tier] is not None

    def worth(self, tier: int, visit: int, start: int, stop: int, room: int) -> int:
        """Say up to which position what a visit would bring is worth a place, as things are.

        Args:
            tier: Where.
            visit: Who would bring it.
            start: First position.
            stop: One past the last.
            room: Positions for which nothing has to leave.

        Returns:
            ``stop`` where the policy refuses nothing. The rest is worth less than all that may leave.
        """
        policy = self._learning[tier]
        if policy is None or stop - start <= room:
            return stop
        for begin in reversed((start, *policy.seams(visit, start, stop))):
            if not policy.yields(visit, begin):
                return stop
            stop = max(begin, start + room)
            if begin < stop:
                break
        return stop

    def newcomer(self, tier: int, visit: int, start: int, stop: int) -> tuple[int, int] | None:
        """Name what the last of some positions is compared with others by, for ``evict``."""
        policy = self._learning[tier]
        return None if policy is None else (visit, (start, *policy.seams(visit, start, stop))[-1])

    def review(self, tier: int, node: int) -> None:
        """Tell a tier's policy anew whether chunks at the end of a node may leave."""
        self._review(tier, node)

    def lose(self, tier: int, group: int, keys: Sequence[bytes], chunk_index: int) -> bool:
        """Note that a tier has not got a chunk after all; what extends it stays, and waits for it.

        Returns:
            Whether the tier was thought to have it.
        """
        stride = self._groups[group].stride
        end = (chunk_index + 1) * stride
        nodes, known = self.tree.find(keys, end)
        row = tier * len(self._groups) + group
        if known < end:
            return False
        node = nodes[-1]
        if end - self.tree.start[node] < self.tree.count[node]:
            node = self._split(node, end - self.tree.start[node])
        last = self.tree.count[node] - 1
        if self._have[row][node] <= last or self._slots[row][self.tree.entry[node] + last] == ABSENT:
            return False
        held = self.held(tier, node)
        self._slots[row][self.tree.entry[node] + last] = ABSENT
        # Of a coarse chunk the positions before its last hold nothing by themselves.
        self._have[row][node] = max(0, last + 1 - stride)
        self.has_holes = True
        self._note_loss(tier, node, held)
        return True

    # -- inside ---------------------------------------------------------------------------------

    def _note_loss(self, tier: int, node: int, held: int) -> None:
        """Tell a policy and the tree what a tier has lost at the end of a node; it had ``held`` entries."""
        left, policy = self.held(tier, node), self._policies[tier]
        above = self.tree.parent[node]
        if not left:
            self._kids[tier][above] -= 1
        if policy is not None and left < held:
            if left:
                policy.shrunk(node, held - left)
            else:
                policy.removed(node)
        self._prune(node)
        self._review_all(node)
        self._review_all(above)

    def _yields(self, tier: int, visit: int, position: int) -> bool:
        policy = self._learning[tier]
        return policy is not None and policy.yields(visit, position)

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

    def _split(self, node: int, at: int) -> int:
        """Cut a node after ``at`` entries in the tree, in every row and in every policy."""
        held = [self.held(tier, node) for tier in self._tiers]
        head = self.tree.split(node, at)
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
        # Chunks of a window come without those before them: a tier may have nothing else there.
        if self.has_holes or self._windowed:
            return True
        others = [other for other in self._tiers if other != tier]
        if any(self.held(other, node) >= held for other in others):
            return True
        return not any(self._kids[other][node] for other in others)

    def _drop_runs(
        self, tier: int, policy: EvictionPolicy, wanted: int, run_limit: int, gone: Evicted
    ) -> None:
        """Do what ``evict`` does in the usual case: one row without holes, and whole runs that vanish.

        Everything a run costs is here and in what this calls, as a long prompt takes the place of hundreds.
        """
        tree, pins, row, have = self.tree, self._pins, self._slots[0], self._have[0]
        entries, parents, kids, held_kids = tree.entry, tree.parent, tree.kids, self._kids[tier]
        slots, names = gone.slots, gone.names
        count = run_count = 0
        while count < wanted and run_count < run_limit and (named := policy.victim()) is not None:
            run_count += 1
            node, most = named
            held = have[node]
            if held > wanted - count or held > most or kids[node] or node in pins:
                gone.count = count
                keep = max(held - min(wanted - count, most), self._pinned(node))
                self._drop(tier, node, keep, gone)
                count = gone.count
                continue
            entry, above = entries[node], parents[node]
            # Not copied: an entry that has left is written when it is given to somebody else.
            slots.append(row[entry : entry + held])
            names.append((0, tree.remove(node)))
            count += held
            have[node] = 0
            held_kids[above] -= 1
            policy.removed(node)
            if above != ROOT:
                self._prune(above)
                self._review(tier, above)
        gone.count, gone.run_count = count, run_count

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
