"""How much of a prompt can be brought back: the deepest restore point that every group can serve.

A question without effects: it is asked every step for every waiting request, and the engine may throw
the answer away.
"""

from dataclasses import dataclass

from kvtide.geometry import KVGeometry, chunks_needed
from kvtide.manager.base import OffloadingManager
from kvtide.scheduler.state import LookupMemo, RequestOffloadState


@dataclass(frozen=True, slots=True)
class Found:
    """Answer of ``look_up``.

    Attributes:
        restored_tokens: Tokens of the prompt, from its beginning, that the request would have after a
            load; at most the engine's own hit when there is nothing to load.
        later: More is on its way into host memory.
    """

    restored_tokens: int
    later: bool


def readable_tokens(state: RequestOffloadState, geometry: KVGeometry, computed_tokens: int = 0) -> int:
    """Count the tokens that may be brought back at most, whatever is stored.

    The last token is always computed, as after a hit in the engine's own cache: its logits are needed.
    """
    request = state.request
    tokens_per_hash = geometry.groups[0].tokens_per_hash
    limit = min(request.num_tokens - 1, len(request.block_hashes) * tokens_per_hash)
    limit = min(limit, computed_tokens + state.limits.max_load_tokens)
    if state.barred_from_chunk is not None:
        limit = min(limit, state.barred_from_chunk * geometry.groups[0].tokens_per_chunk)
    return geometry.restore_point(max(limit, 0))


def look_up(
    state: RequestOffloadState, geometry: KVGeometry, manager: OffloadingManager, computed_tokens: int
) -> Found:
    """Shrink the candidate to what every group can serve: a fixed point, reached from above."""
    memo = state.memo
    hash_count = len(state.request.block_hashes)
    if (
        memo is not None
        and memo.computed_tokens == computed_tokens
        and memo.hash_count == hash_count
        and memo.residency_epoch == manager.residency_epoch
    ):
        return Found(memo.restored_tokens, memo.later)
    candidate, later = readable_tokens(state, geometry, computed_tokens), False
    settled = False
    while not settled and candidate > computed_tokens:
        settled = True
        for group in geometry.groups:
            needed = chunks_needed(group, computed_tokens, candidate)
            run = group.run(state.request.block_hashes, needed.start, needed.stop)
            result = manager.lookup(run, state.context)
            served = (needed.start + result.ready_count) * group.tokens_per_chunk
            if served < candidate:
                candidate, settled = geometry.restore_point(served), False
                later = later or result.later
    state.memo = LookupMemo(computed_tokens, hash_count, manager.residency_epoch, candidate, later)
    return Found(candidate, later)
