"""Lazy stores: a chunk goes to host memory when the engine is about to hand out its block, and not before.

Looks along the front of the engine's free list for what requests have left there, and offers it. Whether a
block still holds it, the engine's pool says: each block that is stored is verified against its hash there.
What cannot be verified is not stored. Does not know which chunks host memory has; ``manager`` does.

Only groups in which a reader needs all chunks before a point are stored so: what windows and recurrent layers
have passed the engine frees while the request runs, in no order that a prefix could be told from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.geometry import GroupGeometry
from kvtide.keys import make_offload_key
from kvtide.manager.base import OffloadingManager
from kvtide.scheduler.engine import BlockPool
from kvtide.scheduler.leavings import Leaving, Leavings, Prefix, hashes_per_block
from kvtide.scheduler.limits import NO_LIMIT
from kvtide.scheduler.state import RequestOffloadState, SchedulerOffloadConfig
from kvtide.scheduler.stores import StorePlanner

OFFERS_PER_WALK = 48
"""Leavings that one walk plans stores of: some three milliseconds. The others wait for the next."""

NEVER = (-1, -1)
"""When a walk was cut short: at no time that comes again."""


@dataclass(slots=True)
class Departed:
    """What is kept of a request that is gone, as the owner of a store sees it (``EngineRequest``)."""

    request_id: str
    lora_request: Any
    all_token_ids: Sequence[int]
    block_hashes: list[Any] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False


class LazyStores:
    """What was left on the device, and how far along the free list it was looked for.

    A walk goes to the blocks of two steps, and is repeated when a quarter of them was handed out: so a store
    mostly has a step's time before anybody waits for it.

    Args:
        config: Geometry and limits.
        manager: Which chunk is where.
        stores: Plans what is found.

    Attributes:
        pool: The engine's; None before it was bound, when nothing can be seen.
    """

    def __init__(
        self, config: SchedulerOffloadConfig, manager: OffloadingManager, stores: StorePlanner
    ) -> None:
        self._config = config
        self._manager = manager
        self._stores = stores
        self._leavings = Leavings()
        self._horizon = 2 * config.blocks_per_step
        self._ahead = 0  # blocks at the front of the free list that were looked at and are still there
        self._whole: tuple[int, int, int] | None = None  # a free list that was looked at to its end
        self._left_count = 0
        self._refused: tuple[int, int] | None = None  # when a store was refused for want of room
        self.pool: BlockPool | None = None

    # -- what happens to requests ---------------------------------------------------------------

    def planned(self, state: RequestOffloadState, computed_tokens: int) -> None:
        """Note how far the forward that is being planned gets with a request."""
        # One that samples has computed all it knows, but the last token, whenever that is asked.
        known = state.request.num_tokens
        state.planned_tokens = computed_tokens if computed_tokens < known else NO_LIMIT

    def preempted(self, state: RequestOffloadState) -> None:
        """Write down what a request leaves behind that goes on later; vLLM has set its counters back."""
        if state.computed:
            self.left(state, min(state.planned_tokens, state.request.num_tokens - 1))

    def left(self, state: RequestOffloadState, computed_tokens: int) -> None:
        """Write down what a request leaves behind: whole chunks that have a hash and may be stored.

        Args:
            state: Of the request, with the tables it had.
            computed_tokens: Tokens whose KV is in them.
        """
        if state.stale:
            return
        request = state.request
        computed_tokens = min(computed_tokens, self._stores.last_token(state))
        for group_state, group in zip(state.groups, self._config.geometry.groups, strict=True):
            if not self._config.is_lazy(group):
                continue
            hashed = group.hashed_chunks(len(request.block_hashes))
            chunk_count = min(group.full_chunks(computed_tokens), hashed)
            chunk_count = min(chunk_count, len(group_state.block_ids) // group.blocks_per_chunk)
            self._leavings.add(
                state.context._replace(kv_transfer_params=None),
                request.lora_request,
                group,
                group_state.block_ids[: chunk_count * group.blocks_per_chunk],
                request.block_hashes,
                request.all_token_ids if self._config.with_events else (),
            )
        self._left_count += 1

    def ended(self, state: RequestOffloadState, computed_tokens: int, now_s: float) -> None:
        """Write down what a request leaves for good; where little is free, store it at once.

        Of a finished request the engine may free the blocks, and give them to others, in one step of which we
        hear when it is over.
        """
        self.left(state, computed_tokens)
        if self.pool is None or self.pool.free_block_queue.num_free_blocks >= self._horizon:
            return
        for group_state in state.groups:
            found = (self._leavings.find(block_id) for block_id in reversed(group_state.block_ids))
            if (last := next(filter(None, found), None)) is not None:
                self._offer(last[0], last[1] + 1, now_s)

    def handed_out(self, block_ids: Sequence[int]) -> None:
        """Note blocks that the engine has given to a request, to be written."""
        self._leavings.drop(block_ids)
        self._ahead -= len(block_ids)

    def forget(self) -> None:
        """Begin anew: what is on the device is of before a reset."""
        self._leavings.clear()

    # -- what is about to go --------------------------------------------------------------------

    def end_step(self, token_count: int, now_s: float) -> None:
        """Store what the next two steps may push out.

        What found no room is offered again only in a step that computes tokens: an idle engine would be kept
        awake by what host memory cannot hold.
        """
        self._make_way(self._horizon - self._horizon // 4, token_count > 0, now_s)

    def make_way_for(self, token_count: int, now_s: float) -> None:
        """Store what a load of so many tokens would push out; it may take more than a step may compute."""
        groups = self._config.geometry.groups
        block_count = sum(-(-token_count // group.tokens_per_block) for group in groups)
        self._make_way(block_count, False, now_s)

    def _make_way(self, block_count: int, may_retry: bool, now_s: float) -> None:
        """Store what is in the first ``block_count`` blocks that the engine would hand out, and some more.

        Costs a comparison or two when nothing has changed.
        """
        if self.pool is None:
            return
        refused = may_retry and self._refused is not None
        if not refused or self._refused == self._stores.room_epochs():
            if self._ahead >= block_count:
                return
            if self._whole is not None and self._whole == self._free_list():
                return
        self._refused, room = None, OFFERS_PER_WALK
        for leaving, end in self._found(block_count + self._horizon // 4).items():
            room -= self._offer(leaving, end, now_s)
            if not room:
                self._refused = NEVER
                return

    def check_invariants(self) -> None:
        """Check the books."""
        self._leavings.check_invariants()
        assert self.pool is None or len(self._leavings) < len(self.pool.blocks), "more is left than there is"

    # -- inside ---------------------------------------------------------------------------------

    def _free_list(self) -> tuple[int, int, int]:
        """What changes whenever something is added to the free list."""
        assert self.pool is not None
        queue = self.pool.free_block_queue
        return queue.num_free_blocks, queue.fake_free_list_tail.prev_free_block.block_id, self._left_count

    def _found(self, limit: int) -> dict[Leaving, int]:
        """Walk along the free list; say how far each leaving reaches into the part that is about to go."""
        assert self.pool is not None
        queue = self.pool.free_block_queue
        end, block = queue.fake_free_list_tail, queue.fake_free_list_head.next_free_block
        found: dict[Leaving, int] = {}
        seen = 0
        while seen < limit and block is not end:
            left = None if block.block_hash is None else self._leavings.find(block.block_id)
            if left is not None:
                leaving, index = left
                if found.get(leaving, 0) <= index and not self._has_copy(leaving, index):
                    found[leaving] = index + 1
            block = block.next_free_block
            seen += 1
        self._ahead = seen
        self._whole = self._free_list() if block is end else None
        return found

    def _has_copy(self, leaving: Leaving, index: int) -> bool:
        """Whether the same was left in another block since: it will be stored when that one goes.

        vLLM computes the last tokens of a prompt that it knows once more, into new blocks.
        """
        block_hash = leaving.hash_of(index)
        newest = self._leavings.newest(leaving.group, block_hash)
        if newest in (None, leaving.block_ids[index - leaving.first]):
            return False
        return self._holds(newest, leaving.group, block_hash)

    def _holds(self, block_id: int, group: GroupGeometry, block_hash: bytes) -> bool:
        """Whether the engine says that a block holds what a hash stands for."""
        assert self.pool is not None
        key = make_offload_key(block_hash, group.engine_index)
        return bool(self.pool.blocks[block_id].block_hash == key)

    def _offer(self, leaving: Leaving, block_count: int, now_s: float) -> bool:
        """Offer the prefix that ends with a block, as far as it is intact: a chunk needs its parents.

        Returns:
            Whether there was anything to offer.
        """
        group = leaving.group
        chunk_count = block_count // group.blocks_per_chunk
        if chunk_count * group.blocks_per_chunk <= leaving.first:
            return False  # no chunk ends in here, or its last block is not about to go
        prefix = self._leavings.prefix(leaving, chunk_count * group.blocks_per_chunk)
        if prefix is None:
            self._leavings.drop(leaving.block_ids[:1])
            return False
        run = group.run(prefix.hashes, 0, chunk_count)
        known = self._manager.known_count(run)
        if known >= chunk_count:
            return False
        intact = self._intact(group, prefix, known)
        if intact <= known:
            return False
        request = Departed(leaving.context.request_id, leaving.lora_request, prefix.tokens)
        owner = RequestOffloadState(request, [], leaving.context)
        offered = run.between(known, intact)
        refusal = self._stores.plan_left(owner, group, offered, prefix.block_ids, now_s)
        if refusal is not None and refusal.is_verdict:
            # It was judged. Nobody counts it twice, unless others use it and leave it too.
            refused = self._manager.known_count(run) * group.blocks_per_chunk
            self._leavings.drop(prefix.block_ids[refused : refused + 1])
        elif refusal is not None:
            self._refused = self._stores.room_epochs()
        return True

    def _intact(self, group: GroupGeometry, prefix: Prefix, known: int) -> int:
        """Count the leading chunks that are known, or whose blocks hold what their hashes say."""
        assert self.pool is not None
        per_chunk, per_block = group.blocks_per_chunk, hashes_per_block(group)
        blocks, first = self.pool.blocks, known * per_chunk
        block_ids, last_hashes = (
            prefix.block_ids[first:],
            prefix.hashes[(first + 1) * per_block - 1 :: per_block],
        )
        suffix = make_offload_key(b"", group.engine_index)
        for index, (block_id, block_hash) in enumerate(zip(block_ids, last_hashes, strict=True), first):
            if blocks[block_id].block_hash != block_hash + suffix:
                self._leavings.drop((block_id,))
                return index // per_chunk
        return len(prefix.block_ids) // per_chunk
