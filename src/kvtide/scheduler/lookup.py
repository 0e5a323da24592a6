"""How much of a prompt can be brought back: the deepest restore point that every group can serve.

A question without effects: it is asked every step for every waiting request, and the engine may throw
the answer away.
"""

from typing import NamedTuple

from kvtide.geometry import KVGeometry, chunks_needed
from kvtide.manager.base import OffloadingManager
from kvtide.scheduler.state import LookupMemo, RequestOffloadState


class Found(NamedTuple):
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
    request, finest = state.request, geometry.finest
    hashed_tokens = (len(request.block_hashes) - finest.lookahead_hashes) * finest.tokens_per_hash
    limit = min(request.num_tokens - 1, hashed_tokens)
    limit = max(0, min(limit, computed_tokens + state.limits.max_load_tokens))
    return limit - limit % geometry.restore_interval


def look_up(
    state: RequestOffloadState, geometry: KVGeometry, manager: OffloadingManager, computed_tokens: int
) -> Found:
    """Find what can be brought back; asked again with nothing changed, it is remembered."""
    memo = state.memo
    hash_count = len(state.request.block_hashes)
    if (
        memo is not None
        and memo.computed_tokens == computed_tokens
        and memo.hash_count == hash_count
        and memo.residency_epoch == manager.residency_epoch
    ):
        return Found(memo.restored_tokens, memo.later)
    limit = readable_tokens(state, geometry, computed_tokens)
    search = _of_one_prefix if geometry.is_one_prefix else _of_every_group
    found = search(state, geometry, manager, computed_tokens, limit)
    state.memo = LookupMemo(
        computed_tokens, hash_count, manager.residency_epoch, found.restored_tokens, found.later
    )
    return found


def _of_one_prefix(
    state: RequestOffloadState,
    geometry: KVGeometry,
    manager: OffloadingManager,
    computed_tokens: int,
    limit: int,
) -> Found:
    if limit <= computed_tokens:
        return Found(limit, False)
    # ``chunks_needed``, in short: the limit is a whole number of chunks.
    group = geometry.finest
    start, stop = computed_tokens // group.tokens_per_chunk, limit // group.tokens_per_chunk
    run = group.run(state.request.block_hashes, start, stop)
    ready_count, later = manager.lookup(run, state.context)
    if ready_count == stop - start:
        return Found(limit, False)
    return Found((start + ready_count) * group.tokens_per_chunk, later)


def _of_every_group(
    state: RequestOffloadState,
    geometry: KVGeometry,
    manager: OffloadingManager,
    computed_tokens: int,
    limit: int,
) -> Found:
    """Ask for the deepest point every group can serve: none is shrunk for the others' sake in vain."""
    finest = geometry.finest
    run = finest.run(state.request.block_hashes, 0, finest.full_chunks(limit))
    restored = geometry.restore_point(manager.restore_point(run) * finest.tokens_per_chunk)
    if restored >= limit or limit <= computed_tokens:
        return Found(restored, False)
    later = False
    for group in geometry.groups:
        needed = chunks_needed(group, computed_tokens, limit)
        missing = group.run(state.request.block_hashes, needed.start, needed.stop)
        later = later or (bool(needed) and manager.lookup(missing, state.context).later)
    return Found(restored, later)
