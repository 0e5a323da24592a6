"""What has to be true of an engine: books that balance, budgets that are kept, nothing left over at rest.

Looks at vLLM's state and at the connector's own account of itself.
"""

import mmap

from kvtide.jobs import Direction
from kvtide.transfer.pool import HostPool
from kvtide.vllm.testing.below import check_announced, check_budgets
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import LeakError
from kvtide.vllm.testing.ranks import own_connector


def check_books(engine: ModelEngine) -> None:
    """Check what has to be true at any time.

    Raises:
        LeakError: Books do not balance, or a budget is exceeded.
    """
    try:
        engine.check()
    except AssertionError as error:
        raise LeakError(f"books: {error}") from error
    deciding, pools = engine.connector._deciding, pools_of(engine)
    stored = sum(
        len(chunks.spec.slots)
        for status in deciding._jobs
        if status.job.direction is Direction.STORE
        for chunks in status.held
    )
    queued_bytes = stored * sum(pool.slot_bytes for pool in pools)
    if queued_bytes > engine.shape.settings["store_queue"]:
        limit = engine.shape.settings["store_queue"]
        raise LeakError(f"{queued_bytes} bytes of stores are open, {limit} may be")
    host_bytes, budget = sum(pool.byte_count for pool in pools), host_budget_bytes(engine)
    if host_bytes > budget:
        raise LeakError(f"{host_bytes} bytes of host memory are mapped, {budget} may be")
    capacity, slots = deciding._manager.capacity, min(pool.slot_count for pool in pools)
    if capacity > slots:
        raise LeakError(f"{capacity} slots are handed out, the smallest pool has {slots}")
    check_budgets(engine)


def check_rest(engine: ModelEngine) -> None:
    """Check an engine that has nothing to do and no copy under way.

    Raises:
        LeakError: Something is left over; names it.
    """
    check_books(engine)
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
        check_announced(engine, engine.ledger)


def host_budget_bytes(engine: ModelEngine) -> int:
    """Bytes of host memory that all ranks together may take."""
    return engine.shape.host_pages * mmap.PAGESIZE * engine.shape.rank_count


def pools_of(engine: ModelEngine) -> list[HostPool]:
    """The host pool of each rank."""
    workers = [own_connector(rank)._worker for rank in engine.ranks]
    return [worker._pool for worker in workers if worker is not None]
