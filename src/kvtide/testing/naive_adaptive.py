"""The adaptive policy chunk by chunk, with its whole cache: slow, and meant to be obviously right.

What ``kvtide.policies.adaptive`` is held against, in the production host tier. Knows prompts, chunks and
times; takes one request at a time, ranks all that may leave and not a sample, and remembers without bound:
with so few chunks that nothing is sampled both have to agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, log2, sqrt

SEEN_LIMITS = (0, 1, 2, 3, 5)
GAP_LIMITS_S = (4, 12, 36, 160)
NEW_LIMITS = (0, 1, 4, 16, 48)
AGES = 44
EDGES_S: list[float] = [0.0, *(2.0 ** (age / 2) for age in range(AGES))]
WIDTHS_S = [end - begin for begin, end in pairwise(EDGES_S)]

Class = tuple[int, int, int]
"""How often asked for, how long ago its path was, how much of the prompt is new: 0 to 5 each."""

ALL_CLASSES = [(seen, gap, new) for seen in range(6) for gap in range(6) for new in range(6)]


def seen_class(seen: int) -> int:
    """0, 1, 2, 3, 4 to 5, more."""
    return sum(seen > limit for limit in SEEN_LIMITS)


def age_of(age_s: float) -> int:
    """Number an age: below a second 0, then two an octave."""
    return max(age for age in range(AGES) if EDGES_S[age] <= age_s)


class NaiveDensity:
    """Hits and time at risk, age by age; from them what is worth how much."""

    def __init__(self) -> None:
        self.hits = {cls: [0.0] * AGES for cls in ALL_CLASSES}
        self.at_risk_s = {cls: [0.0] * AGES for cls in ALL_CLASSES}
        self.table = {cls: [1 / (EDGES_S[age] + 1) for age in range(AGES)] for cls in ALL_CLASSES}

    def waited(self, rows: dict[Class, list[float]], cls: Class, age_s: float, hit: bool) -> None:
        """Add the time that a chunk was at risk."""
        last = age_of(age_s)
        for age in range(last):
            rows[cls][age] += WIDTHS_S[age]
        rows[cls][last] += max(age_s - EDGES_S[last], WIDTHS_S[last] / 4 if hit else 0.0)

    def asked_again(self, cls: Class, age_s: float) -> None:
        """Note a hit."""
        self.waited(self.at_risk_s, cls, age_s, hit=True)
        self.hits[cls][age_of(age_s)] += 1

    def value(self, cls: Class, age_s: float) -> float:
        """Read the table between the middles of ages."""
        at = age_s if age_s < 1 else 1 + 2 * log2(age_s)
        at = min(max(at - 0.5, 0.0), AGES - 1)
        age, row = int(at), self.table[cls]
        return row[age] + (row[min(age + 1, AGES - 1)] - row[age]) * (at - age)

    def fitted(self, waiting: Sequence[tuple[Class, float]]) -> dict[Class, list[float]]:
        """Make a new table, with chunks that still wait at an age, and let fade what was learnt."""
        risk = {cls: list(row) for cls, row in self.at_risk_s.items()}
        for cls, age_s in waiting:
            self.waited(risk, cls, age_s, hit=False)
        ages, table = range(AGES), {}
        overall = [
            (sum(self.hits[cls][age] for cls in ALL_CLASSES) + 0.02)
            / (sum(risk[cls][age] for cls in ALL_CLASSES) + WIDTHS_S[age])
            for age in ages
        ]
        for seen in range(6):
            kin = [cls for cls in ALL_CLASSES if cls[0] == seen]
            of_seen = [
                (sum(self.hits[cls][age] for cls in kin) + 50 * WIDTHS_S[age] * overall[age])
                / (sum(risk[cls][age] for cls in kin) + 50 * WIDTHS_S[age])
                for age in ages
            ]
            for cls in kin:
                hazards = (
                    (self.hits[cls][age] + 100 * WIDTHS_S[age] * of_seen[age])
                    / (risk[cls][age] + 100 * WIDTHS_S[age])
                    for age in ages
                )
                table[cls] = best_ratios(tuple(hazards))
        for rows in (self.hits, self.at_risk_s):
            for row in rows.values():
                row[:] = [0.9 * number for number in row]
        return table


@lru_cache(maxsize=1024)
def best_ratios(hazards: tuple[float, ...]) -> list[float]:
    """For each age try every age until which to keep: chance of a hit by the time held."""
    found = []
    for first in range(AGES):
        there, hits, held_s, best = 1.0, 0.0, 0.0, 0.0
        for age in range(first, AGES):
            chance = 1 - exp(-hazards[age] * WIDTHS_S[age])
            hits += there * chance
            held_s += there * chance / hazards[age]
            there *= 1 - chance
            best = max(best, hits / held_s)
        found.append(best)
    return found


@dataclass(slots=True)
class Resident:
    """A chunk in a cache.

    Attributes:
        cls: Of its last use.
        time_s: Of its last use.
        use: Its number.
        seen: How often it has been asked for.
    """

    cls: Class
    time_s: float
    use: int
    seen: int


class NaiveCache:
    """Chunks by their prompts, which are tuples; a chunk leaves after all that extend it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunks: dict[tuple[bytes, ...], Resident] = {}
        self.uses = 0

    def hits(self, prompt: Sequence[bytes]) -> int:
        """Count the leading chunks that are there."""
        return next(
            (at for at in range(len(prompt)) if tuple(prompt[: at + 1]) not in self.chunks), len(prompt)
        )

    def lowest(
        self, rank: Callable[[Resident], float], keep: Sequence[bytes] = ()
    ) -> tuple[float, int, tuple[bytes, ...]] | None:
        """Find the chunk to leave first: nothing extends it, and it is no part of ``keep``."""
        extended = {chunk[:-1] for chunk in self.chunks}
        kept = {tuple(keep[:length]) for length in range(len(keep) + 1)}
        return min(
            (
                (rank(one), one.use, chunk)
                for chunk, one in self.chunks.items()
                if chunk not in extended | kept
            ),
            default=None,
        )

    def use(
        self, prompt: Sequence[bytes], classes: Sequence[Class], seen: Sequence[int], now_s: float
    ) -> None:
        """Use chunks, those that are not there as well; the shallower the later."""
        for at in range(len(prompt) - 1, -1, -1):
            self.uses += 1
            self.chunks[tuple(prompt[: at + 1])] = Resident(
                classes[at], now_s, self.uses, min(seen[at] + 1, 15)
            )


