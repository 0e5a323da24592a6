"""What the scheduler side reads of the engine, under the engine's own names.

Protocols over vLLM's ``Request`` and ``SchedulerOutput`` (0.32 and 0.33), so that the state machine can
be driven by vLLM, by a test or by a trace. Nothing here is written to.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

BlockTable = tuple[Sequence[int], ...]
"""Block ids per KV cache group, in prefix order."""


class BlockPool(Protocol):
    """vLLM's ``BlockPool``, as far as we use it: to hold blocks, and to see what free ones still hold.

    ``blocks[id].block_hash``: hash and group of what a block holds, None for nothing that could be hit.
    ``free_block_queue``: a linked list in the order in which blocks are handed out.
    """

    blocks: Sequence[Any]
    free_block_queue: Any

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any:
        """Find the blocks of groups that go by a hash; None when one has none."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take one reference on each block."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give one reference of each back."""


class EngineRequest(Protocol):
    """vLLM's ``Request``, as far as we look at it."""

    request_id: str
    block_hashes: list[Any]
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Ids of those tokens."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether the engine would throw a hit away."""


class NewRequestData(Protocol):
    """A request scheduled for the first time."""

    req_id: str


class CachedRequestData(Protocol):
    """Requests the workers know already, as parallel lists."""

    req_ids: list[str]
    resumed_req_ids: Collection[str]
    new_block_ids: Sequence[BlockTable | None]


class EngineStep(Protocol):
    """vLLM's ``SchedulerOutput``, as far as we look at it."""

    @property
    def scheduled_cached_reqs(self) -> CachedRequestData:
        """Running and resumed requests."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens computed this step, per request."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Their sum."""

    @property
    def preempted_req_ids(self) -> Collection[str] | None:
        """Requests that lost their blocks since the last step."""

    @property
    def kv_connector_block_state(self) -> Any:
        """Current block tables of the requests of this step: ``get_block_ids(request_id)``; or None.

        ``boundary_state_offloads``: per request, (group, block, tokens) of states that recurrent layers
        have at the end of this step.
        """

    @property
    def kv_cache_block_copies(self) -> Sequence[Any] | None:
        """Copies the worker makes before the forward; their targets are freshly written blocks."""
