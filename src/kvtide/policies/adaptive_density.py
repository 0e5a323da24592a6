"""What a chunk of a class is worth while it waits: hits for the time it takes up a place.

Knows classes, ages and how often chunks of a class were asked for again at an age; does not know which chunks
there are or where. A class says how often the chunk was asked for before, how long ago its path was, and
how much of the prompt is new.
"""

from array import array
from math import log2

import numpy as np

SEEN_CLASSES, GAP_CLASSES, NEW_CLASSES = 6, 6, 6
CLASS_COUNT = SEEN_CLASSES * GAP_CLASSES * NEW_CLASSES
MOST_SEEN = 15

AGE_COUNT = 44
_PER_OCTAVE = 2
_EDGES_S = np.concatenate(([0.0], 2.0 ** (np.arange(AGE_COUNT) / _PER_OCTAVE)))
_WIDTHS_S = np.diff(_EDGES_S)
_EDGE_LIST, _WIDTH_LIST = _EDGES_S.tolist(), _WIDTHS_S.tolist()

_GAP_EDGES_S = (4.0, 12.0, 36.0, 160.0)
_NEW_EDGES = (0, 1, 4, 16, 48)

# Shrinkage: a class is believed as if so many of its seen class had been watched beside it, and that class as
# if so many of all had been. What was learnt fades with every fit.
_BELIEF_IN_SEEN, _BELIEF_IN_ALL, _FADING = 100.0, 50.0, 0.9
_LEAST_EVENTS = 0.02


def path_class(gap_s: float | None, new_count: int) -> int:
    """Give the part of a class that all chunks of a request share.

    Args:
        gap_s: Seconds since its path was used; None where nothing of it is remembered.
        new_count: Chunks behind what is remembered.
    """
    gap = 0 if gap_s is None else 1 + sum(gap_s >= edge for edge in _GAP_EDGES_S)
    return gap * NEW_CLASSES + sum(new_count > edge for edge in _NEW_EDGES)


def class_of(seen: int, path: int) -> int:
    """Give the class of a chunk that was asked for ``seen`` times before, on a path of that class."""
    seen_class = seen if seen <= 3 else 4 if seen <= 5 else 5
    return seen_class * (GAP_CLASSES * NEW_CLASSES) + path


def _bucket(age_s: float) -> int:
    if age_s < 1.0:
        return 0
    return min(AGE_COUNT - 1, 1 + int(_PER_OCTAVE * log2(age_s) + 1e-9))