class NaiveAdaptive:
    """A cache of so many chunks that is asked one prompt after the other."""

    def __init__(self, capacity: int) -> None:
        self.density = NaiveDensity()
        self.cache = NaiveCache(capacity)
        self.rivals = NaiveCache(capacity), NaiveCache(capacity)  # by density, by recency
        self.watched: dict[tuple[bytes, ...], tuple[Class, float, int]] = {}
        self.ends: dict[tuple[bytes, ...], tuple[float, int]] = {}
        self.now_s = self.lead = self.squares = self.asked = 0.0
        self.requests, self.next_fit = 0, 32
        self.recency = False
        self._fit: list[tuple[int, dict[Class, list[float]]]] = []

    def request(self, prompt: Sequence[bytes], now_s: float) -> tuple[int, list[bytes], int]:
        """Serve a prompt: chunks that hit, the ones that left in that order, how many were stored."""
        self.now_s, hits = now_s, self.cache.hits(prompt)
        classes, seen = self._classes(prompt, hits)
        for at in range(len(prompt)):
            chunk = tuple(prompt[: at + 1])
            if chunk in self.watched:
                cls, time_s, _ = self.watched[chunk]
                self.density.asked_again(cls, now_s - time_s)
            self.watched[chunk] = classes[at], now_s, min(seen[at] + 1, 15)
        self.ends[tuple(prompt)] = now_s, min(seen[-1] + 1, 15)
        self._compare(prompt, classes, seen)
        self._learn()
        return hits, *self._store(prompt, hits, classes, seen)

    def _classes(self, prompt: Sequence[bytes], hits: int) -> tuple[list[Class], list[int]]:
        remembered: list[tuple[float, int] | None] = []
        for at in range(len(prompt)):
            chunk = tuple(prompt[: at + 1])
            if at < hits:
                one = self.cache.chunks[chunk]
                remembered.append((one.time_s, one.seen))
            elif chunk in self.watched:
                remembered.append(self.watched[chunk][1:])
            else:
                remembered.append(self.ends.get(chunk))
        deepest = max((at for at, one in enumerate(remembered) if one is not None), default=None)
        gap, depth = 0, 0
        if deepest is not None and (last := remembered[deepest]) is not None:
            depth = deepest + 1
            gap = 1 + sum(self.now_s - last[0] >= limit for limit in GAP_LIMITS_S)
        new = sum(len(prompt) - depth > limit for limit in NEW_LIMITS)
        seen = [max((one[1] for one in remembered[at:] if one), default=0) for at in range(len(prompt))]
        return [(seen_class(times), gap, new) for times in seen], seen

    def _rank(self, one: Resident) -> float:
        return 0.0 if self.recency else self.density.value(one.cls, self.now_s - one.time_s)

    def _store(
        self, prompt: Sequence[bytes], hits: int, classes: Sequence[Class], seen: Sequence[int]
    ) -> tuple[list[bytes], int]:
        cache, wanted, left = self.cache, len(prompt), []
        while len(cache.chunks) + wanted - hits > cache.capacity:
            lowest = cache.lowest(self._rank, keep=prompt[:hits])
            if lowest is None:
                wanted = hits + cache.capacity - len(cache.chunks)
            elif not self.recency and self.density.value(classes[wanted - 1], 0.0) < lowest[0]:
                wanted -= 1
            else:
                del cache.chunks[lowest[2]]
                left.append(lowest[2][-1])
        cache.use(prompt[:wanted], classes, seen, self.now_s)
        return left, wanted - hits

    def _compare(self, prompt: Sequence[bytes], classes: Sequence[Class], seen: Sequence[int]) -> None:
        by_density, by_recency = self.rivals
        lead = by_recency.hits(prompt) - by_density.hits(prompt)
        for rival in self.rivals:
            shown = prompt[: rival.capacity]
            rival.use(shown, classes, seen, self.now_s)
            while len(rival.chunks) > rival.capacity:
                if rival is by_density:
                    lowest = rival.lowest(lambda one: self.density.value(one.cls, self.now_s - one.time_s))
                else:
                    lowest = rival.lowest(lambda one: 0.0)
                assert lowest is not None
                del rival.chunks[lowest[2]]
        keep = 1 - 1 / 2000
        self.lead, self.asked = self.lead * keep + lead, self.asked * keep + len(prompt)
        self.squares = self.squares * keep + lead * lead
        self.requests += 1
        if self.recency:
            self.recency = self.lead >= 0
        elif self.requests >= 200:
            self.recency = self.lead > 0.003 * self.asked and self.lead > sqrt(self.squares) / 2

    def _learn(self) -> None:
        """Fit now and then, and take the new table over by seen classes, the largest first, one a request."""
        if self._fit:
            seen, table = self._fit.pop()
            self.density.table.update({cls: row for cls, row in table.items() if cls[0] == seen})
        elif self.requests > self.next_fit:
            table = self.density.fitted(
                [(cls, self.now_s - time_s) for cls, time_s, _ in self.watched.values()]
            )
            self._fit = [(seen, table) for seen in range(6)]
            self.next_fit += 32 if self.requests < 256 else 128 if self.requests < 2000 else 500
