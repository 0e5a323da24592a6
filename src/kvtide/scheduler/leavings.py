"""What requests left behind on the device, block by block, when they finished or were preempted.

Knows block ids, hashes and what came before a block. A request adds what nobody has left before it, so a
shared prefix is kept once: a tree of leavings with an entry a block, and never more entries than blocks. Does
not know the engine's pool: whether a block still holds what is written here, the pool says.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.geometry import GroupGeometry
from kvtide.jobs import ReqContext


def hashes_per_block(group: GroupGeometry) -> int:
    """Entries of ``request.block_hashes`` that a block of a group spans."""
    return group.hashes_per_chunk // group.blocks_per_chunk


@dataclass(slots=True, eq=False)
class Leaving:
    """The blocks one request added to a prefix; what is before them it has found there.

    Attributes:
        context: Of the request.
        lora_request: Its adapter, for events.
        group: Whose blocks they are.
        parent: The leaving with the block before its first one; None at the beginning of a prompt.
        first: Index of its first block, counted from there.
        block_ids: The blocks.
        hashes: The engine's, as many a block as the group's blocks have.
        tokens: Ids of their tokens; empty where nobody listens to events.
    """

    context: ReqContext
    lora_request: Any
    group: GroupGeometry
    parent: "Leaving | None"
    first: int
    block_ids: list[int]
    hashes: list[bytes]
    tokens: list[int]

    @property
    def end(self) -> int:
        """One past the index of its last block."""
        return self.first + len(self.block_ids)

    def hash_of(self, index: int) -> bytes:
        """The engine's hash of one of its blocks, counted from the beginning of the prompt."""
        return self.hashes[(index - self.first + 1) * hashes_per_block(self.group) - 1]

    def is_reached(self) -> bool:
        """Whether everything before it is still written down."""
        leaving = self
        while leaving.parent is not None:
            if leaving.parent.end < leaving.first:
                return False
            leaving = leaving.parent
        return True


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's first blocks.

    Attributes:
        block_ids: ``n`` blocks.
        hashes: Of all of them, in the grain of ``request.block_hashes``.
        tokens: Ids of their tokens; empty where nobody listens to events.
    """

    block_ids: list[int]
    hashes: list[bytes]
    tokens: list[int]


class Leavings:
    """All of them, by block."""

    def __init__(self) -> None:
        self._at: list[Leaving | None] = []  # per block id
        self._place = array("i")  # per block id, where in its leaving
        self._newest: dict[int, dict[bytes, int]] = {}  # per group, by the hash of a block

    def add(
        self,
        context: ReqContext,
        lora_request: Any,
        group: GroupGeometry,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        tokens: Sequence[int],
    ) -> None:
        """Write down what a request has left, as far as it is new.

        Args:
            context: Of the request.
            lora_request: Its adapter.
            group: Whose blocks.
            block_ids: From the beginning of the prompt.
            hashes: From there too, for all of them at least.
            tokens: From there too; empty where nobody listens to events.
        """
        per_block, size = hashes_per_block(group), group.tokens_per_block
        if not block_ids:
            return
        self._cover(max(block_ids))
        parent, first, at = None, 0, self._at
        for index in range(len(block_ids) - 1, -1, -1):
            if (leaving := at[block_ids[index]]) is None:
                continue
            # Hashes are chained: a block that is there under the same one has the same before it.
            if self._is_same(leaving, group, block_ids[index], index, hashes[(index + 1) * per_block - 1]):
                parent, first = leaving, index + 1
                break
        if first == len(block_ids):
            return
        new = list(block_ids[first:])
        self.drop(new)
        leaving = Leaving(
            context,
            lora_request,
            group,
            parent,
            first,
            new,
            list(hashes[first * per_block : len(block_ids) * per_block]),
            list(tokens[first * size : len(block_ids) * size]),
        )
        places = self._place
        for place, block_id in enumerate(new):
            at[block_id] = leaving
            places[block_id] = place
        last_hashes = leaving.hashes[per_block - 1 :: per_block]
        self._newest.setdefault(group.group_index, {}).update(zip(last_hashes, new, strict=True))

    def find(self, block_id: int) -> tuple[Leaving, int] | None:
        """Say what was left in a block: whose, and its index from the beginning of the prompt."""
        leaving = self._at[block_id] if block_id < len(self._at) else None
        return None if leaving is None else (leaving, leaving.first + self._place[block_id])

    def newest(self, group: GroupGeometry, block_hash: bytes) -> int | None:
        """Name the block in which something was left last; None when that one was dropped."""
        return self._newest[group.group_index].get(block_hash)

    def prefix(self, leaving: Leaving, block_count: int) -> Prefix | None:
        """Collect the first ``block_count`` blocks of a prompt, which ends within ``leaving``.

        Returns:
            None when something before it has been dropped: it cannot be named any more.
        """
        parts, count, one = [], block_count, leaving
        while True:
            if one.end < count:
                return None
            parts.append((one, count - one.first))
            if one.parent is None:
                break
            count, one = one.first, one.parent
        block_ids: list[int] = []
        hashes: list[bytes] = []
        tokens: list[int] = []
        for one, count in reversed(parts):
            block_ids += one.block_ids[:count]
            hashes += one.hashes[: count * hashes_per_block(one.group)]
            tokens += one.tokens[: count * one.group.tokens_per_block]
        return Prefix(block_ids, hashes, tokens)

    def drop(self, block_ids: Sequence[int]) -> None:
        """Strike out blocks that hold something else now, and what came after them in their leavings."""
        known = len(self._at)
        for block_id in block_ids:
            leaving = self._at[block_id] if block_id < known else None
            if leaving is None:
                continue
            place, group = self._place[block_id], leaving.group
            newest, per_block = self._newest[group.group_index], hashes_per_block(group)
            last_hashes = leaving.hashes[(place + 1) * per_block - 1 :: per_block]
            for gone, block_hash in zip(leaving.block_ids[place:], last_hashes, strict=True):
                self._at[gone] = None
                if newest.get(block_hash) == gone:
                    del newest[block_hash]
            del leaving.block_ids[place:]
            del leaving.hashes[place * per_block :]
            del leaving.tokens[place * leaving.group.tokens_per_block :]

    def clear(self) -> None:
        """Forget everything."""
        self._newest.clear()
        self._at.clear()
        del self._place[:]

    def __len__(self) -> int:
        return sum(leaving is not None for leaving in self._at)

    def check_invariants(self) -> None:
        """Check that blocks and leavings name one another."""
        for block_id, leaving in enumerate(self._at):
            if leaving is not None:
                place = self._place[block_id]
                assert leaving.block_ids[place] == block_id, f"block {block_id} is not in its leaving"
        for leaving in {one for one in self._at if one is not None}:
            count = len(leaving.block_ids)
            assert len(leaving.hashes) == count * hashes_per_block(leaving.group), "blocks without a hash"
            assert all(self._at[one] is leaving for one in leaving.block_ids), "a block of two leavings"

    # -- inside ---------------------------------------------------------------------------------

    def _is_same(
        self, leaving: Leaving, group: GroupGeometry, block_id: int, index: int, block_hash: bytes
    ) -> bool:
        """Whether a leaving has this block as the same part of the same prompt."""
        if leaving.group is not group or leaving.first + self._place[block_id] != index:
            return False
        return leaving.hash_of(index) == block_hash and leaving.is_reached()

    def _cover(self, block_id: int) -> None:
        more = block_id + 1 - len(self._at)
        if more > 0:
            self._at.extend([None] * more)
            self._place.extend([0] * more)
