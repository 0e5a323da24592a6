"""Small traces, and what should come of them, told block by block."""

from collections.abc import Sequence

from hypothesis import strategies as st

from kvtide.sim.accesses import Accesses, accesses_of
from kvtide.sim.traces.request import TraceRequest
from kvtide.testing.workloads import chained_hashes

Prompt = tuple[int, ...]


def traced(prompts: Sequence[Prompt], block_tokens: int = 16) -> Accesses:
    """A trace of prompts of one token a block, a second apart."""
    return accesses_of(
        TraceRequest(float(second), chained_hashes(prompt, 8), block_tokens, len(prompt) * block_tokens)
        for second, prompt in enumerate(prompts)
    )


def prompts(tokens: int, longest: int, most: int) -> st.SearchStrategy[list[Prompt]]:
    """Few tokens, so that prompts share much."""
    prompt = st.lists(st.integers(0, tokens - 1), max_size=longest).map(tuple)
    return st.lists(prompt, min_size=1, max_size=most)


def blocks_of(prompt: Prompt) -> list[Prompt]:
    """A block is named by all before it."""
    return [prompt[:end] for end in range(1, len(prompt) + 1)]


def leading(prompt: Prompt, held: set[Prompt]) -> int:
    """Blocks that are there, with all before them."""
    return next((i for i, block in enumerate(blocks_of(prompt)) if block not in held), len(prompt))


class NaiveLRU:
    """LRU over single blocks, of a prompt the deeper first: what something extends never leaves."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[Prompt, int] = {}
        self.stored = 0

    def ask(self, prompt: Prompt, now: int) -> int:
        hits = leading(prompt, set(self.used))
        blocks = blocks_of(prompt)
        self.used |= dict.fromkeys(blocks[:hits], now)
        for block in blocks[hits : self.capacity]:
            if len(self.used) == self.capacity:
                del self.used[min(self.used, key=lambda one: (self.used[one], -len(one)))]
            self.used[block] = now
            self.stored += 1
        return hits
