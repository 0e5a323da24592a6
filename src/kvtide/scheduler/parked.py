"""Requests that hold blocks and have not run, and those whose load has failed: what vLLM 0.32 makes of them.

It lets loaded requests run in the order of its queue, frees the blocks of a failed load when it comes to that
request, and stops looking at the first that does not fit: so what is offered to one can hold up all others,
for ever, where nothing runs that could be preempted. Knows block tables and token counts; not copies.
"""

from kvtide.geometry import KVGeometry
from kvtide.scheduler.fences import NULL_BLOCK
from kvtide.scheduler.holds import BlockHolds
from kvtide.scheduler.state import RequestOffloadState


class ParkedRequests:
    """Who was given blocks and has not run since, and whose load has failed and has not run since.

    Args:
        geometry: Of the groups.
        holds: Knows the engine's pool.

    Attributes:
        unsettled: Whose load has failed and has not run since; to be read.
        vllm_counts_right: Of one group without a window, vLLM's own account of who has room is exact.
    """

    def __init__(self, geometry: KVGeometry, holds: BlockHolds) -> None:
        self._geometry = geometry
        self._holds = holds
        self._parked: dict[str, RequestOffloadState] = {}
        self.unsettled: set[str] = set()
        self.vllm_counts_right = geometry.is_one_prefix and not geometry.others

    def admitted(self, state: RequestOffloadState) -> None:
        """Note a request that was given blocks."""
        self._parked[state.request.request_id] = state

    def load_failed(self, request_id: str) -> None:
        """Note a request whose load has failed, whoever loaded; vLLM frees its blocks when it asks for it."""
        self.unsettled.add(request_id)

    def settled(self, request_id: str) -> None:
        """Note a request that runs, or has ended."""
        self._parked.pop(request_id, None)
        self.unsettled.discard(request_id)

    def stands_back(self, request_id: str) -> bool:
        """Say whether a request that owns no blocks is to be asked for again later, while some are unsettled.

        vLLM 0.32 keeps a request whose load has failed in front, with all its blocks counted as reserved.
        Where a load does not fit beside them, or it does not fit itself, vLLM stops looking, and requests
        behind it that hold the blocks are not let on: nothing ever runs. So it stands back while others have
        blocks and have not run, however long: each of them runs, ends, fails or is given up.
        """
        # Whoever is asked for owns no blocks; a load that failed leaves them until vLLM comes to it.
        self._parked.pop(request_id, None)
        return request_id in self.unsettled and bool(self._parked)

    def leave_room_for(self, state: RequestOffloadState, restored_tokens: int) -> bool:
        """Whether, after a load and once all who run have ended, each can compute the rest of its prompt.

        vLLM 0.32 admits a load when the rest of what other loaded requests need is free, too. Where a group
        sees a window it counts too little of that: loaded requests can hold so much that none of them has
        room to run, and none of them is ever preempted. Not to be asked where ``vllm_counts_right``.

        Args:
            state: Of a request that owns no blocks yet.
            restored_tokens: Tokens it would have after the load.
        """
        free = self._holds.free_count
        if free is None or not self._parked:
            return True
        held, most = self._after_load(state, restored_tokens)
        for other in self._parked.values():
            if other is state:
                continue
            loaded = len(other.groups[0].block_ids) * self._geometry.groups[0].tokens_per_block
            held_apart, missing = self._of_other_groups(other, loaded)
            free -= held_apart
            for group_state, group in zip(other.groups, self._geometry.groups, strict=True):
                free -= sum(block != NULL_BLOCK for block in group_state.block_ids)
                blocks = -(-other.request.num_tokens // group.tokens_per_block)
                missing += max(0, blocks - len(group_state.block_ids))
            most = max(most, missing)
        return free - held >= most

    def _after_load(self, state: RequestOffloadState, restored_tokens: int) -> tuple[int, int]:
        """Count the blocks that a request would hold after a load, and those it would lack then."""
        held, missing = self._of_other_groups(state, restored_tokens)
        for group in self._geometry.groups:
            restored = -(-restored_tokens // group.tokens_per_block)
            held += restored - group.first_needed_token(restored_tokens) // group.tokens_per_block
            missing += max(0, -(-state.request.num_tokens // group.tokens_per_block) - restored)
        return held, missing

    def _of_other_groups(self, state: RequestOffloadState, token_count: int) -> tuple[int, int]:
        """Count the same of groups that are not offloaded, for a request that has so many tokens."""
        others, needed = self._geometry.others, state.request.num_tokens
        held = sum(group.held_blocks(token_count) for group in others)
        return held, sum(group.all_blocks(needed) - group.all_blocks(token_count) for group in others)
