"""What shared tiers are asked ahead of reads: "do you have these", and what they answer.

Values and a contract: whoever decides asks, and takes answers when they are there; it never waits for one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.jobs import StorageLoadStoreSpec


@dataclass(frozen=True, slots=True)
class ProbePart:
    """Chunks of one group that a question is about.

    Attributes:
        chunks: In prefix order, with their lead.
        tokens_per_chunk: Of the group.
        in_a_row: A chunk is of use only with all before it: what follows one that is missing is not asked
            for, and of other groups nothing that goes further than those.
    """

    chunks: StorageLoadStoreSpec
    tokens_per_chunk: int
    in_a_row: bool


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """What one request would want of one tier.

    Attributes:
        question_id: Never used twice.
        tier: From 1.
        parts: The groups with ``in_a_row`` first.
    """

    question_id: int
    tier: int
    parts: tuple[ProbePart, ...]


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Some of the answer to a question.

    Attributes:
        question_id: Of the question.
        part: Index of the part it is about.
        start: First chunk meant, counted from the beginning of the prompt.
        present: For each chunk from there on whether it is there: a hint, the read decides.
        last: Nothing more comes to this question.
    """

    question_id: int
    part: int = 0
    start: int = 0
    present: Sequence[bool] = field(default=(), repr=False)
    last: bool = False


class Prober(ABC):
    """Asks shared tiers. No call waits; called by one thread."""

    @abstractmethod
    def ask(self, question: ProbeQuestion) -> None:
        """Take a question. The last answer to it comes even if nobody can be asked."""

    @abstractmethod
    def take(self) -> list[ProbeAnswer]:
        """Hand out the answers that have come since the last call."""

    @abstractmethod
    def forget(self, question_ids: Sequence[int]) -> None:
        """Ask no further for whoever is gone; the last answers come all the same."""

    @abstractmethod
    def answer_s(self, tier: int) -> float:
        """Say after how many seconds an answer is to be expected; infinite when none is."""

    @abstractmethod
    def close(self) -> None:
        """End; calls that do not return are left to themselves."""
