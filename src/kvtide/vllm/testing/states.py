"""What recurrent layers read and write: states, and where vLLM's model runners leave them.

Judges bytes against what requests demand; knows neither the connector nor its books.
"""

from collections.abc import Sequence

import numpy as np

from kvtide.vllm.testing.contents import WRONG, Cached, Contents, Loaded
from kvtide.vllm.testing.demands import Demanded, Span


class StateContents(Contents):
    """Recurrent layers: a block holds the state after a token, moved along as vLLM's runners do ("align").

    The state after the last token of a step is left in the block in which that token is; with guesses, the
    states after each of them in the blocks behind it, until it is known which were right.
    """

    def prepare(self, spans: Sequence[Span]) -> None:
        continued = [span for span in spans if span.begin]
        if not continued:
            return
        sources = np.array([self._source(span) for span in continued])
        targets = np.array([self._target(span) for span in continued])
        # All are read before the first is written, as in the runners.
        self.memory.write(self.group_index, targets, self.memory.read(self.group_index, sources))
        states = np.array([span.demanded.states[span.begin - 1] for span in continued])
        self._check(continued, targets, states, "state continued")

    def write(self, spans: Sequence[Span]) -> None:
        blocks, states, right = self._left(spans)
        words = np.where(right, states, states ^ WRONG)
        self.memory.write(self.group_index, blocks, words ^ self.marks)
        for span in spans:
            if span.checkpoint is not None:
                end, column = span.checkpoint
                block = span.tables[self.group_index][column : column + 1]
                self.memory.write(self.group_index, block, span.demanded.states[end - 1 : end] ^ self.marks)

    def read(self, spans: Sequence[Span]) -> None:
        blocks, states, right = self._left(spans)
        found = self.memory.read(self.group_index, blocks[right])
        names = ", ".join(span.request_id for span in spans)
        self.compare(found, states[right], slice(None), f"{names}: states left")

    def settle(self, spans: Sequence[Span]) -> None:
        for span in spans:
            # Of several guesses a boundary may have been passed: its state goes where it is looked for.
            boundary = span.kept - span.kept % self.group.tokens_per_block
            certain = span.end - span.guesses
            if span.guesses and boundary >= certain:
                table = span.tables[self.group_index]
                source = self.group.column(span.end) + boundary - certain
                state = self.memory.read(self.group_index, table[source : source + 1])
                target = self.group.column(boundary)
                self.memory.write(self.group_index, table[target : target + 1], state)

    def check_loaded(self, loaded: Loaded) -> int:
        at, end = self.group.column(loaded.end), loaded.end
        ranks = slice(loaded.rank, loaded.rank + 1)
        found = self.memory.read(self.group_index, loaded.table[at : at + 1], ranks)
        what = f"{loaded.request_id}: loaded {end} tokens"
        self.compare(found, loaded.demanded.states[end - 1 : end], ranks, what)
        return found.size

    def write_loaded(self, rank: int, demanded: Demanded, table: np.ndarray, tokens: range) -> None:
        at = self.group.column(tokens.stop)
        ranks = slice(rank, rank + 1)
        words = demanded.states[tokens.stop - 1 : tokens.stop] ^ self.marks[ranks]
        self.memory.write(self.group_index, table[at : at + 1], words, ranks)

    def check_cached(self, cached: Sequence[Cached]) -> None:
        blocks = np.array([one.block for one in cached])
        states = np.array([one.demanded.states[one.end - 1] for one in cached])
        found = self.memory.read(self.group_index, blocks)
        wrong = np.argwhere((found != states ^ self.marks).any((0, 1)))
        if len(wrong):
            at = int(wrong[0][0])
            what = f"cached state in block {blocks[at]} after {cached[at].end} tokens"
            self.compare(found[..., at : at + 1], states[at : at + 1], slice(None), what)

    def _source(self, span: Span) -> int:
        """Name the block in which the state after the tokens before this step was left."""
        column = span.state_column if span.state_column is not None else self.group.column(span.begin)
        return int(span.tables[self.group_index][column + span.state_offset])

    def _target(self, span: Span) -> int:
        """Name the block in which this step continues it: where it is, within one block."""
        column = span.state_column if span.state_column is not None else self.group.column(span.begin)
        last = self.group.column(span.end)
        return self._source(span) if last == column else int(span.tables[self.group_index][last])

    def _left(self, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """List blocks that this step leaves states in, those states, and which of them are right."""
        blocks, states, right = [], [], []
        for span in spans:
            first, certain = self.group.column(span.end), span.end - span.guesses
            blocks.append(span.tables[self.group_index][first : first + span.guesses + 1])
            states.append(span.demanded.states[certain - 1 : span.end])
            right.append(np.arange(certain, span.end + 1) <= span.kept)
        return np.concatenate(blocks), np.concatenate(states), np.concatenate(right)

    def _check(self, spans: Sequence[Span], blocks: np.ndarray, states: np.ndarray, what: str) -> None:
        found = self.memory.read(self.group_index, blocks)
        if np.array_equal(found, states ^ self.marks):
            return
        for index, span in enumerate(spans):
            named = f"{span.request_id}: {what} after {span.begin} of {span.end}, block {blocks[index]}"
            self.compare(found[..., index : index + 1], states[index : index + 1], slice(None), named)
