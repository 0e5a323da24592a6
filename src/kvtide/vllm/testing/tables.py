"""What the workers know of each request: its block tables, its tokens, and which of them were guessed.

Follows vLLM's step as a model runner does; does not know what is in the blocks.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtide.vllm.testing.demands import Demanded, Span
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.model import PatternModel

NO_GUESS = -1


@dataclass(slots=True)
class _Row:
    tables: list[np.ndarray]  # per group
    known_tokens: int
    begin: int
    admitted: int
    settled: int | None = None  # tokens of whose KV it is known that they are right
    guesses: list[int] = field(default_factory=list)
    state_column: int | None = None
    state_offset: int = 0


class WorkerTables:
    """The persistent batch of a model runner, the same on every rank.

    Args:
        groups: The groups.
        asynchronous: A step is planned before it is known which guesses of the last one were right.
        guess_count: Guesses a drafter makes.
        chance: Decides which of them are right.
        checkpoint: Says for the first token of a step and its end where a state is left in the middle.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        asynchronous: bool,
        guess_count: int,
        chance: random.Random,
        checkpoint: Callable[[int, int], tuple[int, int] | None],
    ) -> None:
        self._checkpoint = checkpoint
        self._asynchronous = asynchronous
        self._guess_count = guess_count
        self._chance = chance
        # Recurrent groups have the same block size; vLLM keeps one place for all of them.
        self._recurrent = next((group for group in groups if group.kind is Kind.MAMBA), None)
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
            self._rows[new.req_id] = _Row(
                _arrays(new.block_ids), tokens, new.num_computed_tokens, new.num_computed_tokens
            )
        cached = step.scheduled_cached_reqs
        for request_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                tokens = requests[request_id].num_tokens
                self._rows[request_id] = _Row(_arrays(new_ids), tokens, computed, computed)
                continue
            row = self._rows[request_id]
            if new_ids is not None:
                row.tables = [np.concatenate(pair) for pair in zip(row.tables, _arrays(new_ids), strict=True)]
            if self._asynchronous and self._guess_count and row.settled is not None:
                # The plan takes all guesses for right; the workers know better.
                assert row.settled <= computed, f"{request_id}: {row.settled} settled, {computed} planned"
                row.begin = row.settled
            else:
                row.begin = computed

    def compute(self, request_id: str, step: Any, demanded: Demanded) -> tuple[Span, list[int]]:
        """Say what a step computes of a request, and what is sampled: nothing within a prompt."""
        row = self._rows[request_id]
        planned = step.scheduled_spec_decode_tokens.get(request_id, ())
        end = row.begin + step.num_scheduled_tokens[request_id]
        certain = end - len(planned)
        assert certain <= row.known_tokens, f"{request_id}: {certain} computed, {row.known_tokens} known"
        sampled: list[int] = []
        if certain == row.known_tokens:
            guesses = row.guesses if self._asynchronous else planned
            right = 0
            while right < min(len(planned), len(guesses)):
                if guesses[right] != demanded.tokens[certain + right]:
                    break
                right += 1
            sampled = demanded.tokens[certain : certain + right + 1]
        else:
            assert not planned, f"{request_id}: {len(planned)} guesses within a prompt"
        kept = certain + max(len(sampled) - 1, 0)
        span = Span(
            demanded,
            request_id,
            row.admitted,
            row.begin,
            end,
            kept,
            len(planned),
            row.tables,
            row.state_column,
            row.state_offset,
            None if planned else self._checkpoint(row.begin, end),
        )
        self._settle(row, span, sampled)
        return span, sampled

    def guesses(self, request_ids: Sequence[str]) -> list[list[int]]:
        """What a drafter guesses that comes next, per request."""
        return [self._rows[request_id].guesses for request_id in request_ids]

    def _settle(self, row: _Row, span: Span, sampled: list[int]) -> None:
        row.known_tokens += len(sampled)
        row.settled = span.kept
        row.guesses = []
        if sampled:
            ahead = span.demanded.tokens[row.known_tokens : row.known_tokens + self._guess_count]
            wrong = PatternModel.VOCABULARY
            row.guesses = [wrong if self._chance.random() < 0.3 else token for token in ahead]
        if self._recurrent is not None:
            row.state_column = self._recurrent.column(span.end)
            certain = span.end - span.guesses
            boundary = span.kept - span.kept % self._recurrent.block_tokens
            moved = boundary >= certain and self._recurrent.column(boundary) == row.state_column
            row.state_offset = 0 if moved else span.kept - certain


def _arrays(block_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int64) for ids in block_ids]
