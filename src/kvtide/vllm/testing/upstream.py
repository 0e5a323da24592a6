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