class HitDensity:
    """Per class the hazard of being asked for again by age, and from it the best rate of hits from here on.

    A chunk of age a that is kept until age b brings P(asked for before b) hits for E[time held] seconds. Its
    density is the best such ratio over all b: the index of a bandit that may be stopped (J. Gittins, 1979),
    as in "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (N. Beckmann, H. Chen, A. Cidon, NSDI
    2018), where b is not chosen. Hazards are events by time at risk: chunks that still wait count, too.
    """

    def __init__(self) -> None:
        zeros = [0.0] * (CLASS_COUNT * AGE_COUNT)
        self._events, self._ended, self._partial = array("d", zeros), array("d", zeros), array("d", zeros)
        first = 1.0 / (_EDGES_S[:-1] + 1.0)
        # One column more than ages, so that reading between two never ends outside.
        self._table = np.tile(np.append(first, first[-1]), (CLASS_COUNT, 1))
        self._rows: list[list[float]] = self._table.tolist()
        self._fitted: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []

    def asked_again(self, class_index: int, age_s: float) -> None:
        """Note that a chunk was asked for at an age."""
        at = _bucket(age_s)
        cell = class_index * AGE_COUNT + at
        self._events[cell] += 1.0
        self._ended[cell] += 1.0
        self._partial[cell] += max(age_s - _EDGE_LIST[at], 0.25 * _WIDTH_LIST[at])

    def given_up(self, class_index: int, age_s: float) -> None:
        """Note that nobody watches a chunk any more that was not asked for until this age."""
        at = _bucket(age_s)
        cell = class_index * AGE_COUNT + at
        self._ended[cell] += 1.0
        self._partial[cell] += max(0.0, age_s - _EDGE_LIST[at])

    def value(self, class_index: int, age_s: float) -> float:
        """Say how many hits a second a chunk of a class and an age is worth."""
        row = self._rows[class_index]
        at = min(max((age_s if age_s < 1.0 else 1.0 + _PER_OCTAVE * log2(age_s)) - 0.5, 0.0), AGE_COUNT - 1.0)
        low = int(at)
        return row[low] + (row[low + 1] - row[low]) * (at - low)

    def values(self, classes: np.ndarray, ages_s: np.ndarray) -> np.ndarray:
        """Do what ``value`` does for many: ``float64[n]``."""
        logs = 1.0 + _PER_OCTAVE * np.log2(np.maximum(ages_s, 1.0))
        at = np.clip(np.where(ages_s < 1.0, ages_s, logs) - 0.5, 0.0, AGE_COUNT - 1.0)
        low = at.astype(np.int64)
        here = self._table[classes, low]
        found: np.ndarray = here + (self._table[classes, low + 1] - here) * (at - low)
        return found

    # -- fitting --------------------------------------------------------------------------------

    @property
    def is_fitting(self) -> bool:
        """Whether a fit was begun and has steps left."""
        return bool(self._fitted)

    def begin_fit(self, classes: np.ndarray, ages_s: np.ndarray) -> None:
        """Begin to learn from what was noted, in ``SEEN_CLASSES`` steps, and let it fade.

        Args:
            classes: ``int[n]``, of chunks that are still watched.
            ages_s: ``float64[n]``, theirs.
        """
        shape = (CLASS_COUNT, AGE_COUNT)
        events, ended, partial = (
            np.array(one).reshape(shape) for one in (self._events, self._ended, self._partial)
        )
        for told, faded in zip(
            (self._events, self._ended, self._partial), (events, ended, partial), strict=True
        ):
            told[:] = array("d", (_FADING * faded).tobytes())
        at = np.minimum(np.searchsorted(_EDGES_S, ages_s, side="right") - 1, AGE_COUNT - 1)
        cells, size = classes * AGE_COUNT + at, CLASS_COUNT * AGE_COUNT
        ended += np.bincount(cells, minlength=size).reshape(shape)
        partial += np.bincount(cells, weights=ages_s - _EDGES_S[at], minlength=size).reshape(shape)
        # Whoever ended at a later age was at risk for the whole width of this one.
        later = np.flip(np.cumsum(np.flip(ended, axis=1), axis=1), axis=1) - ended
        at_risk_s = later * _WIDTHS_S + partial
        overall = (events.sum(axis=0) + _LEAST_EVENTS) / (at_risk_s.sum(axis=0) + _WIDTHS_S)
        self._fitted = [
            (seen, *parts, overall)
            for seen, parts in enumerate(
                zip(np.split(events, SEEN_CLASSES), np.split(at_risk_s, SEEN_CLASSES), strict=True)
            )
        ]

    def fit_step(self) -> None:
        """Do one step of a fit: some tenths of a millisecond."""
        seen, events, at_risk_s, overall = self._fitted.pop()
        belief = _BELIEF_IN_ALL * _WIDTHS_S
        of_seen = (events.sum(axis=0) + belief * overall) / (at_risk_s.sum(axis=0) + belief)
        belief = _BELIEF_IN_SEEN * _WIDTHS_S
        density = best_density((events + belief * of_seen) / (at_risk_s + belief))
        first = seen * len(density)
        self._table[first : first + len(density), :-1] = density
        self._table[first : first + len(density), -1] = density[:, -1]
        self._rows[first : first + len(density)] = self._table[first : first + len(density)].tolist()


def best_density(hazards: np.ndarray) -> np.ndarray:
    """Give for each age the best ratio of hits to time held, over all ages until which to hold.

    Args:
        hazards: ``float64[classes, AGE_COUNT]``, a second, constant within an age; above 0.

    Returns:
        ``float64[classes, AGE_COUNT]``. With E the chance to come to an age and R the time still to be held
        from there on, both from the beginning, it is max over b > a of (E_a - E_b) / (R_a - R_b).
    """
    count = len(hazards)
    survival = np.ones((count, AGE_COUNT + 1))
    survival[:, 1:] = np.exp(-np.cumsum(hazards * _WIDTHS_S, axis=1))
    held_s = np.zeros((count, AGE_COUNT + 1))
    # Added up from the end: sums of what is small must not be differences of what is large.
    held_s[:, :-1] = np.flip(np.cumsum(np.flip(-np.diff(survival, axis=1) / hazards, axis=1), axis=1), axis=1)
    density = np.zeros((count, AGE_COUNT))
    for age in range(AGE_COUNT):
        hits = survival[:, age, None] - survival[:, age + 1 :]
        time_s = held_s[:, age, None] - held_s[:, age + 1 :]
        density[:, age] = (hits / np.maximum(time_s, 1e-300)).max(axis=1)
    return density
