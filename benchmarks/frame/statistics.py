"""Numbers out of samples: medians, spread, ratios of pairs, a bound that chance is unlikely to beat.

Knows arrays. Does not know what was measured, nor which bar it has to meet. Seeded: the same samples
give the same bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 20_260


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the middle half of some samples lies, in the samples' unit."""

    median: float
    low: float
    high: float

    @property
    def iqr(self) -> float:
        """Distance between the quartiles."""
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.median:.4g} (quartiles {self.low:.4g} to {self.high:.4g})"


def spread(samples: Sequence[float]) -> Spread:
    """Say where the samples lie.

    Raises:
        ValueError: There are none, or one is not a finite number.
    """
    low, median, high = np.quantile(_checked(samples), (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def median(samples: Sequence[float]) -> float:
    """Return the median.

    Raises:
        ValueError: As ``spread``.
    """
    return float(np.median(_checked(samples)))


def ratio_of_medians(samples: Sequence[float], base: Sequence[float]) -> float:
    """Divide the median of ``samples`` by that of ``base``.

    Raises:
        ValueError: As ``spread``, or the divisor is not above 0.
    """
    below = median(base)
    if below <= 0:
        raise ValueError(f"the base has the median {below}: nothing can be compared with it")
    return median(samples) / below


def paired_ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Divide sample by sample; what disturbs both halves of a pair alike cancels out.

    Raises:
        ValueError: As ``spread``, lengths differ, or a divisor is not above 0.
    """
    above, below = _checked(samples), _checked(base)
    if len(above) != len(below):
        raise ValueError(f"{len(above)} samples cannot be paired with {len(below)}")
    if (below <= 0).any():
        raise ValueError(f"the base has a sample of {below.min()}: nothing can be compared with it")
    return [float(ratio) for ratio in above / below]


def median_lower_bound(samples: Sequence[float], confidence: float = 0.95) -> float:
    """Bound the median from below, by the percentile bootstrap (Efron 1979).

    Args:
        samples: Ratios, or anything else of which the median is the verdict.
        confidence: One-sided: the share of resampled medians that lie above the bound.

    Raises:
        ValueError: As ``spread``.
    """
    values = _checked(samples)
    draws = np.random.default_rng(SEED).integers(0, len(values), (RESAMPLES, len(values)))
    medians = np.median(values[draws], axis=1)
    return float(np.quantile(medians, 1 - confidence))


def ratio_interval(
    samples: Sequence[float], base: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """Bound ``ratio_of_medians`` from both sides, by the percentile bootstrap over pairs.

    Args:
        samples: One of each pair, in the order of the pairs.
        base: The other one.
        confidence: Share of resampled ratios that lie between the bounds.

    Raises:
        ValueError: As ``paired_ratios``.
    """
    paired_ratios(samples, base)  # refuses what cannot be paired
    above, below = _checked(samples), _checked(base)
    draws = np.random.default_rng(SEED).integers(0, len(above), (RESAMPLES, len(above)))
    ratios = np.median(above[draws], axis=1) / np.median(below[draws], axis=1)
    low, high = np.quantile(ratios, ((1 - confidence) / 2, (1 + confidence) / 2))
    return float(low), float(high)


def _checked(samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("there are no samples")
    if not np.isfinite(values).all():
        raise ValueError("a sample is not a finite number")
    return values
