"""Whether a load leaves room for those who hold blocks and have not run since.

vLLM 0.32 admits a load when the rest of what other loaded requests need is free, too. Where a group sees a
window it counts too little of that: loaded requests can hold so much that none of them has room to run, and
none of them is ever preempted. Knows block tables and token counts; does not know copies.
"""

from collections.abc import Iterable

from kvtide.geometry import KVGeometry
from kvtide.scheduler.fences import NULL_BLOCK
from kvtide.scheduler.state import RequestOffloadState


def leaves_room(
    geometry: KVGeometry,
    free_blocks: int,
    parked: Iterable[RequestOffloadState],
    state: RequestOffloadState,
    restored_tokens: int,
) -> bool:
    """Say whether, once all who run have ended, each of these requests has room for the rest of its prompt.

    Args:
        geometry: Of the groups.
        free_blocks: Of the device, were nobody there.
        parked: Requests that hold blocks and have not run since.
        state: Of one that owns no blocks yet.
        restored_tokens: Tokens it would have after a load.
    """
    most = 0
    for group in geometry.groups:
        restored, needed = (
            -(-restored_tokens // group.tokens_per_block),
            group.first_needed_token(restored_tokens),
        )
        free_blocks -= restored - needed // group.tokens_per_block
        most += max(0, -(-state.request.num_tokens // group.tokens_per_block) - restored)
    for other in parked:
        if other is state:
            continue
        missing = 0
        for group_state, group in zip(other.groups, geometry.groups, strict=True):
            free_blocks -= sum(block != NULL_BLOCK for block in group_state.block_ids)
            blocks = -(-other.request.num_tokens // group.tokens_per_block)
            missing += max(0, blocks - len(group_state.block_ids))
        free_blocks -= len(geometry.others)
        most = max(most, missing)
    return free_blocks - len(geometry.others) >= most
