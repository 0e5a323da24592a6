"""Which blocks a trace asks for, request by request, as numbers.

What replays and the optimum are made from, small enough to be sent to another process. Knows no policy and no
capacity; a block that is not full is in no trace.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import KVTideError
from kvtide.sim.traces.request import TraceRequest


@dataclass(frozen=True, slots=True, eq=False)
class Accesses:
    """Every full block of every prompt, in order.

    Attributes:
        blocks: ``int32[n]``: numbers of the blocks, prompt after prompt, each from its beginning.
        starts: ``int64[m + 1]``: where in ``blocks`` each of m prompts begins, and n.
        arrivals_s: ``float64[m]``.
        hashes: Of each block, by its number.
        block_tokens: Tokens of a block.
    """

    blocks: NDArray[np.int32] = field(repr=False)
    starts: NDArray[np.int64] = field(repr=False)
    arrivals_s: NDArray[np.float64] = field(repr=False)
    hashes: list[bytes] = field(repr=False)
    block_tokens: int

    @property
    def request_count(self) -> int:
        """Prompts, those without a full block included."""
        return len(self.starts) - 1

    @property
    def asking_count(self) -> int:
        """Prompts that have a full block."""
        return int(np.count_nonzero(np.diff(self.starts)))

    @property
    def access_count(self) -> int:
        """Full blocks of all prompts."""
        return len(self.blocks)

    @property
    def unique_count(self) -> int:
        """Different full blocks."""
        return len(self.hashes)

    def prompts(self) -> Iterator[tuple[float, list[bytes]]]:
        """Give the arrival of each prompt that has a full block, and its hashes."""
        blocks, bounds = self.blocks.tolist(), self.starts.tolist()
        for arrival_s, start, stop in zip(self.arrivals_s.tolist(), bounds, bounds[1:], strict=False):
            if stop - start > 1:
                yield arrival_s, list(itemgetter(*blocks[start:stop])(self.hashes))
            elif stop > start:
                yield arrival_s, [self.hashes[blocks[start]]]


def accesses_of(requests: Iterable[TraceRequest]) -> Accesses:
    """Number the blocks of a trace.

    Raises:
        KVTideError: Requests disagree on the size of a block, or a block has other blocks before it than
            where it was first seen: then it is not one block, and nothing that is said of it would be true.
    """
    numbers: defaultdict[bytes, int] = defaultdict(count().__next__)
    blocks, starts, arrivals_s = array("i"), [0], []
    block_tokens = 0
    for request in requests:
        if not starts[1:]:
            block_tokens = request.block_tokens
        elif request.block_tokens != block_tokens:
            raise KVTideError(
                f"request {len(starts)} has blocks of {request.block_tokens} tokens, those before it of"
                f" {block_tokens}: replay one block size at a time"
            )
        blocks.extend(map(numbers.__getitem__, request.block_hashes))
        starts.append(len(blocks))
        arrivals_s.append(request.arrival_s)
    accesses = Accesses(
        np.array(blocks, dtype=np.int32),
        np.array(starts, dtype=np.int64),
        np.array(arrivals_s, dtype=np.float64),
        list(numbers),
        block_tokens,
    )
    _check_chained(accesses)
    return accesses


def _check_chained(accesses: Accesses) -> None:
    blocks = accesses.blocks
    before = np.full(len(blocks), -1, dtype=np.int32)
    before[1:] = blocks[:-1]
    firsts = accesses.starts[:-1]
    before[firsts[firsts < len(blocks)]] = -1
    parents = np.empty(accesses.unique_count, dtype=np.int32)
    parents[blocks[::-1]] = before[::-1]  # the first place is written last
    wrong = np.flatnonzero(parents[blocks] != before)
    if len(wrong):
        request = int(np.searchsorted(accesses.starts, wrong[0], side="right")) - 1
        index = int(wrong[0] - accesses.starts[request])
        raise KVTideError(
            f"block {index + 1} of request {request + 1} has other blocks before it than where it was first"
            " seen: hashes of a trace have to be chained, as an engine's are"
        )
