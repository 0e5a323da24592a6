"""An engine in values: requests and steps with just what the scheduler half reads."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOKENS_PER_BLOCK = 4


@dataclass
class FakeRequest:
    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)
        self.block_hashes = chained_hashes(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.tokens


def chained_hashes(tokens: Sequence[int], tokens_per_block: int = TOKENS_PER_BLOCK) -> list[bytes]:
    hashes, parent = [], b""
    for end in range(tokens_per_block, len(tokens) + 1, tokens_per_block):
        parent = hashlib.sha256(parent + bytes(str(tokens[end - tokens_per_block : end]), "ascii")).digest()
        hashes.append(parent)
    return hashes


@dataclass
class FakeCached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)


@dataclass
class FakeStep:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_cached_reqs: FakeCached = field(default_factory=FakeCached)
    preempted_req_ids: set[str] | None = None
    kv_cache_block_copies: list[Any] | None = None
    kv_connector_block_state: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())
