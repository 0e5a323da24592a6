"""Our events in vLLM's words: self-describing, with medium, and hashes in the form of its own events."""

from collections.abc import Iterable, Iterator

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtide.events import OffloadingEvent
from kvtide.geometry import KVGeometry
from kvtide.keys import ChunkRun, split_offload_key


def to_vllm(events: Iterable[OffloadingEvent], geometry: KVGeometry) -> Iterator[KVCacheEvent]:
    """Translate; a chunk is announced as one block of its own size, for that is what can be fetched."""
    for event in events:
        if isinstance(event.keys, ChunkRun):
            yield _stored(event, event.keys, geometry)
        else:
            yield from _removed(event, event.keys, geometry)


def _stored(event: OffloadingEvent, run: ChunkRun, geometry: KVGeometry) -> BlockStored:
    group = geometry.groups[run.group_index]
    parent = run.parent_hash()
    content = event.content
    return BlockStored(
        block_hashes=[_external(block_hash) for block_hash in run.hashes()],
        parent_block_hash=None if parent is None else _external(parent),
        token_ids=list(content.token_ids) if content is not None else [],
        block_size=group.tokens_per_chunk,
        lora_id=None,
        medium=event.medium.value,
        lora_name=content.lora_name if content is not None else None,
        group_idx=group.engine_index,
        kv_cache_spec_kind=group.kind.value,
    )


def _removed(event: OffloadingEvent, keys: Iterable[bytes], geometry: KVGeometry) -> Iterator[BlockRemoved]:
    by_group: dict[int, list[bytes]] = {}
    for key in keys:
        block_hash, group_index = split_offload_key(key)  # type: ignore[arg-type]
        by_group.setdefault(group_index, []).append(block_hash)
    for group_index, hashes in by_group.items():
        yield BlockRemoved(
            block_hashes=[_external(block_hash) for block_hash in hashes],
            medium=event.medium.value,
            group_idx=geometry.groups[group_index].engine_index,
        )


def _external(block_hash: bytes) -> int | bytes:
    external: int | bytes = maybe_convert_block_hash(BlockHash(block_hash))
    return external
