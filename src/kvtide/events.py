"""What happened to which chunks, as it is told to the outside.

Knows keys, media and the tokens behind a chunk. Does not know how vLLM spells a KV event: that is
``kvtide.vllm.events``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.keys import ChunkRun, Medium, OffloadKey


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """What a router has to know to recognise a prefix.

    Attributes:
        token_ids: The tokens of the run's chunks, in order, ``len(run) * tokens_per_chunk`` of them.
        lora_name: Adapter the tokens were computed with, None without one.
    """

    token_ids: tuple[int, ...]
    lora_name: str | None

    def part(self, chunk_count: int, start: int, stop: int) -> "ChunkContent":
        """Say what some of the run's ``chunk_count`` chunks hold, from ``start`` on, one past the last."""
        each = len(self.token_ids) // chunk_count
        return ChunkContent(self.token_ids[start * each : stop * each], self.lora_name)


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Chunks that can be fetched from ``medium`` now, or no longer.

    Attributes:
        keys: For a removal the keys, for a store the run (so that parents are known).
        medium: Where.
        removed: True when the chunks are gone.
        content: Only for a store.
    """

    keys: ChunkRun | Sequence[OffloadKey]
    medium: Medium
    removed: bool
    content: ChunkContent | None = None
