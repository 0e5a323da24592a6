"""What the adaptive policy is made of: densities, memory, marks, the guard, the sample."""

import random
from collections import OrderedDict

import numpy as np
import pytest

from kvtide.policies.adaptive_candidates import KEPT_RUNS, SAMPLE_RUNS, Candidates
from kvtide.policies.adaptive_density import (
    CLASS_COUNT,
    MOST_SEEN,
    SEEN_CLASSES,
    HitDensity,
    best_density,
    class_of,
    path_class,
)
from kvtide.policies.adaptive_guard import Guard
from kvtide.policies.adaptive_memory import MARK_LIMIT, Memory, marks_of
from kvtide.testing.naive_adaptive import AGES, ALL_CLASSES, NaiveDensity, best_ratios, seen_class

AGES_S = (0.0, 0.3, 0.999, 1.0, 1.4, 2.0, 17.0, 64.0, 1000.0, 86_400.0, 1e7, 1e12)


def fit(density: HitDensity, waiting: list[tuple[int, float]]) -> None:
    classes = np.array([cls for cls, _ in waiting], dtype=np.int64)
    density.begin_fit(classes, np.array([age_s for _, age_s in waiting], dtype=np.float64))
    steps = 0
    while density.is_fitting:
        density.fit_step()
        steps += 1
    assert steps == SEEN_CLASSES


def test_classes_are_numbered_in_the_order_of_their_parts() -> None:
    gaps = (None, 0.0, 4.0, 12.0, 36.0, 160.0)
    news = (0, 1, 2, 5, 17, 49)
    found = [
        class_of(seen, path_class(gap_s, new))
        for seen in (0, 1, 2, 3, 4, 6)
        for gap_s in gaps
        for new in news
    ]
    assert found == list(range(CLASS_COUNT))
    assert path_class(3.99, 4) == path_class(0.0, 2)
    assert path_class(1e12, 10**6) == path_class(160.0, 49)
    assert class_of(MOST_SEEN, 0) == class_of(6, 0)
    assert [seen_class(seen) for seen in range(8)] == [0, 1, 2, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("seed", range(3))
def test_densities_agree_with_the_oracle_fit_after_fit(seed: int) -> None:
    chance, density, naive = random.Random(seed), HitDensity(), NaiveDensity()
    known = chance.sample(range(CLASS_COUNT), 30)
    for _ in range(3):
        for _ in range(300):
            cls, age_s = chance.choice(known), chance.choice((*AGES_S, chance.expovariate(0.01)))
            if chance.random() < 0.5:
                density.asked_again(cls, age_s)
                naive.asked_again(ALL_CLASSES[cls], age_s)
            else:
                density.given_up(cls, age_s)
                naive.waited(naive.at_risk_s, ALL_CLASSES[cls], age_s, hit=False)
        waiting = [(chance.choice(known), chance.expovariate(0.001)) for _ in range(100)]
        fit(density, waiting)
        naive.table = naive.fitted([(ALL_CLASSES[cls], age_s) for cls, age_s in waiting])
        for cls in range(CLASS_COUNT):
            expected = [naive.value(ALL_CLASSES[cls], age_s) for age_s in AGES_S]
            assert [density.value(cls, age_s) for age_s in AGES_S] == pytest.approx(expected, rel=1e-9)
            at_once = density.values(np.full(len(AGES_S), cls), np.array(AGES_S))
            assert at_once == pytest.approx(expected, rel=1e-9)


def test_nothing_learnt_is_recency_and_a_fit_of_nothing_stays_finite() -> None:
    density = HitDensity()
    values = [density.value(0, age_s) for age_s in AGES_S]
    assert values == sorted(values, reverse=True)
    fit(density, [])
    fit(density, [])
    assert all(0 < density.value(cls, age_s) < 1e3 for cls in range(CLASS_COUNT) for age_s in AGES_S)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 50.0])
def test_the_best_ratio_survives_small_and_large_hazards(scale: float) -> None:
    chance = random.Random(7)
    rows = [[scale * chance.random() + 1e-12 for _ in range(AGES)] for _ in range(4)]
    found = best_density(np.array(rows))
    for row, got in zip(rows, found, strict=True):
        # What is reached with a chance below 1e-9 is left to whoever adds up small numbers.
        reached = np.exp(-np.concatenate(([0.0], np.cumsum(np.array(row) * _widths())[:-1]))) > 1e-9
        assert got[reached] == pytest.approx(np.array(best_ratios(tuple(row)))[reached], rel=1e-6)
    assert np.isfinite(found).all()


