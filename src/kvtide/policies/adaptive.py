"""Adaptive: what brings the most hits for its place stays, as learnt from what was asked for again.

docs/adaptive.md tells the idea. Here is how uses of runs become classes, and what chunks that a visit
would bring are compared with. Learning is in ``adaptive_memory`` and ``adaptive_density``, ranking in
``adaptive_candidates``; ``adaptive_guard`` says when recency is better. Without ``visited`` it is LRU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtide.policies.adaptive_candidates import Candidates
from kvtide.policies.adaptive_density import MOST_SEEN, HitDensity, class_of, path_class
from kvtide.policies.adaptive_guard import Guard
from kvtide.policies.adaptive_memory import MARK_LIMIT, Memory, marks_of
from kvtide.policies.lru import ALL

SEED = 20_240_607

LEAST_REMEMBERED, MOST_REMEMBERED = 4096, 32_768
REMEMBERED_SHARE = 8
"""Chunks that are remembered: one in so many of the capacity, within these bounds."""

LEARNT_PER_VISIT = 256
PURGED_PER_VISIT = 1024
VISITS_KEPT = 4096
"""Work of one visit, and visits that may still bring chunks, at most."""

LATEST_S = 1e12
"""No time is later, whatever somebody says."""

_HORIZON = 16  # capacities that should be missed before a sampled chunk is forgotten
_LEAST_SHARE = 256


class _Visit(NamedTuple):
    """What a request has come to.

    Attributes:
        path: Its part of every class.
        steps: ``(end, seen)`` from the top of what was missing; behind the last one nothing was seen.
    """

    path: int
    steps: tuple[tuple[int, int], ...]


_UNTOLD = _Visit(0, ())


class AdaptivePolicy:
    """Hit density by class, with a guard.

    Args:
        seed: Of the samples.
    """

    remembers = False

    def __init__(self, seed: int = SEED) -> None:
        self._seed = seed
        self._capacity = 0
        self.clear()

    def clear(self) -> None:
        self._density = HitDensity()
        self._candidates = Candidates(self._density, self._seed)
        self._seen = self._candidates.columns.ints("B")
        self._visitors = self._candidates.columns.ints("q")
        self._visits: dict[int, _Visit] = {}
        self._sampled, self._ends = Memory(), Memory()
        self._limit = MARK_LIMIT  # marks below are sampled
        self._missed = self._requests = 0
        self._next_fit = 32
        self._guard = Guard(self._density, self._capacity)

    def resize(self, capacity: int) -> None:
        if capacity != self._capacity:
            self._capacity = capacity
            self._guard = Guard(self._density, capacity)
            self._candidates.by_recency = False

    @property
    def ranks_by_recency(self) -> bool:
        """Whether the guard has fallen back to LRU."""
        return self._candidates.by_recency

    @property
    def remembered_count(self) -> int:
        """Chunks that are remembered, beside the runs themselves."""
        return len(self._sampled) + len(self._ends)

    # -- runs -----------------------------------------------------------------------------------

    def inserted(self, run: int, count: int, visit: int, depth: int) -> None:
        self._candidates.columns.cover(run)
        self._candidates.withdraw(run)
        told = self._visits.get(visit, _UNTOLD)
        seen = _seen_at(told, depth)
        self._visitors[run], self._seen[run] = visit, min(seen + 1, MOST_SEEN)
        self._candidates.use(run, class_of(seen, told.path))

    def joins(self, run: int, visit: int) -> bool:
        return self._seen[run] == 1 and self._visitors[run] == visit

    def grown(self, run: int, count: int) -> None:
        """Ranks are of runs, however long."""

    def touched(self, run: int, visit: int) -> None:
        if self._visitors[run] == visit:
            self._candidates.use(run, self._candidates.classes[run])
            return
        told = self._visits.get(visit, _UNTOLD)
        seen = self._seen[run]
        self._visitors[run], self._seen[run] = visit, min(seen + 1, MOST_SEEN)
        self._candidates.use(run, class_of(seen, told.path))

    def split(self, run: int, head: int, head_count: int) -> None:
        self._candidates.columns.cover(head)
        self._candidates.withdraw(head)
        self._visitors[head], self._seen[head] = self._visitors[run], self._seen[run]
        self._candidates.copy(head, run)

    def offer(self, run: int) -> None:
        self._candidates.offer(run)

    def withdraw(self, run: int) -> None:
        self._candidates.withdraw(run)

    def victim(self) -> tuple[int, int] | None:
        lowest = self._candidates.lowest()
        return None if lowest is None else (lowest[2], ALL)

    def shrunk(self, run: int, count: int) -> None:
        """Ranks are of runs, however long."""

    def removed(self, run: int) -> None:
        self._candidates.withdraw(run)

    def remember(self, run: int) -> bool:
        self.removed(run)
        return False

    def forgotten(self) -> tuple[int, int] | None:
        return None

    def recalled(self, run: int) -> None:
        """Names are sampled, see ``visited``; those of runs are not kept."""

    # -- visits ---------------------------------------------------------------------------------

    def visited(
        self, visit: int, now_s: float, keys: Sequence[bytes], runs: Sequence[tuple[int, int]]
    ) -> None:
        candidates = self._candidates
        # In this order: what is no number is not later either.
        candidates.now_s = now_s = max(candidates.now_s, min(now_s, LATEST_S))
        candidates.forget_ranks()
        if visit in self._visits or not keys:
            return
        marks = marks_of(keys, self._seed)
        told = self._recognised(marks, runs)
        while len(self._visits) >= VISITS_KEPT:
            del self._visits[next(iter(self._visits))]
        self._visits[visit] = told
        seen = self._seen_along(told, runs, len(keys))
        classes = [class_of(times, told.path) for times in range(MOST_SEEN + 1)]
        self._missed += len(keys) - (runs[-1][1] if runs else 0)
        self._learn(marks, seen, classes)
        self._ends.put(int(marks[-1]), 0, now_s, min(seen[-1] + 1, MOST_SEEN), 0)
        if len(self._ends) > self._most_remembered:
            self._ends.drop(self._ends.oldest()[0])
        chosen = _below(marks, self._guard.limit)
        self._guard.serve(marks[chosen].tolist(), [classes[seen[at]] for at in chosen.tolist()], now_s)
        candidates.by_recency = self._guard.prefers_recency
        self._requests += 1
        self._fit()

    def seams(self, visit: int, start: int, stop: int) -> list[int]:
        steps = self._visits.get(visit, _UNTOLD).steps
        return [end for end, _ in steps if start < end < stop]

    def yields(self, visit: int, position: int) -> bool:
        told = self._visits.get(visit)
        if told is None or self._candidates.by_recency:
            return False
        lowest = self._candidates.lowest()
        value = self._candidates.value(class_of(_seen_at(told, position), told.path), 0.0)
        return lowest is not None and value < lowest[0]

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _most_remembered(self) -> int:
        return min(max(LEAST_REMEMBERED, self._capacity // REMEMBERED_SHARE), MOST_REMEMBERED)

    def _recognised(self, marks: np.ndarray, runs: Sequence[tuple[int, int]]) -> _Visit:
        """Find what is remembered of a path: when it was used, how deep, how often what is missing was."""
        covered = runs[-1][1] if runs else 0
        sampled = _below(marks[covered:], self._limit)
        missing = marks[covered:].tolist()
        found = {*self._ends.among(missing)}
        found.update(sampled[self._sampled.among([missing[at] for at in sampled])].tolist())
        time_s = self._candidates.times_s[runs[-1][0]] if runs else None
        depth, seen = covered, 0
        steps: list[tuple[int, int]] = []
        for at in sorted(found, reverse=True):
            known = self._sampled.get(missing[at]) or self._ends.get(missing[at])
            assert known is not None, "found, and not remembered"
            if depth == covered:
                time_s, depth = known.time_s, covered + at + 1
            if known.seen > seen:
                # What was seen has been seen with all before it.
                seen = known.seen
                steps.append((covered + at + 1, seen))
        gap_s = None if time_s is None else self._candidates.now_s - time_s
        return _Visit(path_class(gap_s, len(marks) - depth), tuple(reversed(steps)))

    def _seen_along(self, told: _Visit, runs: Sequence[tuple[int, int]], count: int) -> list[int]:
        """List for every chunk of a prompt how often it has been asked for before."""
        seen: list[int] = []
        for run, end in runs:
            seen += [self._seen[run]] * (end - len(seen))
        for end, times in (*told.steps, (count, 0)):
            seen += [times] * (end - len(seen))
        return seen

    def _learn(self, marks: np.ndarray, seen: Sequence[int], classes: Sequence[int]) -> None:
        """Note which sampled chunks were asked for again, and watch them from now on."""
        sampled, density, now_s = self._sampled, self._density, self._candidates.now_s
        chosen = _below(marks, self._limit)
        while len(chosen) > LEARNT_PER_VISIT and self._halve():
            chosen = _below(marks, self._limit)
        if sampled.is_purging:
            sampled.purge(self._limit, PURGED_PER_VISIT)
        for at, mark in zip(chosen.tolist(), marks[chosen].tolist(), strict=True):
            times = seen[at]
            before = sampled.put(mark, classes[times], now_s, min(times + 1, MOST_SEEN), self._missed)
            if before is not None:
                density.asked_again(before.class_index, now_s - before.time_s)
            while len(sampled) > self._most_remembered:
                self._let_go()

    def _let_go(self) -> None:
        """Stop watching the chunk asked for longest ago; where that is too soon, sample fewer from now on."""
        mark, before = self._sampled.oldest()
        is_short = self._missed - before.missed < _HORIZON * self._capacity
        if mark < self._limit and is_short and not self._sampled.is_purging and self._halve():
            return
        self._sampled.drop(mark)
        if mark < self._limit:
            self._density.given_up(before.class_index, self._candidates.now_s - before.time_s)

    def _halve(self) -> bool:
        if self._limit <= MARK_LIMIT // _LEAST_SHARE:
            return False
        self._limit //= 2
        self._sampled.begin_purge()
        return True

    def _fit(self) -> None:
        """Do a little of a fit, or begin one when it is due."""
        if self._density.is_fitting:
            self._density.fit_step()
        elif self._requests > self._next_fit:
            classes, times_s = self._sampled.waiting(self._limit)
            self._density.begin_fit(classes, self._candidates.now_s - times_s)
            self._next_fit += 32 if self._requests < 256 else 128 if self._requests < 2000 else 500


def _below(marks: np.ndarray, limit: int) -> np.ndarray:
    """Find the marks below a limit: ``int64[n]``, their places."""
    return np.flatnonzero(marks <= np.uint64(limit - 1)) if limit else np.zeros(0, dtype=np.int64)


def _seen_at(told: _Visit, position: int) -> int:
    for end, seen in told.steps:
        if position < end:
            return seen
    return 0
