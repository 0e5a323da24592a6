"""Whether what shared tiers are asked keeps its promises: who is held back, for how long, and what is asked.

Stands between the connector and its ``Probes``; what was told it looks up where the prober has written it
down. Knows requests, questions and time; what is in a store it does not know.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtide.geometry import chunks_needed
from kvtide.keys import ChunkRun, make_offload_key
from kvtide.manager.shared import CONFIRMED_FOR_S, SharedTierBooks
from kvtide.probing import ProbeAnswer
from kvtide.scheduler.probes import OpenQuestion, Probes
from kvtide.scheduler.state import RequestOffloadState
from kvtide.testing.clock import VirtualClock
from kvtide.testing.virtual_prober import VirtualProber
from kvtide.vllm.testing.below import lower_of
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import HangError, LeakError

STALE_S = CONFIRMED_FOR_S + 2
"""The books count whole seconds."""


class Questions:
    """Of one engine.

    Args:
        engine: To be watched, each process of it from ``watch`` on.
        clock: Its time.
        happened: Where to count.
    """

    def __init__(self, engine: ModelEngine, clock: VirtualClock, happened: Counter[str]) -> None:
        self._engine = engine
        self._clock = clock
        self._happened = happened
        self._held_s: dict[str, float] = {}
        self._wait_s = engine.connector._settings.probe_wait_s
        self._told_to: dict[tuple[int, ...], int] = {}
        self._apart = False
        self._probes: Probes | None = None

    def watch(self) -> None:
        """Stand between the connector of a process that has begun and its ``Probes``."""
        lower = lower_of(self._engine)
        self._probes = probes = None if lower is None else lower._probes
        self._held_s.clear()
        self._told_to.clear()
        self._apart = False
        if probes is None:
            return
        for name, watched in (
            ("_ask", self._ask),
            ("awaits", self._awaits),
            ("_note", self._note),
            ("reset", self._reset),
        ):
            setattr(probes, name, self._around(watched, getattr(probes, name)))

    def check(self) -> None:
        """Check what must hold at any time.

        Raises:
            LeakError: A question is open whose last answer has come.
        """
        if self._probes is None:
            return
        prober = self._prober
        if left := set(self._probes._open) - prober.open_ids:
            raise LeakError(f"questions {sorted(left)} are open and answered to their end")

    @property
    def _prober(self) -> VirtualProber:
        assert self._probes is not None
        assert isinstance(self._probes._prober, VirtualProber)
        return self._probes._prober

    @staticmethod
    def _around(watched: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: watched(inner, *arguments)

    def _ask(
        self, inner: Callable[..., None], state: RequestOffloadState, tier: SharedTierBooks, limit: int
    ) -> None:
        """See that whatever has not been told lately is asked for."""
        if self._apart:
            raise LeakError(f"{tier.plan.name} is asked after a reset")
        prober, now_s = self._prober, self._clock.monotonic()
        before = prober.last
        inner(state, tier, limit)
        parts = () if prober.last is before or prober.last is None else prober.last.parts
        asked = {
            make_offload_key(block_hash, part.chunks.group_index)
            for part in parts
            for block_hash in part.chunks.hashes
        }
        for group in self._engine.connector._geometry.groups:
            stop = chunks_needed(group, 0, limit).stop
            for key in group.run(state.request.block_hashes, 0, stop):
                told_s = prober.told_s.get((tier.index, key), -math.inf)
                if told_s > now_s - STALE_S:
                    continue
                if key not in asked:
                    raise LeakError(f"{tier.plan.name} is not asked for what it told {now_s - told_s} s ago")
                self._happened["asked again after a while"] += told_s > -math.inf

    def _awaits(self, inner: Callable[..., bool], state: RequestOffloadState, now_s: float) -> bool:
        """See that nobody is held back for long, or for a tier that is slow."""
        name = state.request.request_id
        if not inner(state, now_s):
            self._held_s.pop(name, None)
            return False
        self._happened["held back for an answer"] += 1
        since_s = self._held_s.setdefault(name, now_s)
        if now_s >= since_s + self._wait_s:
            raise HangError(
                f"{name} is held back for an answer, {now_s - since_s:.3f} s after the first time"
            )
        assert self._probes is not None
        asked = [self._probes._open[one] for one in state.below.questions if one in self._probes._open]
        if all(self._prober.answer_s(question.tier.index) > self._wait_s for question in asked):
            raise HangError(f"{name} is held back for a tier from which no answer is to be expected")
        return True

    def _note(self, inner: Callable[..., bool], question: OpenQuestion, answer: ProbeAnswer) -> bool:
        """See that what is told to be there, in a row, is in the books, and what is absent is not."""
        if not answer.present:
            return inner(question, answer)
        run, tier, present = question.runs[answer.part], question.tier, list(answer.present)
        part = answer.question_id, answer.part
        if answer.start != self._told_to.get(part, run.start):
            raise LeakError(f"{tier.plan.name}: {answer} leaves chunks out")
        self._told_to[part] = answer.start + len(present)
        before = self._first_lacking(tier, run)
        changed = inner(question, answer)
        # What a read did not find is not believed.
        chunks = run.between(answer.start, min(run.stop, answer.start + len(present)))
        believed = [there and not tier.is_refuted(key) for there, key in zip(present, chunks, strict=False)]
        in_a_row = believed.index(False) if False in believed else len(believed)
        if before >= answer.start and self._first_lacking(tier, run) < answer.start + in_a_row:
            raise LeakError(f"{tier.plan.name}: chunks from {answer.start} on are there and in no book")
        stop = answer.start + len(answer.present)
        keys, _, _ = tier._arrivals.positions(run)
        places = tier._catalog.slots(tier.index, run.group_index, keys, answer.start, stop)
        for at, (place, there) in enumerate(zip(places, answer.present, strict=False), answer.start):
            if place >= 0 and not there:
                raise LeakError(f"{tier.plan.name}: chunk {at} was told to be absent and is in the books")
        return changed

    @staticmethod
    def _first_lacking(tier: SharedTierBooks, run: ChunkRun) -> int:
        """The first chunk that is neither in the books nor being written; of a window that says nothing."""
        if not tier._looks_back[run.group_index]:
            return 1 << 30
        start, stop = tier.lacking(run.between(0, run.stop))
        return start if start < stop else run.stop

    def _reset(self, inner: Callable[..., None], keeps: bool) -> None:
        inner(keeps)
        self._apart = self._apart or not keeps
        assert self._probes is not None
        if self._probes.open_count:
            raise LeakError("a question of before a reset is open")
