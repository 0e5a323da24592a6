"""Whether KV events say of a chunk what it is: its tokens, what it continues, whose adapter.

Knows requests as the engine knows them, and events; does not know what host memory holds.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import LeakError


@dataclass(frozen=True, slots=True)
class _Prefix:
    tokens: list[int]
    end: int
    adapter: str | None


class Told:
    """What a listener was told, held against what was asked."""

    def __init__(self) -> None:
        self._prefixes: dict[Any, _Prefix] = {}  # by hash, in the form it has in events

    def check(self, engine: ModelEngine) -> int:
        """Check the events since the last call; the requests they are of are not forgotten yet.

        Returns:
            Events looked at.

        Raises:
            LeakError: One does not say what it announces.
        """
        if engine.ledger is None:
            return 0
        for request in engine._requests.values():
            tokens = list(request.all_token_ids)
            adapter = request.lora_request.lora_name if request.lora_request is not None else None
            for index, block_hash in enumerate(request.block_hashes):
                name, end = maybe_convert_block_hash(block_hash), (index + 1) * engine.hash_tokens
                self._prefixes.setdefault(name, _Prefix(tokens, end, adapter))
        named_ahead = {
            group.engine_index for group in engine.connector._geometry.groups if group.lookahead_hashes
        }
        told, engine.ledger.told = engine.ledger.told, []
        for event in told:
            if event.group_idx not in named_ahead:
                self._check(event)
        return len(told)

    def _check(self, event: BlockStored) -> None:
        first, last = (self._prefixes.get(event.block_hashes[index]) for index in (0, -1))
        if first is None or last is None:
            raise LeakError(f"announced, of nobody who has ever asked: {event}")
        begin = first.end - event.block_size
        parent = self._prefixes.get(event.parent_block_hash)
        if event.token_ids != last.tokens[begin : last.end]:
            raise LeakError(f"announced with other tokens than {last.tokens[begin : last.end]}: {event}")
        if event.lora_name != last.adapter:
            raise LeakError(f"announced for another adapter than {last.adapter}: {event}")
        if (parent.end if parent is not None else 0) != begin:
            raise LeakError(f"announced as what continues {parent}, and begins at token {begin}: {event}")
