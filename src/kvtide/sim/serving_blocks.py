"""The engine's own block pool, with its prefix cache: which block holds what, and which is handed out next.

Does what vLLM's ``BlockPool`` does, over numbers: of the blocks nobody uses, those that hold nothing go
first, then the least recently freed, and of one request the last block before the first. Knows no requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from kvtide.errors import ConfigError

LEAST_BLOCKS = 2
"""One that is never handed out, as vLLM's block 0, and one that is."""


class EngineBlocks:
    """Blocks 1 to ``block_count - 1``; what the scheduler half asks of it is ``BlockPool``.

    Args:
        block_count: As ``--num-gpu-blocks-override`` of vLLM: the one that is never handed out counts.

    Raises:
        ConfigError: Too few.
    """

    def __init__(self, block_count: int) -> None:
        if block_count < LEAST_BLOCKS:
            raise ConfigError("engine_blocks", block_count, f"give {LEAST_BLOCKS} or more")
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, block_count))
        self._uses = [0] * block_count
        self._names: list[bytes | None] = [None] * block_count
        self._named: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # further blocks that hold the same
        self.blocks: Sequence[int] = range(block_count)
        self.free_block_queue: Any = None  # read by lazy stores alone, which no replay asks for

    @property
    def free_count(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    def find(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """Find the blocks of the longest prefix that is here, of at most ``most`` blocks."""
        found = []
        for name in hashes[:most]:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def idle_count(self, blocks: Sequence[int]) -> int:
        """Count those of some blocks that nobody uses."""
        return sum(not self._uses[block] for block in blocks)

    def take(self, count: int) -> list[int]:
        """Hand out blocks, of which there have to be as many; what they held is forgotten."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._uses[block] = 1
            taken.append(block)
        return taken

    def name(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Note what blocks hold, or will when this step has run, so that others can use it."""
        for block, name in zip(blocks, hashes, strict=True):
            if self._names[block] is not None:
                continue
            self._names[block] = name
            if self._named.setdefault(name, block) != block:
                self._twins.setdefault(name, []).append(block)

    # -- ``BlockPool`` ------------------------------------------------------------------------------

    def touch(self, blocks: Sequence[int]) -> None:
        """Take one reference on each block."""
        for block in blocks:
            if not self._uses[block]:
                del self._free[block]
            self._uses[block] += 1

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        """Give one reference of each back; what comes first is handed out first."""
        nameless = []
        for block in ordered_blocks:
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            if self._names[block] is None:
                nameless.append(block)
            else:
                self._free[block] = None
        for block in reversed(nameless):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[int] | None:
        """Find a block by what it holds."""
        block = self._named.get(block_hash)
        return None if block is None else [block]

    def check_invariants(self, used: int) -> None:
        """Check that every block is free or used, and each name leads to a block of that name.

        Args:
            used: Blocks that somebody should be using.

        Raises:
            AssertionError: It is not so.
        """
        in_use = sum(count > 0 for count in self._uses)
        assert in_use == used, f"{in_use} blocks are in use, {used} should be"
        assert in_use + len(self._free) == len(self.blocks) - 1, "a block is neither free nor used"
        named = [*self._named.values(), *(block for twins in self._twins.values() for block in twins)]
        assert sorted(named) == [block for block in self.blocks if self._names[block] is not None]

    # -- inside -------------------------------------------------------------------------------------

    def _forget(self, block: int) -> None:
        name, self._names[block] = self._names[block], None
        if name is None:
            return
        twins = self._twins.get(name)
        if self._named[name] != block:
            assert twins is not None
            twins.remove(block)
        elif twins:
            self._named[name] = twins.pop(0)
        else:
            del self._named[name]
        if twins is not None and not twins:
            del self._twins[name]
