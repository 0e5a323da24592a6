"""What shared tiers are asked for requests that wait, and how long these wait for the answers.

A request that arrives asks each shared tier for what it could use and neither host memory, a private tier nor
the engine has. Answers go into the tier's books, where they are hints: the read decides. Turns requests into
questions and answers into books; who asks, and how, is behind ``Prober``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvtide.geometry import KVGeometry, chunks_needed
from kvtide.jobs import StorageLoadStoreSpec
from kvtide.keys import ChunkRun
from kvtide.manager.cpu import HOST
from kvtide.manager.ladder import Ladder
from kvtide.manager.shared import SharedTierBooks
from kvtide.metrics import MetricsDelta
from kvtide.probing import ProbeAnswer, ProbePart, ProbeQuestion, Prober
from kvtide.scheduler.lookup import readable_tokens
from kvtide.scheduler.state import RequestOffloadState, SchedulerOffloadConfig


@dataclass(slots=True, eq=False)
class OpenQuestion:
    """A question whose last answer has not come.

    Attributes:
        tier: Who is asked.
        runs: For each part what it is about.
        visit: Of the request that asks.
        asker: Its name; None when it is gone.
    """

    tier: SharedTierBooks
    runs: list[ChunkRun]
    visit: int
    asker: str | None


class Probes:
    """Asks ``prober``.

    Args:
        config: Geometry and limits.
        ladder: Which chunk is where.
        prober: Who asks.
        metrics: Where to count.
    """

    def __init__(
        self, config: SchedulerOffloadConfig, ladder: Ladder, prober: Prober, metrics: MetricsDelta
    ) -> None:
        self._geometry: KVGeometry = config.geometry
        self._wait_s = config.probe_wait_s
        self._ladder = ladder
        self._prober = prober
        self._metrics = metrics
        self._tiers = [tier for tier in ladder.tiers if isinstance(tier, SharedTierBooks)]
        self._private = [tier for tier in ladder.tiers if not isinstance(tier, SharedTierBooks)]
        self._open: dict[int, OpenQuestion] = {}
        self._last_id = 0
        self._silent = False
        self._began_s: float | None = None

    # -- a request's life -----------------------------------------------------------------------

    def arrived(self, state: RequestOffloadState, engine_tokens: int) -> None:
        """Ask on behalf of a request that the engine has queued.

        Args:
            state: Of the request, which may be brought something.
            engine_tokens: What the engine itself seems to have of it.
        """
        if self._silent:
            return
        geometry, finest = self._geometry, self._geometry.finest
        limit = readable_tokens(state, geometry)
        run = finest.run(state.request.block_hashes, 0, finest.full_chunks(limit))
        if not run:
            return
        nearer = (HOST, *(tier.index for tier in self._private if tier.serves))
        owned = self._ladder.restore_point(run, nearer) * finest.tokens_per_chunk
        if limit < max(engine_tokens, geometry.restore_point(owned)) + geometry.restore_interval:
            return
        for tier in self._tiers:
            if tier.serves:
                self._ask(state, tier, limit)

    def awaits(self, state: RequestOffloadState, now_s: float) -> bool:
        """Whether a request should be held back for an answer that is expected soon."""
        questions = [self._open[one] for one in state.below.questions if one in self._open]
        if not any(self._prober.answer_s(one.tier.index) <= self._wait_s for one in questions):
            return False
        if state.below.asked_s is None:
            state.below.asked_s = now_s
        if now_s < state.below.asked_s + self._wait_s:
            return True
        for one in questions:
            self._metrics.add("tier_probes_late", 1, one.tier.plan.name)
        self.let_go(state)
        return False

    def let_go(self, state: RequestOffloadState) -> None:
        """Note a request that has been admitted, is gone, or waits no longer."""
        if state.below.questions:
            self._prober.forget(tuple(state.below.questions))
            for one in state.below.questions:
                if one in self._open:
                    self._open[one].asker = None
            state.below.questions.clear()

    # -- answers --------------------------------------------------------------------------------

    def take(self, now_s: float) -> bool:
        """Take in what has been answered; True when there is more to be read than before."""
        if self._began_s is None:
            self._began_s = now_s
        for tier in self._tiers:
            tier.now_s = int(now_s - self._began_s)
        changed = False
        for answer in self._prober.take():
            if (question := self._open.get(answer.question_id)) is not None:
                changed |= self._note(question, answer)
                if answer.last:
                    del self._open[answer.question_id]
        if changed:
            self._ladder.host.residency_epoch += 1
        return changed

    def reset(self, keeps: bool) -> None:
        """Forget who asked. Unless tiers keep what they hold, nothing of others is of use from now on."""
        self._prober.forget(tuple(self._open))
        self._open.clear()
        self._silent = self._silent or not keeps

    def close(self) -> None:
        """Ask no more."""
        self._prober.close()

    @property
    def are_reached(self) -> bool:
        """Whether every shared tier is open, on each rank and to who asks."""
        return all(tier.is_open and self._prober.answer_s(tier.index) < math.inf for tier in self._tiers)

    @property
    def open_count(self) -> int:
        """Questions whose last answer has not come."""
        return len(self._open)

    def check_invariants(self, states: Iterable[RequestOffloadState]) -> None:
        """Check who has asked.

        Raises:
            AssertionError: A question belongs to nobody, or to somebody who does not know.
        """
        asked = {one for state in states for one in state.below.questions}
        owned = {number for number, question in self._open.items() if question.asker is not None}
        assert owned <= asked, f"questions {owned - asked} belong to requests that do not know of them"

    # -- inside ---------------------------------------------------------------------------------

    def _ask(self, state: RequestOffloadState, tier: SharedTierBooks, limit: int) -> None:
        runs: list[ChunkRun] = []
        parts: list[ProbePart] = []
        # What is needed in a row first: of the others nothing that goes further is of use.
        for group in sorted(self._geometry.groups, key=lambda group: not group.looks_back):
            stop = chunks_needed(group, 0, limit).stop
            whole = group.run(state.request.block_hashes, 0, stop)
            run = whole.between(tier.first_doubtful(whole), stop).frozen()
            if run:
                runs.append(run)
                chunks = StorageLoadStoreSpec.of(tier.index, run, with_lead=True)
                parts.append(ProbePart(chunks, group.tokens_per_chunk, group.looks_back))
        if not parts:
            return
        self._last_id += 1
        self._open[self._last_id] = OpenQuestion(tier, runs, state.context.visit, state.request.request_id)
        state.below.questions.add(self._last_id)
        self._metrics.add("tier_probes", 1, tier.plan.name)
        self._prober.ask(ProbeQuestion(self._last_id, tier.index, tuple(parts)))

    def _note(self, question: OpenQuestion, answer: ProbeAnswer) -> bool:
        if not answer.present or answer.part >= len(question.runs):
            return False
        run = question.runs[answer.part]
        if not run.start <= answer.start < run.stop:
            return False
        stop = min(run.stop, answer.start + len(answer.present))
        present = answer.present[: stop - answer.start]
        there = sum(present)
        name = question.tier.plan.name
        self._metrics.add("tier_probed_chunks", there, f"{name},there")
        self._metrics.add("tier_probed_chunks", len(present) - there, f"{name},absent")
        return question.tier.note_presence(run.between(answer.start, stop), present, question.visit)
