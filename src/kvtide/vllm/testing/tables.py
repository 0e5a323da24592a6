"""What the workers know of each request: its block tables and how many of its tokens.

Follows vLLM's step as a model runner does; does not know what is in the blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtide.vllm.testing.memory import GroupShape, places_of


@dataclass(slots=True)
class _Row:
    places: list[np.ndarray]  # per group
    known_tokens: int
    begin: int


class WorkerTables:
    """The persistent batch of a model runner, the same on every rank."""

    def __init__(self, groups: Sequence[GroupShape]) -> None:
        self._groups = tuple(groups)
        self._rows: dict[str, _Row] = {}

    def follow(self, step: Any, requests: Mapping[str, Any]) -> None:
        """Take in a step.

        Args:
            step: vLLM's ``SchedulerOutput``.
            requests: The scheduler's, for the tokens that a new or resumed request has.
        """
        for request_id in step.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            tokens = requests[new.req_id].num_tokens
            self._rows[new.req_id] = _Row(self._places(new.block_ids), tokens, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for request_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._rows[request_id]
            if request_id in cached.resumed_req_ids:
                row.places = self._places(new_ids)
                row.known_tokens = requests[request_id].num_tokens
            elif new_ids is not None:
                row.places = [
                    np.concatenate(pair) for pair in zip(row.places, self._places(new_ids), strict=True)
                ]
            row.begin = computed

    def begin(self, request_id: str) -> tuple[int, list[np.ndarray]]:
        """Tokens that have KV before this step, and where all of them are, per group."""
        row = self._rows[request_id]
        return row.begin, row.places

    def sample(self, request_id: str, end: int, tokens: Sequence[int]) -> list[int]:
        """Sample after ``end`` tokens: nothing within a prompt, and the next of ``tokens`` at its end."""
        row = self._rows[request_id]
        if end < row.known_tokens:
            return []
        assert end == row.known_tokens, f"{request_id}: {end} tokens computed, {row.known_tokens} known"
        row.known_tokens += 1
        return [tokens[end]]

    def _places(self, block_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [
            places_of(ids, group.tokens_per_block) for ids, group in zip(block_ids, self._groups, strict=True)
        ]
