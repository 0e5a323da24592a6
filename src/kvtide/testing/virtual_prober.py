"""Asks shared tiers in virtual time: answers come late, in part, out of order, stale or wrong, as drawn.

Fulfils the contract of ``Prober`` without a thread: what a question asks for, and in which batches, is as in
``transfer.prober``; when each batch is looked up and told is drawn from a seed. Knows questions and time;
does not know who asks, or what becomes of answers.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtide.keys import OffloadKey, make_offload_key
from kvtide.probing import ProbeAnswer, ProbeQuestion, Prober
from kvtide.testing.clock import VirtualClock
from kvtide.tiers.records import RecordRun
from kvtide.tiers.shared import SharedTier
from kvtide.transfer.prober import NamedMaker, answers

DEADLINE_S = 1.0
"""For the look-up of one batch."""

QUESTIONS_LIMIT = 24
"""Questions to one tier that may wait; beyond it the oldest is answered by nothing."""

FATES = ("at once", "quick", "slow", "late", "very late", "in part", "nothing", "stale", "wrong")
"""What questions are drawn like."""

ANSWERS_S = (0.0, 0.001, 0.02, 0.02, 0.2, math.inf)
"""After which answers may seem to be expected; who has none answers by nothing."""


class ProberPlan:
    """Draws what becomes of questions.

    Args:
        chance: The only source of choice.

    Attributes:
        weights: Of ``FATES``; may be replaced at any time. With none all is well.
        happened: How often each was drawn, and what became of questions.
        told: Keys that were said to be there: a hint that nobody has to keep.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.weights: Mapping[str, float] = {}
        self.happened: Counter[str] = Counter()
        self.told: set[OffloadKey] = set()

    def draw(self) -> str:
        """Decide over one question."""
        if not any(self.weights.values()):
            return "at once"
        (name,) = self.chance.choices(list(self.weights), list(self.weights.values()))
        self.happened[f"question: {name}"] += 1
        return name

    def draw_answer_s(self) -> float:
        """Decide after how many seconds answers seem to be expected from now on."""
        return self.chance.choice(ANSWERS_S) if any(self.weights.values()) else ANSWERS_S[1]

    def pause_s(self, name: str, first: bool) -> float:
        """Decide how long the next batch of a question takes."""
        match name:
            case "at once" | "nothing":
                return 0.0
            case "slow":
                return self.chance.random() * 0.08
            case "late" if first:
                return 0.05 + self.chance.expovariate(2.0)
            case "very late" if first:
                return 5.0 + self.chance.random() * 60.0
            case "stale":
                return self.chance.expovariate(2.0)
        return self.chance.expovariate(500.0)


@dataclass(slots=True, eq=False)
class _Asked:
    """A question whose last answer has not been told."""

    question: ProbeQuestion
    fate: str
    rest: Iterator[ProbeAnswer]
    due_s: float
    left: int = 1 << 30
    given_up: bool = False


@dataclass(slots=True)
class _TierAsked:
    """One tier, and when and how it can be asked."""

    make: Callable[[], SharedTier]
    opens_s: float
    answer_s: float
    tier: SharedTier | None = None
    asked: list[_Asked] = field(default_factory=list)


