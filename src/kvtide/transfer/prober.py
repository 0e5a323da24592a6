"""Asks shared tiers what they have: one thread a tier, questions in, answers out, nobody waits.

A question gallops: few keys first, then more, until one is missing. Knows questions, batches and deadlines;
does not know requests. What a call's end means for reads and writes is the lane's business, in another
process: here a tier has a breaker of its own.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvtide.errors import ConfigError, NodeUnavailableError, TierError
from kvtide.probing import ProbeAnswer, ProbePart, ProbeQuestion, Prober
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.records import RecordRun
from kvtide.tiers.shared import SharedTier
from kvtide.transfer.lane_survey import FIRST_REST_S, LONGEST_REST_S

logger = logging.getLogger(__name__)

FIRST_KEYS, MOST_KEYS = 16, 256
"""Keys of the first batch and of the longest: a miss costs little, a long prompt few calls."""

DEADLINE_S = 0.5
"""For one batch, unless requests may be held back for longer: nobody waits so long for an answer."""

QUESTIONS_LIMIT = 256
"""Questions that may wait; beyond it the oldest is answered by nothing."""

WEIGHT = 0.3
"""Of the last question, in the running mean of how long one takes."""


NamedMaker = tuple[str, Callable[[], SharedTier]]
"""A tier's name, and how it is made."""


class TierProber:
    """Asks one tier.

    Args:
        name: Of the tier.
        make: Builds the tier; called by the thread, and again until it does. What it built is opened by the
            thread, too, and that again until it is open.
        clock: Seconds.
        deadline_s: For one batch.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], SharedTier],
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._deadline_s = deadline_s
        self._name = name
        self._make = make
        self._clock = clock
        self._breaker = Breaker()
        self._changed = threading.Condition()
        self._questions: deque[tuple[ProbeQuestion, float]] = deque()
        self._answers: deque[ProbeAnswer] = deque()
        self._forgotten: set[int] = set()
        self._asking: ProbeQuestion | None = None  # whose last answer the thread owes
        self._call_began_s: float | None = None
        self._mean_s = 0.0
        self._opened = self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvtide-{name}-prober", daemon=True)
        self._thread.start()

    # -- what is asked ------------------------------------------------------------------------------

    def ask(self, question: ProbeQuestion) -> None:
        """See ``Prober``."""
        with self._changed:
            if not self._can_answer:
                self._answers.append(_nothing_more(question))
                return
            self._questions.append((question, self._clock()))
            if len(self._questions) > QUESTIONS_LIMIT:
                self._drop_first()
            self._changed.notify()

    def take(self) -> list[ProbeAnswer]:
        """See ``Prober``."""
        if not (self._answers or self._questions or self._asking):
            return []
        with self._changed:
            if not self._can_answer:
                self._give_up()
            answers, self._answers = list(self._answers), deque()
        return answers

    def forget(self, question_ids: Sequence[int]) -> None:
        """See ``Prober``."""
        with self._changed:
            waiting = {question.question_id for question, _ in self._questions}
            self._forgotten.update(waiting.intersection(question_ids))

    def answer_s(self) -> float:
        """Say after how many seconds an answer is to be expected; infinite when none is."""
        with self._changed:
            return self._mean_s if self._can_answer else math.inf

    def close(self, patience_s: float = 1.0) -> None:
        """End; the tier is closed by its thread, when that comes back."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience_s)

    # -- what cannot be asked; the lock is held -----------------------------------------------------

    @property
    def _can_answer(self) -> bool:
        if not self._opened or self._closing:
            return False
        began_s, now_s = self._call_began_s, self._clock()
        stuck = began_s is not None and now_s > began_s + self._deadline_s
        return not stuck and self._breaker.state(now_s) is not BreakerState.OPEN

    def _give_up(self) -> None:
        """Answer by nothing: a call that does not return keeps nobody waiting."""
        while self._questions:
            self._drop_first()
        if self._asking is not None:
            self._answers.append(_nothing_more(self._asking))
            self._asking = None

    def _drop_first(self) -> None:
        question, _ = self._questions.popleft()
        self._forgotten.discard(question.question_id)
        self._answers.append(_nothing_more(question))

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        tier = self._open()
        if tier is None:
            return
        with self._changed:
            self._opened = True
        while (taken := self._next()) is not None:
            question, asked_s = taken
            self._answer(tier, question)
            took_s = self._clock() - asked_s
            with self._changed:
                if self._asking is question:
                    self._asking = None
                    self._answers.append(_nothing_more(question))
                self._mean_s += WEIGHT * (took_s - self._mean_s)
        tier.close()

    def _open(self) -> SharedTier | None:
        rest_s, told = FIRST_REST_S, False
        tier: SharedTier | None = None
        while True:
            try:
                if tier is None:
                    tier = self._make()
                tier.open()
                return tier
            except Exception as error:  # of a tier that others wrote: serving goes on without it
                if not told:
                    unforeseen = not isinstance(error, TierError | ConfigError)
                    logger.warning("%s cannot be asked: %s", self._name, error, exc_info=unforeseen)
                told = True
            with self._changed:
                closing = self._changed.wait_for(lambda: self._closing, rest_s)
            if closing:
                if tier is not None:
                    tier.close()
                return None
            rest_s = min(2 * rest_s, LONGEST_REST_S)

    def _next(self) -> tuple[ProbeQuestion, float] | None:
        with self._changed:
            while True:
                if self._closing:
                    return None
                while self._questions:
                    question, asked_s = self._questions[0]
                    wanted = question.question_id not in self._forgotten
                    if wanted and self._breaker.allows(self._clock()):
                        self._questions.popleft()
                        self._asking = question
                        return question, asked_s
                    self._drop_first()
                self._changed.wait()

    def _answer(self, tier: SharedTier, question: ProbeQuestion) -> None:
        """Tell what the tier has, batch by batch; on trouble, no more."""
        for answer in answers(question, partial(self._find, tier)):
            with self._changed:
                if self._closing or self._asking is not question:
                    return
                self._answers.append(answer)

    def _find(self, tier: SharedTier, batch: RecordRun) -> list[bool] | None:
        self._call_began_s = self._clock()
        try:
            present = [bool(one) for one in tier.find(batch, self._deadline_s)]
            if len(present) != len(batch):
                raise RuntimeError(f"{len(batch)} chunks were asked for, {len(present)} answers came")
        except NodeUnavailableError:  # the others go on: nothing against the tier
            self._call_began_s = None
            return None
        except Exception as error:  # as above
            if not isinstance(error, TierError):
                logger.exception("%s: a question failed in a way that no tier may", self._name)
            self._note_end(False)
            return None
        self._note_end(True)
        return present

    def _note_end(self, went_well: bool) -> None:
        now_s = self._clock()
        began_s, self._call_began_s = self._call_began_s, None
        in_time = began_s is not None and now_s <= began_s + self._deadline_s
        with self._changed:
            if went_well and in_time:
                self._breaker.succeeded()
            else:
                self._breaker.failed(now_s)


