"""What a router believes that listens to our KV events, and whether the events make sense one after another.

Takes the place of vLLM's event publisher. Knows events; does not know what host memory really holds.
"""

from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvtide.keys import Medium
from kvtide.vllm.testing.promises import LeakError


class EventLedger:
    """Chunks announced in host memory and not taken back.

    Attributes:
        announced: Their groups and hashes.
        event_count: Events about host memory.
        told: Chunks announced that nobody has looked at more closely; whoever does takes them out.
    """

    def __init__(self) -> None:
        self.announced: set[Any] = set()
        self.event_count = 0
        self.told: list[BlockStored] = []

    def publish(self, batch: Any) -> None:
        """Take in one step's events.

        Raises:
            LeakError: One contradicts those before it, or itself.
        """
        for event in batch.events:
            if not isinstance(event, BlockStored | BlockRemoved) or event.medium != Medium.HOST.value:
                continue
            self.event_count += 1
            hashes = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            if isinstance(event, BlockRemoved):
                if hashes - self.announced:
                    raise LeakError(f"{len(hashes - self.announced)} chunks leave that were never announced")
                self.announced -= hashes
                continue
            if hashes & self.announced:
                raise LeakError(f"{len(hashes & self.announced)} chunks are announced twice")
            # Chunks of a window may be there without those before them.
            parent = event.parent_block_hash if event.kv_cache_spec_kind == "full_attention" else None
            if parent is not None and (event.group_idx, parent) not in self.announced:
                raise LeakError("a chunk is announced whose parent is not there")
            if len(event.token_ids) != len(event.block_hashes) * event.block_size:
                raise LeakError(f"{len(event.token_ids)} tokens for {len(event.block_hashes)} chunks")
            self.announced |= hashes
            self.told.append(event)

    def shutdown(self) -> None:
        """Do nothing."""
