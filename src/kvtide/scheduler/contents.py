"""What chunks hold, in the words of events: their tokens and their adapter."""

from kvtide.events import ChunkContent
from kvtide.geometry import GroupGeometry
from kvtide.keys import ChunkRun
from kvtide.scheduler.state import RequestOffloadState


def content_of(state: RequestOffloadState, run: ChunkRun, group: GroupGeometry) -> ChunkContent:
    """Say what the chunks of a run hold, for whoever listens to events."""
    tokens = state.request.all_token_ids[
        run.start * group.tokens_per_chunk : run.stop * group.tokens_per_chunk
    ]
    lora = state.request.lora_request
    return ChunkContent(tuple(tokens), lora.lora_name if lora is not None else None)
