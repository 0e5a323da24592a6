"""What has to be true of an engine at rest: nothing is left over, and what was stored is hit.

Looks at vLLM's state and at the connector's own account of itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtide.jobs import PoolReport
from kvtide.vllm.testing.asks import Ask
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import LeakError


def check_rest(engine: ModelEngine) -> None:
    """Check an engine that has nothing to do and no copy under way.

    Raises:
        LeakError: Something is left over; names it.
    """
    try:
        engine.check()
    except AssertionError as error:
        raise LeakError(f"books at rest: {error}") from error
    pool = engine.scheduler.kv_cache_manager.block_pool
    left = {
        **engine.describe(),
        "blocks in use": engine.shape.num_blocks - 1 - pool.get_num_free_blocks(),
        "requests in vLLM": len(engine.scheduler.requests),
    }
    if any(left.values()):
        raise LeakError(f"left at rest: {left}")
    if engine.ledger is not None:
        held, announced = engine.connector._deciding._manager.used_count, len(engine.ledger.announced)
        if held != announced:
            raise LeakError(f"{announced} chunks are announced, {held} are held")


@dataclass(frozen=True, slots=True)
class Revisited:
    """How it went.

    Attributes:
        asked: Requests that were asked.
        hit_tokens: Tokens that came back from host memory.
    """

    asked: int
    hit_tokens: int


def revisit(engine: ModelEngine, ask: Ask, settle: Callable[[], None], number: int) -> Revisited:
    """Ask something until it is stored, empty the device, ask again: it must hit, or nothing was kept.

    Args:
        engine: At rest, its copies going well.
        ask: What is asked.
        settle: Runs the engine to rest.
        number: Of the first request.

    Raises:
        LeakError: What was stored was not hit.
    """
    settings = engine.shape.settings
    times = int(settings["store_threshold"])
    arguments = {
        name: value
        for name, value in ask.all_arguments().items()
        if name in ("lora_request", "cache_salt", "priority")
    }
    for time in range(times + 1):
        engine.scheduler.reset_prefix_cache()
        before = _hit_tokens(engine)
        name = f"again{number + time}"
        engine.add(name, ask.prompt, 1, **arguments)
        settle()
        if engine.outputs[name] != ask.answer()[:1]:
            raise LeakError(f"{name}: {engine.outputs[name]} where {ask.answer()[:1]} was due")
    hit_tokens = _hit_tokens(engine) - before
    tokens_per_chunk = engine.shape.tokens_per_block * int(settings["blocks_per_chunk"])
    chunks = (len(ask.prompt) - 1) // tokens_per_chunk
    manager = engine.connector._deciding._manager
    # A pool keeps a part of itself free ahead of time, and a prompt may be longer than the pool.
    fits = manager.capacity * 39 // 40 - 1
    # What found the queue of stores full is offered again, but a short request may be gone by then.
    queue = int(settings["store_queue"]) // (sum(pool.slot_bytes for pool in _pools(engine)))
    room = min(fits, queue)
    windows = len(engine.shape.groups) - 1
    # A group that sees a window is stored block by block.
    stored = len(ask.prompt) // tokens_per_chunk
    stored += windows * (len(ask.prompt) // engine.shape.tokens_per_block)
    if windows and stored > room:
        chunks = 0  # a point that not all groups could store is none
    due = min(chunks, room) * tokens_per_chunk
    if hit_tokens < due:
        raise LeakError(
            f"{len(ask.prompt)} tokens were asked {times + 1} times, {hit_tokens} of {due} came from host"
            f" memory ({manager.used_count} of {manager.capacity} slots used)"
        )
    return Revisited(times + 1, hit_tokens)


def _pools(engine: ModelEngine) -> list[PoolReport]:
    return list(engine.connector._deciding._pools.values())


def _hit_tokens(engine: ModelEngine) -> int:
    return int(engine.counted.data.get("hit_tokens|host", 0))
