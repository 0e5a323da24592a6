"""How many tokens and conversations fit into each tier.

Knows what the scheduler half keeps of a prompt, how ranks share host memory, and what a record takes on disk.
Of models with windows it counts what the production code would store, by the same function.
"""

from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.plan.groups import ModelKV, PlannedGroup
from kvtide.scheduler.restore_points import chunks_kept
from kvtide.tiers.slabs import ROW_BYTES, slot_bytes_of

MOST_TOKENS = 1 << 27
MOST_STEP_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into a tier.

    Attributes:
        tier: Its name.
        budget_bytes: What was given for it, all ranks together.
        bytes_per_conversation: What one takes of that.
        conversations: That fit, a part of one counted as such.
        tokens: In all of them.
    """

    tier: str
    budget_bytes: int
    bytes_per_conversation: int
    conversations: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is kept of each.

    Attributes:
        tokens: Of one, from its beginning.
        step_tokens: Computed in a step: recurrent layers leave a state where one ends.
        restore_interval: As the setting; 0 keeps every chunk.
    """

    tokens: int
    step_tokens: int
    restore_interval: int = 0


def conversation_of(kv: ModelKV, tokens: int, step_tokens: int, restore_interval: int = 0) -> Conversation:
    """Judge how long conversations are.

    Raises:
        ConfigError: So short that nothing of one would be kept, or longer than anything.
    """
    least = max(group.geometry.tokens_per_chunk for group in kv.groups)
    if not least <= tokens <= MOST_TOKENS:
        hint = f"give tokens from {least}, a chunk of this model, to {MOST_TOKENS}"
        raise ConfigError("--conversation", tokens, hint)
    if not 1 <= step_tokens <= MOST_STEP_TOKENS:
        hint = f"give tokens from 1 to {MOST_STEP_TOKENS}"
        raise ConfigError("--max-num-batched-tokens", step_tokens, hint)
    return Conversation(tokens, step_tokens, restore_interval)


def chunks_of(kv: ModelKV, group: PlannedGroup, conversation: Conversation) -> int:
    """Count a group's chunks that are kept of one conversation."""
    geometry, tokens = group.geometry, conversation.tokens
    if geometry.keeps_states:
        # The state is handed over where a step ends, and where the prompt does.
        return min(geometry.full_chunks(tokens), -(-tokens // conversation.step_tokens))
    if geometry.looks_back:
        return geometry.full_chunks(tokens)
    interval = _whole(kv, conversation.restore_interval)
    ends = {kv.geometry.restore_point(end) for end in (tokens - 1, tokens)}
    return sum(map(len, chunks_kept(geometry, interval, ends, 0, geometry.full_chunks(tokens))))


def all_chunks(kv: ModelKV, conversation: Conversation) -> int:
    """Count the slots of host memory that one conversation takes on each rank."""
    return sum(chunks_of(kv, group, conversation) for group in kv.groups)


def in_host_memory(kv: ModelKV, budget_bytes: int, conversation: Conversation) -> Fit:
    """Fill host memory, which ranks share alike, and each with slots as large as its largest chunk.

    Raises:
        ConfigError: Not even one chunk fits.
    """
    share = budget_bytes // kv.ranks.count
    slots = min(share // kv.slot_bytes(stage) for stage in range(kv.ranks.pipeline))
    if slots < 1:
        least = max(kv.slot_bytes(stage) for stage in range(kv.ranks.pipeline)) * kv.ranks.count
        raise ConfigError(
            "--host-memory", budget_bytes, f"does not hold one chunk: give at least {least} bytes"
        )
    taken = all_chunks(kv, conversation)
    return _fit("host memory", budget_bytes, taken * kv.all_slots_bytes, slots / taken, conversation)


def on_disk(kv: ModelKV, limit_bytes: int, conversation: Conversation) -> Fit:
    """Fill a private disk, where what ranks have alike lies once.

    Raises:
        ConfigError: Not even one chunk fits.
    """
    writers = max(kv.shards(group) for group in kv.groups)
    share = limit_bytes // (writers * kv.ranks.pipeline)
    needs, whole = [], 0
    for stage in range(kv.ranks.pipeline):
        need = 0
        for group in kv.groups:
            each = record_bytes(kv, group, stage) * chunks_of(kv, group, conversation)
            need += each
            whole += each * kv.shards(group)
        needs.append(need)
    largest = max(record_bytes(kv, group, stage) for group in kv.groups for stage in range(len(needs)))
    if share < largest:
        least = largest * writers * kv.ranks.pipeline
        raise ConfigError("--disk", limit_bytes, f"does not hold one chunk: give at least {least} bytes")
    # Each rank has a share of its own, and a conversation counts where every rank has its part.
    return _fit("disk", limit_bytes, whole, min(share / need for need in needs if need), conversation)


def on_device(kv: ModelKV, left_bytes: int, conversation: Conversation) -> Fit:
    """Fill what devices have left with blocks of vLLM's pool.

    Args:
        kv: Of the model.
        left_bytes: Of all devices together.
        conversation: Of which windows alone are held where a group looks back over one.
    """
    stages = range(kv.ranks.pipeline)
    block_bytes = max(kv.page_bytes(group.layer) for group in kv.groups) * kv.padded_layers
    blocks = sum(_held_blocks(group, conversation.tokens) for group in kv.groups)
    pool = max(0, left_bytes // kv.ranks.count) * len(stages) // block_bytes
    taken = blocks * block_bytes * kv.ranks.tensor
    return _fit("device", max(0, left_bytes), taken, pool / blocks, conversation)


def record_bytes(kv: ModelKV, group: PlannedGroup, stage: int) -> int:
    """What one chunk of a group takes of a disk's limit, one rank's part of it."""
    payload = kv.chunk_bytes(group, stage)
    return slot_bytes_of(payload) + ROW_BYTES if payload else 0


def _held_blocks(group: PlannedGroup, tokens: int) -> int:
    geometry = group.geometry
    whole = -(-tokens // geometry.tokens_per_block)
    if geometry.local_tokens is not None:
        return min(whole, geometry.local_tokens // geometry.tokens_per_block)
    if geometry.window_tokens is None:
        return whole
    # The block in which the window begins, and the one that is being filled.
    return min(whole, -(-(geometry.window_tokens - 1) // geometry.tokens_per_block) + 1)


def _whole(kv: ModelKV, interval_tokens: int) -> int:
    """Round the setting up to whole restore points, as the scheduler half does."""
    least = kv.geometry.restore_interval
    return -(-max(interval_tokens, 1) // least) * least


def _fit(tier: str, budget: int, taken: int, conversations: float, conversation: Conversation) -> Fit:
    return Fit(tier, budget, taken, conversations, int(conversations * conversation.tokens))