class ThreadProber(Prober):
    """Asks every shared tier.

    Args:
        probers: By index of the tier.
    """

    def __init__(self, probers: Mapping[int, TierProber]) -> None:
        self._probers = dict(probers)

    def ask(self, question: ProbeQuestion) -> None:
        self._probers[question.tier].ask(question)

    def take(self) -> list[ProbeAnswer]:
        return [answer for prober in self._probers.values() for answer in prober.take()]

    def forget(self, question_ids: Sequence[int]) -> None:
        for prober in self._probers.values():
            prober.forget(question_ids)

    def answer_s(self, tier: int) -> float:
        return self._probers[tier].answer_s()

    def close(self) -> None:
        for prober in self._probers.values():
            prober.close()


def threads_asking(makers: Mapping[int, NamedMaker], wait_s: float) -> ThreadProber:
    """Begin to ask tiers, by index; each is made by its own thread.

    Args:
        makers: Of the tiers.
        wait_s: For which a request may be held back.
    """
    deadline_s = max(DEADLINE_S, wait_s)
    return ThreadProber(
        {index: TierProber(name, make, deadline_s=deadline_s) for index, (name, make) in makers.items()}
    )


def answers(question: ProbeQuestion, find: Callable[[RecordRun], list[bool] | None]) -> Iterator[ProbeAnswer]:
    """Ask what a question needs to know, a batch at a time; its last answer is not among these.

    Args:
        question: Of one tier.
        find: Says which chunks of a run are there; None when that cannot be had: then there is no more.
    """
    reach_tokens: int | None = None
    for index, part in enumerate(question.parts):
        reached = part.chunks.start
        for batch in batches(part, reach_tokens):
            present = find(batch)
            if present is None:
                return
            yield ProbeAnswer(question.question_id, index, batch.start, present)
            in_a_row = present.index(False) if False in present else len(present)
            reached = batch.start + in_a_row
            if part.in_a_row and in_a_row < len(present):
                break
        if part.in_a_row:
            tokens = reached * part.tokens_per_chunk
            reach_tokens = tokens if reach_tokens is None else min(reach_tokens, tokens)


def batches(part: ProbePart, reach_tokens: int | None) -> Iterator[RecordRun]:
    """Divide a part into runs to ask for: short ones first, then longer, ``MOST_KEYS`` at most.

    Args:
        part: Of a question.
        reach_tokens: What other groups have in a row, None when they were not asked; beyond it a part that is
            not in a row is not asked for.
    """
    chunks = part.chunks
    run = RecordRun(chunks.group_index, chunks.start, chunks.hashes, chunks.parent_hash, chunks.lead)
    at, stop, size = run.start, run.start + len(run), FIRST_KEYS
    if not part.in_a_row:
        size = MOST_KEYS
        if reach_tokens is not None:
            stop = min(stop, reach_tokens // part.tokens_per_chunk)
    while at < stop:
        yield run.between(at, min(at + size, stop))
        at, size = at + size, min(2 * size, MOST_KEYS)


def _nothing_more(question: ProbeQuestion) -> ProbeAnswer:
    return ProbeAnswer(question.question_id, last=True)
