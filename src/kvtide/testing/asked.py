"""Requests and steps of an engine, with just what the scheduler half reads."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.scheduler.engine import BlockTable, CachedRequestData
from kvtide.testing.workloads import chained_hashes

HASH_BYTES = 16


@dataclass(slots=True)
class Asked:
    """A request, as the scheduler half reads one."""

    request_id: str
    tokens: list[int]
    lora_request: Any = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    tables: tuple[list[int], ...] = ()

    def __post_init__(self) -> None:
        self.block_hashes = chained_hashes(self.tokens, HASH_BYTES)
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """All of it."""
        return len(self.tokens)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """All of it."""
        return self.tokens


@dataclass(slots=True)
class Cached:
    """No request that goes on is given blocks: each has all from the beginning."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: Collection[str] = ()
    new_block_ids: Sequence[BlockTable | None] = ()


@dataclass(slots=True)
class Step:
    """A step of the engine."""

    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: CachedRequestData = field(default_factory=Cached)
    preempted_req_ids: Collection[str] | None = None
    kv_cache_block_copies: None = None
    kv_connector_block_state: None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Their sum."""
        return sum(self.num_scheduled_tokens.values())
