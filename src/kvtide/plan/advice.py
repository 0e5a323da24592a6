"""What to set for a model and a budget, and why.

Knows what the settings mean and what they are by default. Says nothing of one whose default will do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from kvtide.config import KVTideConfig
from kvtide.geometry import GroupKind
from kvtide.plan.capacity import Conversation, all_chunks, chunks_of, on_disk, record_bytes
from kvtide.plan.groups import ModelKV
from kvtide.transfer.memory import humanised

LARGE_RECORD_BYTES = 1 << 20
"""Smaller reads do not reach a disk's pace with the four at once that a rank has by default."""

LONGEST_CHUNK_TOKENS = 256
"""Hits are in whole chunks: longer ones lose more of a prompt's end than a disk gains by them."""

WINDOWS_APART = 4
"""Restore points so many windows apart keep a quarter of what layers with windows see."""

QUEUE_STEPS = 2
"""What one step stores is written while the next computes."""

QUEUE_PIECE_BYTES = 256 << 20

MOST_SHARE = 0.9
"""The setting ``promotion_share`` takes no more."""

HEADROOM = 1.5


@dataclass(frozen=True, slots=True)
class Advice:
    """One setting.

    Attributes:
        setting: Its name.
        value: As it would be written.
        reason: For people.
    """

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Budget:
    """What there is.

    Attributes:
        host_memory: In bytes, all ranks together.
        disk_limit: Likewise; 0 without a disk.
        disk_bytes_per_s: Its pace.
    """

    host_memory: int
    disk_limit: int = 0
    disk_bytes_per_s: float = 0.0


def blocks_per_chunk_for(kv: ModelKV, budget: Budget) -> int:
    """Choose chunks whose records are worth a disk's while, where all chunks are alike.

    Args:
        kv: With chunks of one block.
        budget: Without a disk they stay so: copies to the device are of blocks, whatever a chunk is.
    """
    if not budget.disk_limit or not kv.is_one_prefix:
        return 1
    # The rank that has the least of a block has the smallest records.
    least = min(kv.chunk_bytes(kv.groups[0], stage) for stage in range(kv.ranks.pipeline))
    blocks = 1
    while blocks * least < LARGE_RECORD_BYTES and 2 * blocks * kv.block_tokens <= LONGEST_CHUNK_TOKENS:
        blocks *= 2
    return blocks