class VirtualProber(Prober):
    """See ``Prober``.

    Args:
        makers: Of the tiers, by index.
        plan: Decides over each question.
        clock: When things happen.

    Attributes:
        told_s: When a chunk was last told to be there, by tier and key.
        last: The question that was asked last.
    """

    def __init__(self, makers: Mapping[int, NamedMaker], plan: ProberPlan, clock: VirtualClock) -> None:
        self._plan = plan
        self._clock = clock
        now_s, chance = clock.monotonic(), plan.chance
        self._tiers = {
            index: _TierAsked(
                make,
                now_s + chance.choice((0.0, 0.0, chance.expovariate(50.0), chance.random())),
                plan.draw_answer_s(),
            )
            for index, (_, make) in makers.items()
        }
        self._answers: list[ProbeAnswer] = []
        self._questions: dict[int, ProbeQuestion] = {}
        self.closed = False
        self.told_s: dict[tuple[int, OffloadKey], float] = {}
        self.last: ProbeQuestion | None = None

    # -- what is asked ------------------------------------------------------------------------------

    def ask(self, question: ProbeQuestion) -> None:
        assert question.question_id not in self._questions, "a question is asked twice"
        assert question.parts, "nothing is asked for"
        self.last = self._questions[question.question_id] = question
        asked_of = self._tiers[question.tier]
        tier, chance = asked_of.tier, self._plan.chance
        if chance.random() < 0.1:
            asked_of.answer_s = self._plan.draw_answer_s()
        if tier is None or asked_of.answer_s == math.inf:
            self._plan.happened["question: nobody to ask"] += 1
            self._end(question)
            return
        fate = self._plan.draw()
        rest = answers(question, lambda run: self._found(tier, run, fate == "wrong"))
        if fate == "stale":
            rest = iter(list(rest))
        asked = _Asked(question, fate, rest, self._clock.monotonic() + self._plan.pause_s(fate, first=True))
        if fate in ("nothing", "in part"):
            asked.left = 0 if fate == "nothing" else chance.randrange(3)
        asked_of.asked.append(asked)
        if len(asked_of.asked) > QUESTIONS_LIMIT:
            self._plan.happened["question: one too many"] += 1
            self._end(asked_of.asked.pop(0).question)

    def take(self) -> list[ProbeAnswer]:
        self._progress()
        taken, self._answers = self._answers, []
        for answer in taken:
            self._note_told(answer)
            if answer.last:
                del self._questions[answer.question_id]
        return taken

    def forget(self, question_ids: Sequence[int]) -> None:
        for asked_of in self._tiers.values():
            for asked in asked_of.asked:
                if asked.question.question_id in question_ids:
                    self._plan.happened["question: nobody waits any more"] += not asked.given_up
                    asked.given_up = True

    def answer_s(self, tier: int) -> float:
        self._open()
        asked_of = self._tiers[tier]
        return math.inf if asked_of.tier is None or self.closed else asked_of.answer_s

    def close(self) -> None:
        for asked_of in self._tiers.values():
            if asked_of.tier is not None:
                asked_of.tier.close()
            asked_of.asked.clear()
        self.closed = True

    # -- what a simulation asks ---------------------------------------------------------------------

    def release(self) -> None:
        """Let all answers come now, and be expected soon."""
        for asked_of in self._tiers.values():
            asked_of.answer_s = ANSWERS_S[1]
            for asked in asked_of.asked:
                asked.due_s, asked.fate = self._clock.monotonic(), "at once"

    @property
    def open_ids(self) -> set[int]:
        """Questions whose last answer nobody has taken."""
        return set(self._questions)

    @property
    def is_idle(self) -> bool:
        """Whether every tier is open, and every question answered."""
        self._progress()
        return all(asked_of.tier is not None for asked_of in self._tiers.values()) and not self._questions

    def describe(self) -> str:
        """What it is about."""
        asked = [
            (index, asked.question.question_id, asked.fate, asked.due_s - self._clock.monotonic())
            for index, asked_of in self._tiers.items()
            for asked in asked_of.asked
        ]
        return f"questions {sorted(self._questions)} open, asked {asked}"

    # -- inside -------------------------------------------------------------------------------------

    def _open(self) -> None:
        for asked_of in self._tiers.values():
            if asked_of.tier is None and not self.closed and self._clock.monotonic() >= asked_of.opens_s:
                asked_of.tier = asked_of.make()
                asked_of.tier.open()

    def _progress(self) -> None:
        """Tell what is due by now, in the order in which it is due."""
        self._open()
        now_s = self._clock.monotonic()
        while not self.closed:
            due = [
                (asked.due_s, asked.question.question_id, asked, asked_of)
                for asked_of in self._tiers.values()
                for asked in asked_of.asked
                if asked.due_s <= now_s
            ]
            if not due:
                return
            _, _, asked, asked_of = min(due, key=lambda one: one[:2])
            answer = None if asked.given_up or not asked.left else next(asked.rest, None)
            if answer is None:
                asked_of.asked.remove(asked)
                self._end(asked.question)
                continue
            asked.left -= 1
            self._answers.append(answer)
            asked.due_s += self._plan.pause_s(asked.fate, first=False)

    def _found(self, tier: SharedTier, run: RecordRun, wrong: bool) -> list[bool]:
        present = [bool(one) for one in tier.find(run, DEADLINE_S)]
        if wrong:
            present = [one != (self._plan.chance.random() < 0.3) for one in present]
        return present

    def _end(self, question: ProbeQuestion) -> None:
        self._answers.append(ProbeAnswer(question.question_id, last=True))

    def _note_told(self, answer: ProbeAnswer) -> None:
        if not answer.present:
            return
        question = self._questions[answer.question_id]
        chunks = question.parts[answer.part].chunks
        for at, there in enumerate(answer.present, answer.start - chunks.start):
            key = make_offload_key(chunks.hashes[at], chunks.group_index)
            self._plan.happened[f"told: {'there' if there else 'absent'}"] += 1
            if there:
                self._plan.told.add(key)
                self.told_s[question.tier, key] = self._clock.monotonic()
