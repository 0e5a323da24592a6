"""What a router believes that listens to our KV events, and whether the events make sense one after another.

Takes the place of vLLM's event publisher. Knows events; does not know what is really held.
"""

from collections import Counter
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvtide.keys import Medium
from kvtide.vllm.testing.promises import LeakError


class EventLedger:
    """Chunks announced and not taken back.

    Args:
        tier_count: Tiers below host memory; of all of them events say the same.

    Attributes:
        announced: Those in host memory: their groups and hashes.
        below: Those below it, and how often.
        event_count: Events about host memory.
        told: Chunks announced that nobody has looked at more closely; whoever does takes them out.
    """

    def __init__(self, tier_count: int = 0) -> None:
        self._tier_count = tier_count
        self.announced: set[Any] = set()
        self.below: Counter[Any] = Counter()
        self.event_count = 0
        self.told: list[BlockStored] = []

    def publish(self, batch: Any) -> None:
        """Take in one step's events.

        Raises:
            LeakError: One contradicts those before it, or itself.
        """
        for event in batch.events:
            if not isinstance(event, BlockStored | BlockRemoved):
                continue
            if event.medium == Medium.STORAGE.value:
                self._note_below(event)
            if event.medium != Medium.HOST.value:
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

    def _note_below(self, event: BlockStored | BlockRemoved) -> None:
        hashes = [(event.group_idx, block_hash) for block_hash in event.block_hashes]
        if isinstance(event, BlockRemoved):
            self.below.subtract(hashes)
        else:
            self.below.update(hashes)
            # Of what is found after a start no tokens are known.
            if event.token_ids:
                if len(event.token_ids) != len(hashes) * event.block_size:
                    raise LeakError(f"{len(event.token_ids)} tokens for {len(hashes)} chunks below")
                self.told.append(event)
        wrong = [one for one in hashes if not 0 <= self.below[one] <= self._tier_count]
        if wrong:
            raise LeakError(
                f"{len(wrong)} chunks below are announced too often, or leave and were not announced"
            )

    def shutdown(self) -> None:
        """Do nothing."""