def restore_interval_for(kv: ModelKV) -> int:
    """Choose how far apart windows are kept; 0, every chunk, where no group looks back over a window."""
    windows = [
        group.geometry.window_tokens or 0
        for group in kv.groups
        if group.geometry.kind in (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)
    ]
    least = kv.geometry.restore_interval
    return -(-WINDOWS_APART * max(windows, default=0) // least) * least


def advice_for(
    kv: ModelKV, budget: Budget, conversation: Conversation, prompt_s: float | None = None
) -> list[Advice]:
    """Say what to set.

    Args:
        kv: With the ``blocks_per_chunk`` that would be set.
        budget: What there is.
        conversation: With the ``restore_interval`` that would be set.
        prompt_s: Seconds to compute one; None where that is not known.
    """
    found = [*_of_chunks(kv, conversation), *_of_stores(kv, budget, conversation)]
    if budget.disk_limit:
        found += [*_of_the_disk(kv, budget, conversation), *_of_promotions(kv, budget, conversation)]
        if prompt_s is not None:
            found += _of_demotion(kv, budget, conversation, prompt_s)
    return found


def step_bytes(kv: ModelKV, conversation: Conversation, on_disk: bool) -> int:
    """What a step full of prompts stores: slots of all ranks together, or records of the fullest rank."""
    step = replace(conversation, tokens=conversation.step_tokens)
    if not on_disk:
        return all_chunks(kv, step) * kv.all_slots_bytes
    return max(
        sum(record_bytes(kv, group, stage) * chunks_of(kv, group, step) for group in kv.groups)
        for stage in range(kv.ranks.pipeline)
    )


def _of_chunks(kv: ModelKV, conversation: Conversation) -> Iterator[Advice]:
    first = kv.groups[0]
    if kv.is_one_prefix and first.geometry.blocks_per_chunk > 1:
        size = humanised(min(kv.chunk_bytes(first, stage) for stage in range(kv.ranks.pipeline)))
        yield Advice(
            "blocks_per_chunk",
            str(first.geometry.blocks_per_chunk),
            f"records of {size} on each rank, so that the disk is read at its pace; hits are in whole chunks"
            f" of {first.geometry.tokens_per_chunk} tokens",
        )
    if conversation.restore_interval:
        every = replace(conversation, restore_interval=0)
        without, kept = (all_chunks(kv, one) * kv.all_slots_bytes for one in (every, conversation))
        yield Advice(
            "restore_interval",
            str(conversation.restore_interval),
            f"a conversation takes {humanised(kept)} of host memory, not {humanised(without)}: windows are"
            " kept so many tokens apart and at the ends of prompts; what branches off in between is computed"
            " from the last such point on",
        )


def _of_stores(kv: ModelKV, budget: Budget, conversation: Conversation) -> Iterator[Advice]:
    stored = step_bytes(kv, conversation, on_disk=False)
    queue = _queue(stored, budget.host_memory)
    if queue > int(KVTideConfig.model_fields["store_queue"].default):
        yield Advice(
            "store_queue",
            humanised(queue).replace(" ", ""),
            f"a step of {conversation.step_tokens:,} tokens stores {humanised(stored)}, all ranks together;"
            " what does not fit into the queue is skipped",
        )


def _of_the_disk(kv: ModelKV, budget: Budget, conversation: Conversation) -> Iterator[Advice]:
    written = step_bytes(kv, conversation, on_disk=True)
    queue = _queue(written, budget.host_memory // kv.ranks.count)
    if queue > int(KVTideConfig.model_fields["disk_queue"].default):
        yield Advice(
            "disk_queue",
            humanised(queue).replace(" ", ""),
            f"a step of {conversation.step_tokens:,} tokens writes {humanised(written)} on each rank; what"
            " does not fit into the queue is skipped",
        )


def _of_demotion(
    kv: ModelKV, budget: Budget, conversation: Conversation, prompt_s: float
) -> Iterator[Advice]:
    computed = on_disk(kv, budget.disk_limit, conversation).bytes_per_conversation / prompt_s
    if computed > budget.disk_bytes_per_s:
        yield Advice(
            "disk_demotion",
            "second_sight",
            f"prompts computed without a pause leave {computed / 1e9:.1f} GB/s to be written, the disk takes"
            f" {budget.disk_bytes_per_s / 1e9:.1f}: what is asked for twice goes to disk",
        )


def _of_promotions(kv: ModelKV, budget: Budget, conversation: Conversation) -> Iterator[Advice]:
    taken = all_chunks(kv, conversation) * kv.all_slots_bytes
    share = taken / budget.host_memory
    default = float(KVTideConfig.model_fields["promotion_share"].default)
    if share > default:
        fits = (
            ""
            if share <= MOST_SHARE
            else "; even that is too little: more host memory, or it comes back in part"
        )
        yield Advice(
            "promotion_share",
            f"{min(MOST_SHARE, ceil(share * 100) / 100):g}",
            f"one conversation that comes back from disk takes {100 * share:.0f} % of host memory{fits}",
        )
    limit_s = float(KVTideConfig.model_fields["defer_limit_s"].default)
    comes_back_s = taken / budget.disk_bytes_per_s if budget.disk_bytes_per_s else 0.0
    if comes_back_s > limit_s:
        yield Advice(
            "defer_limit_s",
            str(min(600, ceil(HEADROOM * comes_back_s))),
            f"a conversation takes {comes_back_s:.1f} s to come back from disk, and a request waits"
            f" {limit_s:g} s for it by default",
        )


def _queue(step: int, memory: int) -> int:
    """Choose a queue; what waits in it lies in host memory, and cannot be more than there is."""
    return min(memory, -(-QUEUE_STEPS * step // QUEUE_PIECE_BYTES) * QUEUE_PIECE_BYTES)
