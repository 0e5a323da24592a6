"""A request and a step of the modelled engine, with what the scheduler half reads of them.

Knows tokens as numbers: what they say is in the hashes of their blocks.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.scheduler.engine import BlockTable, CachedRequestData
from kvtide.sim.traces.request import TraceRequest


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request on its way through the engine; fulfils ``EngineRequest``.

    Attributes:
        asked: What the trace says of it.
        index: In the trace.
        block_hashes: Of its full blocks, as far as the trace names them.
        num_tokens: Of the prompt, and generated so far.
        last_tokens: How many these are in the end.
        blocks: Its block table, with room for ``room_tokens``.
        named_count: Blocks from the beginning whose contents others can use.
        engine_tokens: The engine's own hit, at the first admission.
        loaded_tokens: Brought back for it then, from each tier: host memory first.
        first_token_s: When the first token was there; None before.
        news_tokens: From so many tokens on a block of it has a new name, or others can use one.
    """

    asked: TraceRequest
    index: int
    request_id: str
    block_hashes: list[bytes]
    num_prompt_tokens: int
    num_tokens: int
    last_tokens: int
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    blocks: list[int] = field(default_factory=list)
    room_tokens: int = 0
    named_count: int = 0
    news_tokens: float = math.inf
    engine_tokens: int = -1
    loaded_tokens: list[int] = field(default_factory=list)
    first_token_s: float | None = None

    @classmethod
    def of(cls, asked: TraceRequest, index: int) -> "ServedRequest":
        """Begin one; a server generates a token at least."""
        tokens, named = asked.prompt_tokens, len(asked.block_hashes) + len(asked.generated_hashes)
        return cls(
            asked,
            index,
            str(index),
            list(asked.block_hashes),
            tokens,
            tokens,
            tokens + max(1, asked.output_tokens),
            # What a trace does not name can be asked for by nobody: it is not kept.
            kv_transfer_params={"max_offload_tokens": named * asked.block_tokens},
        )

    @property
    def all_token_ids(self) -> Sequence[int]:
        """A trace has none: they are asked for by KV events alone."""
        return ()

    @property
    def table(self) -> BlockTable:
        """Of the one group there is."""
        return (self.blocks,)

    def name_generated(self) -> None:
        """Take in the names of blocks that were filled while the answer came."""
        generated, size = self.asked.generated_hashes, self.asked.block_tokens
        named = len(self.block_hashes) - len(self.asked.block_hashes)
        while named < len(generated) and (len(self.block_hashes) + 1) * size <= self.num_tokens:
            self.block_hashes.append(generated[named])
            named += 1

    def look_ahead(self) -> None:
        """Work out ``news_tokens``."""
        names, size = len(self.block_hashes), self.asked.block_tokens
        self.news_tokens = math.inf
        if names < len(self.asked.block_hashes) + len(self.asked.generated_hashes):
            self.news_tokens = (names + 1) * size
        if self.named_count < names:
            # A block is shared from the step on that computes its last token.
            self.news_tokens = min(self.news_tokens, (self.named_count + 1) * size)


@dataclass(slots=True)
class GrownRequests:
    """Requests that go on, and the blocks they were given; fulfils ``CachedRequestData``."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: Collection[str] = ()
    new_block_ids: Sequence[BlockTable | None] = ()


@dataclass(slots=True)
class ServedStep:
    """One step; fulfils ``EngineStep``.

    Attributes:
        grown: Running requests that were given blocks.
        prompts: Per request whose prompt is computed, tokens before those of this step, and these.
        decoding: Requests that generate.
        decode_count: Tokens that each of these generates: so many steps are taken as one.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    grown: GrownRequests = field(default_factory=GrownRequests)
    preempted_req_ids: Collection[str] | None = None
    kv_cache_block_copies: Sequence[Any] | None = None
    kv_connector_block_state: Any = None
    prompts: list[tuple[ServedRequest, int, int]] = field(default_factory=list)
    decoding: list[ServedRequest] = field(default_factory=list)
    decode_count: int = 1

    @property
    def scheduled_cached_reqs(self) -> CachedRequestData:
        """Running requests that were given blocks; the workers know the others' already."""
        return self.grown

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Their sum."""
        return sum(self.num_scheduled_tokens.values())