def _widths() -> np.ndarray:
    return np.diff(np.concatenate(([0.0], 2.0 ** (np.arange(AGES) / 2))))


def test_memory_agrees_with_an_ordered_dictionary() -> None:
    chance, memory, naive = random.Random(1), Memory(), OrderedDict()
    for step in range(4000):
        mark = chance.randrange(1, 80)
        if chance.random() < 0.7:
            told = chance.randrange(CLASS_COUNT), float(step), chance.randrange(16), step
            before = naive.pop(mark, None)
            naive[mark] = told
            assert memory.put(mark, *told) == before
        elif naive and chance.random() < 0.6:
            oldest = next(iter(naive))
            assert memory.oldest() == (oldest, naive.pop(oldest))
            memory.drop(oldest)
        else:
            assert memory.get(mark) == naive.get(mark)
        assert len(memory) == len(naive)
    assert memory.among(list(range(100))) == sorted(naive)
    classes, times_s = memory.waiting(MARK_LIMIT)
    assert sorted(zip(classes, times_s, strict=True)) == sorted(one[:2] for one in naive.values())
    assert len(memory.waiting(40)[0]) == sum(mark < 40 for mark in naive)


def test_a_purge_drops_what_lies_above_a_little_at_a_time() -> None:
    memory = Memory()
    for mark in range(1, 1001):
        memory.put(mark, 0, 0.0, 1, 0)
    memory.begin_purge()
    calls = 0
    while memory.is_purging:
        memory.purge(300, 100)
        calls += 1
        memory.put(5000 + calls, 0, 0.0, 1, 0)
    assert calls == 10
    assert [mark for mark in range(1, 1001) if memory.get(mark)] == list(range(1, 300))


@pytest.mark.parametrize("width", [1, 4, 8, 16, 32])
def test_marks_are_spread_evenly_and_depend_on_the_seed(width: int) -> None:
    count = 250 if width == 1 else 4000
    keys = [number.to_bytes(width, "big") for number in range(count)]
    marks = marks_of(keys, 1)
    assert len(set(marks.tolist())) == count
    shares = np.bincount((marks >> np.uint64(61)).astype(int), minlength=8) / count
    assert shares == pytest.approx(1 / 8, abs=0.06)
    assert not (marks == marks_of(keys, 2)).any()
    assert marks.tolist() == [int(marks_of([key], 1)[0]) for key in keys]
    assert len(marks_of([], 1)) == 0


def test_the_guard_turns_where_recency_hits_more_and_back_where_it_does_not() -> None:
    density = HitDensity()
    # As wrong as can be: what was just asked for never comes back, what lies for long does.
    for _ in range(2000):
        density.given_up(0, 60.0)
        density.asked_again(0, 5000.0)
    fit(density, [])
    guard, chance = Guard(density, 8), random.Random(3)
    turned = []
    for number in range(1, 1500):
        mark = max(1, number - chance.randrange(6))
        guard.serve([mark], [0], 4.0 * number)
        turned.append(guard.prefers_recency)
    assert not any(turned[:199]), "not before it has seen some"
    assert turned[-1]
    for number in range(1500, 9000):
        # A loop a little larger than the cache: recency never hits.
        guard.serve([10_000 + number % 9], [0], 4.0 * number)
    assert not guard.prefers_recency


def test_of_many_that_may_leave_one_of_the_lowest_is_named_and_lots_repeat() -> None:
    def order(seed: int) -> list[int]:
        ranked = Candidates(HitDensity(), seed)
        count = 20 * SAMPLE_RUNS
        ranked.columns.cover(count)
        for run in range(1, count + 1):
            ranked.now_s = float(run)
            ranked.use(run, 0)
            ranked.offer(run)
        named = []
        while len(named) < 200:
            lowest = ranked.lowest()
            assert lowest is not None
            ranked.withdraw(lowest[2])
            named.append(lowest[2])
        return named

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    # The oldest is named first; a sample's lowest few are among the lowest of all.
    assert max(first) <= 20 * SAMPLE_RUNS * 4 * KEPT_RUNS / SAMPLE_RUNS + 200
