"""Tiers below host memory chunk by chunk: what should be where, told by jobs and answers alone.

Knows names in sets and dicts: what each rank really holds, and what the books may believe. Takes from the
books under test what is free to choose, who leaves, and sees it only in what the ranks are told to forget.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtide.jobs import HopKey, StorageLoadStoreSpec
from kvtide.keys import OffloadKey, make_offload_key


@dataclass(slots=True, eq=False)
class NaiveWrite:
    """One hop to a tier, from its planning until all ranks have answered and its parent is there.

    Attributes:
        tier: From 1.
        keys: Its chunks.
        parent: Of the first of them.
        behind: The open write that has the parent, if that is what it waits for.
        owing: Ranks that have not answered.
        done: Leading chunks that every rank has.
        ended: All ranks have answered.
        dropped: Given up: after a failure before it, or of before a reset.
    """

    tier: int
    keys: list[OffloadKey]
    parent: OffloadKey | None
    behind: "NaiveWrite | None"
    owing: set[int]
    done: int
    ended: bool = False
    dropped: bool = False


@dataclass(slots=True)
class NaiveTier:
    """One tier.

    Attributes:
        there: What the books should list.
        held: Per rank, what it has, whatever the books say.
        broken: Per rank, what has vanished or was damaged without anybody's knowledge.
        lost: What was struck out at any time: what extended it is a hole's other side.
        found: Of an earlier life, on every rank, and not told to forget: the books may list it by now.
    """

    held: list[set[OffloadKey]]
    there: set[OffloadKey] = field(default_factory=set)
    broken: list[set[OffloadKey]] = field(default_factory=list)
    lost: set[OffloadKey] = field(default_factory=set)
    found: set[OffloadKey] = field(default_factory=set)


class NaiveLadder:
    """All tiers below host memory.

    Args:
        tier_count: Tiers.
        rank_count: Ranks.
        looks_back: Per group, whether a chunk is of use only with all before it.
    """

    def __init__(self, tier_count: int, rank_count: int, looks_back: Sequence[bool]) -> None:
        self.ranks = range(rank_count)
        self.looks_back = tuple(looks_back)
        self.tiers = [
            NaiveTier([set() for _ in self.ranks], broken=[set() for _ in self.ranks])
            for _ in range(tier_count)
        ]
        self.parent: dict[OffloadKey, OffloadKey | None] = {}  # of every chunk ever seen
        self.index: dict[OffloadKey, int] = {}  # in its prompt
        self.writes: dict[HopKey, NaiveWrite] = {}
        self._waiting: list[NaiveWrite] = []

    # -- writes ---------------------------------------------------------------------------------

    def planned(self, key: HopKey, spec: StorageLoadStoreSpec, void: bool = False) -> None:
        """Note a hop to a tier; one of before a reset is told all the same, and means nothing."""
        keys = self.names(spec)
        every = set(self.ranks)
        if void:
            self.writes[key] = NaiveWrite(spec.tier, keys, None, None, every, 0, dropped=True)
            return
        parent = self.parent[keys[0]]
        behind = None
        if parent is not None and self.looks_back[spec.group_index]:
            state = self.tiers[spec.tier - 1]
            behind = self._pending_with(spec.tier, parent)
            if behind is None and parent not in state.there | state.found:
                # What it extends has failed before this was told.
                self.writes[key] = NaiveWrite(spec.tier, keys, None, None, every, 0, dropped=True)
                return
        taken = self.tiers[spec.tier - 1].there | self.pending_keys(spec.tier)
        assert not taken & set(keys), f"{key} writes what is there, or being written"
        self.writes[key] = NaiveWrite(spec.tier, keys, parent, behind, every, len(keys))

    def answered(self, key: HopKey, rank: int, done: int) -> None:
        """Note how a write ended on a rank: its leading ``done`` chunks are there; once a rank."""
        write = self.writes[key]
        write.owing.discard(rank)
        write.done = min(write.done, done)
        if write.owing:
            return
        del self.writes[key]
        write.ended = True
        if write.dropped:
            return
        came = write.keys[: write.done]
        for other in self._behind(write):
            if other.parent not in came:
                self._drop(other)
        write.keys = came
        if came:
            self._waiting.append(write)
            self._settle()

    def pending_keys(self, tier: int) -> set[OffloadKey]:
        """What is being written and was not given up, or waits for what it extends."""
        return {key for write in self._pending(tier) for key in write.keys}

    def touched_keys(self, tier: int) -> set[OffloadKey]:
        """What a rank may be writing."""
        return self.pending_keys(tier) | {
            key for write in self.writes.values() if write.tier == tier for key in write.keys
        }

    # -- the rest -------------------------------------------------------------------------------

    def forgets(self, tier: int, keys: Iterable[OffloadKey]) -> None:
        """Note what the ranks are told to forget."""
        state = self.tiers[tier - 1]
        pinned = {
            write.parent
            for write in self._pending(tier)
            if write.behind is None and self.looks_back[_group_of(write.keys[0])]
        }
        for key in keys:
            assert key not in pinned or key in state.lost, "what is being extended has left"
            assert key not in self.pending_keys(tier), "what is being written is to be forgotten"
            state.there.discard(key)
            state.found.discard(key)
            for rank in self.ranks:
                state.held[rank].discard(key)
                state.broken[rank].discard(key)

    def loses(self, tier: int, key: OffloadKey) -> None:
        """Note that a rank has told that it has not got a chunk."""
        state = self.tiers[tier - 1]
        if key in state.there:
            state.there.discard(key)
            state.lost.add(key)

    def reset(self, keeps: bool) -> None:
        """Forget everything; what ranks hold is right as it is, or forgotten by them as well."""
        for state in self.tiers:
            state.there, state.lost, state.found = set(), set(), set()
        for write in [*self.writes.values(), *self._waiting]:
            write.dropped = True
        self._waiting = []

    def rank_reset(self, rank: int) -> None:
        """Note that a rank has begun a generation: nothing of before is served."""
        for state in self.tiers:
            state.held[rank], state.broken[rank] = set(), set()

    def check(self, tier: int, listed: set[OffloadKey], warming: bool) -> None:
        """Compare the books of a tier, as they are after a step was told to the ranks."""
        state = self.tiers[tier - 1]
        new = listed - state.there
        assert new <= state.found, f"{_short(new - state.found)} listed, nobody has told of them"
        state.there |= new
        state.lost -= listed
        state.found -= new
        assert not state.there - listed, f"{_short(state.there - listed)} should be listed"
        for rank in self.ranks:
            lacking = listed - state.held[rank] - state.broken[rank]
            assert not lacking, f"tier {tier}: {_short(lacking)} listed, rank {rank} has them not"
            if not warming:
                kept = state.held[rank] - listed - self.touched_keys(tier)
                kept = {key for key in kept if not (key in state.found and self._waits(tier, key))}
                assert not kept, f"tier {tier}: rank {rank} keeps {_short(kept)} for nobody"
        for key in listed:
            above = self.parent[key]
            if above is not None and self.looks_back[_group_of(key)]:
                assert above in listed or above in state.lost, (
                    f"tier {tier}: {key.hex()[:6]} hangs in the air"
                )

    def names(self, spec: StorageLoadStoreSpec) -> list[OffloadKey]:
        """Keys of a hop's chunks; notes who extends whom."""
        keys = [make_offload_key(name, spec.group_index) for name in spec.hashes]
        above = None if spec.parent_hash is None else make_offload_key(spec.parent_hash, spec.group_index)
        self.parent.update(zip(keys, (above, *keys), strict=False))
        self.index.update(zip(keys, range(spec.start, spec.start + len(keys)), strict=True))
        return keys

    # -- inside ---------------------------------------------------------------------------------

    def _pending(self, tier: int) -> list[NaiveWrite]:
        every = [*self.writes.values(), *self._waiting]
        return [write for write in every if write.tier == tier and not write.dropped]

    def _waits(self, tier: int, key: OffloadKey) -> bool:
        """Whether what was found extends what is being written: it is listed when that has come."""
        pending, above = self.pending_keys(tier), self.parent[key]
        while above is not None and above not in pending:
            above = self.parent[above]
        return above is not None

    def _pending_with(self, tier: int, key: OffloadKey) -> NaiveWrite | None:
        return next((write for write in self._pending(tier) if key in write.keys), None)

    def _settle(self) -> None:
        ready = [write for write in self._waiting if write.behind is None]
        while ready:
            write = ready.pop()
            self._waiting.remove(write)
            self.tiers[write.tier - 1].there.update(write.keys)
            for other in self._behind(write):
                other.behind = None
                ready += [other] if other.ended else []

    def _drop(self, write: NaiveWrite) -> None:
        write.dropped = True
        if write in self._waiting:
            self._waiting.remove(write)
        for other in self._behind(write):
            self._drop(other)

    def _behind(self, write: NaiveWrite) -> list[NaiveWrite]:
        every = [*self.writes.values(), *self._waiting]
        return [other for other in every if other.behind is write and not other.dropped]


def _group_of(key: OffloadKey) -> int:
    return int.from_bytes(key[-4:], "big")


def _short(keys: Iterable[bytes]) -> list[str]:
    return sorted(key.hex()[:6] for key in keys)
