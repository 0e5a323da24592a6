"""A manager with no engine in front of it: a prompt is looked up, used and stored at once.

What a replay of a trace and a server's ghost caches do with every prompt. Knows the order of the primitives;
does not know what a chunk holds, where a prompt comes from or what its hits are good for.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.base import OffloadingManager, Refusal

GROUP = 0


class Visit(NamedTuple):
    """What came of a prompt, in chunks.

    Attributes:
        hit_count: That were there, from its beginning.
        stored_count: That were written.
        evicted_count: That left for them.
    """

    hit_count: int
    stored_count: int
    evicted_count: int


def ask(manager: OffloadingManager, hashes: Sequence[bytes], visit: int, now_s: float) -> Visit:
    """Look a prompt up, use what is there and store what is not.

    Args:
        manager: Of one group whose chunks have one hash each.
        hashes: Of the prompt's chunks, from its beginning.
        visit: Numbers the request.
        now_s: When it comes, by a clock that never goes back.
    """
    run, ctx = _run_of(hashes), ReqContext(str(visit), None, visit)
    hits = manager.lookup(run, ctx).ready_count
    manager.visited(run, ctx, now_s)
    manager.touch(run, ctx)
    return Visit(hits, *_store(manager, run, ctx))


def keep(manager: OffloadingManager, hashes: Sequence[bytes], visit: int) -> Visit:
    """Store what a request has grown by: nothing is looked up.

    Args:
        manager: As of ``ask``.
        hashes: Of all its chunks, from the beginning of the prompt.
        visit: Of the request.
    """
    return Visit(0, *_store(manager, _run_of(hashes), ReqContext(str(visit), None, visit)))


def _run_of(hashes: Sequence[bytes]) -> ChunkRun:
    return ChunkRun(hashes, GROUP, 1, 0, len(hashes))


def _store(manager: OffloadingManager, run: ChunkRun, ctx: ReqContext) -> tuple[int, int]:
    stored = evicted = 0
    refusal: Refusal | None = Refusal.POOL_FULL
    while refusal is Refusal.POOL_FULL:
        # A step, in which a manager evicts no more than it may: what did not fit is offered again.
        manager.keep_room()
        output = manager.prepare_store(run, ctx)
        evicted += len(output.evicted_keys)
        if not output.keys_to_store:
            break
        manager.complete_store(output.keys_to_store, output.store_spec, ctx, success=True)
        stored += len(output.keys_to_store)
        refusal = output.refusal
    return stored, evicted
