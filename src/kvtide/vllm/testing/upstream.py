"""What vLLM 0.32 does wrong by itself, repaired in the engine under test: it is not to be held against us."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


def forget_what_was_not_computed(scheduler: Scheduler) -> None:
    """Let a preempted request leave no hash of a block that it has not filled.

    With priority scheduling a victim may have been given its place in the very step that preempts it
    (``Scheduler.schedule``, "if preempted_req in scheduled_running_reqs"). ``allocate_slots`` has hashed the
    block that this step would have filled, and the hash stays: whoever asks for it reads what was there.
    """
    preempt, manager = scheduler._preempt_request, scheduler.kv_cache_manager

    def preempt_and_forget(request: Any, *arguments: Any, **named: Any) -> None:
        for group in manager.coordinator.single_type_managers:
            blocks = group.req_to_blocks.get(request.request_id, ())
            for block in blocks[request.num_computed_tokens // group.block_size :]:
                if block.block_hash is not None and not block.is_null and block.ref_cnt == 1:
                    manager.block_pool._maybe_evict_cached_block(block)
        preempt(request, *arguments, **named)

    scheduler._preempt_request = preempt_and_forget


def copy_only_what_is_computed(scheduler: Scheduler) -> None:
    """Let a request that hits a part of a block wait until that part has been computed.

    Where hits end within blocks, a block is copied for whoever continues it, before the forward. A block of
    attention may have been hashed for the very step that fills it: then the copy is of what was there before.
    vLLM's manager of recurrent groups has the same rule for the same reason (``cached_blocks_this_step``).
    """
    manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
    begin, insert = manager.new_step_starts, pool._insert_block_hash
    hashed: set[int] = set()

    def begin_step() -> None:
        hashed.clear()
        begin()

    def insert_hash(name: Any, block: Any, num_tokens: int | None) -> None:
        hashed.add(block.block_id)
        insert(name, block, num_tokens=num_tokens)

    manager.new_step_starts, pool._insert_block_hash = begin_step, insert_hash
    for group in manager.coordinator.single_type_managers:
        group.get_num_blocks_to_allocate = _waiting_for(group, hashed)


def _waiting_for(group: Any, hashed: set[int]) -> Any:
    needed = group.get_num_blocks_to_allocate

    def get_num_blocks_to_allocate(*arguments: Any, **named: Any) -> int:
        _, _, blocks, _, local_tokens, *_ = arguments
        if group._has_partial_local_hit(blocks, local_tokens) and blocks[-1].block_id in hashed:
            return int(group.block_pool.num_gpu_blocks) + 1
        return int(needed(*arguments, **named))

    return get_num_blocks_to_allocate
