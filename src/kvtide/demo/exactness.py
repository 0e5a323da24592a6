"""Whether answers after a load are the answers of a server that had everything in its own cache.

Knows records of requests that were put to both servers, one at a time. Does not know servers, clocks or
conversations. Equality is asked at equal cached length only: in bf16 another split of the prompt between
cache and computation gives other last bits, with or without kvtide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MIN_LOADED_TOKENS = 512
"""A request counts as compared when it has loaded at least this many tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one server said to one prompt.

    Attributes:
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens that were not computed: the engine's own hit and what was loaded.
        loaded_tokens: Prompt tokens that were brought back from host memory; 0 without a connector.
        token_ids: The generated tokens.
        logprobs: Log-probability of each generated token as ``float.hex()``: every bit counts.
    """

    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt put to both servers. ``None`` where no answer came.

    Attributes:
        user: Whose conversation, from 0.
        turn: Which turn of it, from 0.
    """

    user: int
    turn: int
    kvtide: Answer | None
    reference: Answer | None


class Difference(Enum):
    """In what two answers differ."""

    MISSING = "missing answer"
    LENGTH = "length"
    TOKEN = "token"
    LOGPROB = "log-probability"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers part.

    Attributes:
        position: Index of the first generated token that differs.
        kvtide: What kvtide's server said there, as text.
        reference: What the reference said there, as text.
    """

    user: int
    turn: int
    position: int
    difference: Difference
    kvtide: str
    reference: str

    def __str__(self) -> str:
        return (
            f"user {self.user}, turn {self.turn}, generated token {self.position}: {self.difference.value}"
            f" {self.kvtide} with kvtide, {self.reference} in the reference"
        )


@dataclass(frozen=True, slots=True)
class Incomparable:
    """A request that loaded enough and has no equal to be held against.

    Attributes:
        kvtide_cached_tokens: What kvtide's server had not to compute.
        reference_cached_tokens: What the reference had not to compute.
    """

    user: int
    turn: int
    kvtide_cached_tokens: int
    reference_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the records say.

    Attributes:
        exact: At least one request was compared, every compared one is equal in every token and in every
            bit of every log-probability, and no answer is missing.
        compared_requests: Requests that were held against the reference.
        prompt_tokens: Sum over compared requests.
        loaded_tokens: Sum over compared requests.
        diverging_requests: How many differ or are missing.
        first_divergence: The first of them in the order of the records.
        not_comparable: Requests that loaded enough at another cached length than the reference.
    """

    exact: bool
    compared_requests: int
    prompt_tokens: int
    loaded_tokens: int
    diverging_requests: int
    first_divergence: Divergence | None
    not_comparable: tuple[Incomparable, ...]


def judge(records: Sequence[Record], min_loaded_tokens: int = MIN_LOADED_TOKENS) -> Verdict:
    """Compare every request that loaded at least ``min_loaded_tokens`` with its reference."""
    compared: list[Answer] = []
    divergences: list[Divergence] = []
    incomparable: list[Incomparable] = []
    for record in records:
        if record.kvtide is None or record.reference is None:
            divergences.append(_missing(record))
            continue
        if record.kvtide.loaded_tokens < min_loaded_tokens:
            continue
        if not _comparable(record.kvtide, record.reference):
            incomparable.append(
                Incomparable(
                    record.user, record.turn, record.kvtide.cached_tokens, record.reference.cached_tokens
                )
            )
            continue
        compared.append(record.kvtide)
        if (divergence := _first_divergence(record, record.kvtide, record.reference)) is not None:
            divergences.append(divergence)
    return Verdict(
        exact=bool(compared) and not divergences,
        compared_requests=len(compared),
        prompt_tokens=sum(answer.prompt_tokens for answer in compared),
        loaded_tokens=sum(answer.loaded_tokens for answer in compared),
        diverging_requests=len(divergences),
        first_divergence=divergences[0] if divergences else None,
        not_comparable=tuple(incomparable),
    )


def _comparable(kvtide: Answer, reference: Answer) -> bool:
    return (kvtide.prompt_tokens, kvtide.cached_tokens) == (reference.prompt_tokens, reference.cached_tokens)


def _missing(record: Record) -> Divergence:
    said = ["no answer" if answer is None else "an answer" for answer in (record.kvtide, record.reference)]
    return Divergence(record.user, record.turn, 0, Difference.MISSING, said[0], said[1])


def _first_divergence(record: Record, kvtide: Answer, reference: Answer) -> Divergence | None:
    def at(position: int, difference: Difference, ours: object, theirs: object) -> Divergence:
        return Divergence(record.user, record.turn, position, difference, str(ours), str(theirs))

    both = zip(kvtide.token_ids, reference.token_ids, kvtide.logprobs, reference.logprobs, strict=False)
    for position, (our_id, their_id, our_logprob, their_logprob) in enumerate(both):
        if our_id != their_id:
            return at(position, Difference.TOKEN, our_id, their_id)
        if our_logprob != their_logprob:
            return at(position, Difference.LOGPROB, our_logprob, their_logprob)
    lengths = {len(side) for answer in (kvtide, reference) for side in (answer.token_ids, answer.logprobs)}
    # Two empty answers are equal and prove nothing; a log-probability too few would go unseen above.
    if len(lengths) > 1 or 0 in lengths:
        ours = f"{len(kvtide.token_ids)} tokens, {len(kvtide.logprobs)} log-probabilities"
        theirs = f"{len(reference.token_ids)} tokens, {len(reference.logprobs)} log-probabilities"
        return at(min(lengths), Difference.LENGTH, ours, theirs)
    return None
