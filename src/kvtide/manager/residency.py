"""What each tier holds of the prefix tree: reading.

A *row* is one KV cache group in one tier: a slot per entry of the tree. Full attention keeps a row without
holes within a node, so that a number per node says how far it reaches; windowed and recurrent groups may
have holes and are asked slot by slot. Knows no pins, no uses and no policy.

Positions count chunks of the finest group from the beginning of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.manager.tree import Path, PrefixTree

ABSENT = -1


@dataclass(frozen=True, slots=True)
class CatalogGroup:
    """One KV cache group, as the catalog sees it.

    Attributes:
        stride: Positions one of its chunks spans.
        window: Chunks before a position that a reader needs to continue there; None for all of them.
        local: With chunked-local attention, those back to the last multiple of ``window``.
    """

    stride: int = 1
    window: int | None = None
    local: bool = False

    def needed_before(self, chunk_count: int) -> int:
        """How many chunks just before a whole number of chunks a reader needs to continue there."""
        if self.window is None:
            return chunk_count
        return chunk_count % self.window if self.local else min(self.window, chunk_count)


class Residency:
    """Rows over the tree, one per group and tier.

    Args:
        groups: The KV cache groups.
        tier_count: How many tiers there are, the nearest first.

    Attributes:
        tree: The prefixes; to be read.
    """

    def __init__(self, groups: Sequence[CatalogGroup], tier_count: int) -> None:
        self.tree = PrefixTree()
        self._groups = tuple(groups)
        self._tiers = range(tier_count)
        self._slots = [np.empty(0, dtype=np.int32) for _ in range(len(groups) * tier_count)]
        self._have = [self.tree.columns.ints() for _ in self._slots]
        self._reach = [self._have[tier * len(groups) :][: len(groups)] for tier in self._tiers]
        self._serving = tuple(self._tiers)

    def mask(self, tier: int, in_service: bool) -> None:
        """Leave a tier out of every answer, or take it in again."""
        others = {one for one in self._serving if one != tier}
        self._serving = tuple(sorted(others | {tier} if in_service else others))

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
        path = self.tree.find(keys, stop * self._groups[group].stride)
        return self._resident(group, path, start, stop, self._serving if tier is None else (tier,))

    def slots(self, tier: int, group: int, keys: Sequence[bytes], start: int, stop: int) -> np.ndarray:
        """Give ``int32[n]``: slots of the chunks ``[start, stop)`` that the tier knows, ABSENT for holes."""
        stride = self._groups[group].stride
        path = self.tree.find(keys, stop * stride)
        return self._slots_on(path, tier, group, start * stride)

    @property
    def serving(self) -> tuple[int, ...]:
        """The tiers in service, the nearest first."""
        return self._serving

    def restore_point(self, keys: Sequence[bytes], stop: int, only: Sequence[int] | None = None) -> int:
        """Find the deepest position, ``stop`` at most, at which every group has what a reader needs.

        Args:
            keys: Hashes from the beginning of the prompt, one a position.
            stop: Position.
            only: In these tiers, in service or not; None: in any tier in service.
        """
        nodes, known = path = self.tree.find(keys, stop)
        tiers = self._serving if only is None else tuple(only)
        point, windowed = known, []
        for index, group in enumerate(self._groups):
            if group.window is None:
                chunks = known // group.stride
                point = min(point, group.stride * self._resident(index, path, 0, chunks, tiers))
            else:
                windowed.append((group, _runs_before(self._present(index, tiers, nodes, known))))
        settled = False
        while point and not settled:
            settled = True
            for group in self._groups:
                if point % group.stride:
                    point -= point % group.stride
                    settled = False
            for group, before in windowed:
                chunks = point // group.stride
                if point and before[chunks] < group.needed_before(chunks):
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
                    found.append((group, chosen_names(names, there, self.tree.width)))
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
        rows = self._reach[tier]
        return rows[0][node] if len(rows) == 1 else max(row[node] for row in rows)

    def lacks(self, tier: int, other: int, node: int) -> bool:
        """Whether a tier lacks anything of a node that another one has."""
        entry, groups = self.tree.entry[node], len(self._groups)
        end = entry + self.tree.count[node]
        return any(
            bool(
                (
                    (self._slots[other * groups + group][entry:end] != ABSENT)
                    & (self._slots[tier * groups + group][entry:end] == ABSENT)
                ).any()
            )
            for group in range(groups)
        )

    # -- inside ---------------------------------------------------------------------------------

    def _resident(self, group: int, path: Path, start: int, stop: int, tiers: Sequence[int]) -> int:
        nodes, known = path
        if self._groups[group].window is not None:
            there = self._present(group, tiers, nodes, known)[start:stop]
            return len(there) if there.all() else int(there.argmin())
        starts, counts, stride = self.tree.start, self.tree.count, self._groups[group].stride
        rows = [self._have[tier * len(self._groups) + group] for tier in tiers]
        position = start * stride
        for node in nodes:
            begin = starts[node]
            end = begin + counts[node]
            if end <= position:
                continue
            reach = begin + (rows[0][node] if len(rows) == 1 else max((row[node] for row in rows), default=0))
            position = max(position, min(reach, known))
            if position < end:
                break
        return position // stride - start

    def _slots_on(self, path: Path, tier: int, group: int, begin: int) -> np.ndarray:
        """Slots of the chunks that end on a path, from position ``begin`` on."""
        nodes, known = path
        stride, tree = self._groups[group].stride, self.tree
        row, parts = self._slots[tier * len(self._groups) + group], []
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


def _runs_before(there: np.ndarray) -> np.ndarray:
    """``int[n + 1]``: how many chunks in a row are there just before chunk i."""
    before = np.zeros(len(there) + 1, dtype=np.int64)
    index = np.arange(1, len(there) + 1)
    missing = np.where(there, 0, index)
    before[1:] = index - np.maximum.accumulate(missing) if len(there) else 0
    return before


def chosen_names(names: bytes, chosen: np.ndarray, width: int) -> bytes:
    """Pick some of the hashes that lie one after another."""
    return b"".join(names[i * width : (i + 1) * width] for i in np.flatnonzero(chosen))
