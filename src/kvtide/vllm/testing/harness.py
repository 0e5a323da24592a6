"""A model engine of one rank whose copier is told by hand when to finish."""

from pathlib import Path
from typing import Any

from kvtide.jobs import Direction
from kvtide.testing import HeldDevice
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.promises import WrongBytesError
from kvtide.vllm.testing.ranks import siblings_of
from kvtide.vllm.testing.shape import EngineShape, Siblings

LAYERS = ("layers.0", "layers.1", "layers.2")
WINDOWED_LAYERS = ("layers.3", "layers.4")

__all__ = ["Harness", "WrongBytesError"]


class Harness(ModelEngine):
    """An engine whose copies end when a test says so, in real time.

    Args:
        folder: An empty folder, for a model configuration.
        num_blocks: Of the device, the null block included.
        tokens_per_block: Of the device.
        asynchronous: Plan a step before the results of the last one are in.
        block_first: All layers of a block lie together.
        budget_tokens: Tokens a step may compute.
        host_pages: Pages of host memory; kvtide maps whole ones.
        siblings: Whether another connector loads too; then ``sibling.chance`` is the test's to set.
        window_tokens: Of a second group, which sees a window; None for no such group.
        settings: Of kvtide, beside the host memory.

    Attributes:
        store: Copier of stores.
        load: Copier of loads.
        sibling: The other connector's worker, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        num_blocks: int = 33,
        tokens_per_block: int = 4,
        asynchronous: bool = False,
        block_first: bool = False,
        budget_tokens: int = 256,
        host_pages: int = 8,
        siblings: Siblings = Siblings.NONE,
        window_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        self.store, self.load = HeldDevice(Direction.STORE), HeldDevice(Direction.LOAD)
        copiers = {Direction.STORE: self.store, Direction.LOAD: self.load}
        groups: tuple[GroupShape, ...] = (GroupShape(LAYERS, tokens_per_block),)
        if window_tokens is not None:
            groups += (GroupShape(WINDOWED_LAYERS, tokens_per_block, Kind.WINDOW, window_tokens),)
        shape = EngineShape(
            num_blocks,
            groups,
            asynchronous,
            block_first=block_first,
            budget_tokens=budget_tokens,
            host_pages=host_pages,
            siblings=siblings,
            settings=settings,
        )
        super().__init__(folder, shape, lambda _, direction: copiers[direction])
        self.sibling = next(iter(siblings_of(self.ranks)), None)
        self.store.waited.clear()
        self.load.waited.clear()

    def drain(self, limit: int = 200) -> None:
        """Step until the engine would go idle, copies finishing by themselves.

        Raises:
            AssertionError: It would not within ``limit`` steps, or the books do not balance.
        """
        self.store.auto_finish = self.load.auto_finish = True
        self.store.finish()
        self.load.finish()
        self.run_until_idle(limit)
        self.store.auto_finish = self.load.auto_finish = False
        self.check()
