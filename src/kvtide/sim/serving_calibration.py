"""Rates of a real engine, from requests that it was asked one at a time and that loaded nothing.

Knows how long requests took; the other way, from a server's counters, is in ``serving_metrics``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvtide.errors import ConfigError
from kvtide.sim.serving_rates import EngineRates

WIDE = 2.0
"""Prompts whose longest is so many times the shortest tell what takes time whatever their length."""

ROUNDS = 30

TOKENS = 1
"""Which of the terms counts tokens."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One request that was alone.

    Attributes:
        cached_tokens: Of its prompt, in the engine's own cache.
        computed_tokens: The others.
        output_tokens: Generated.
        first_token_s: From sending it to its first token.
        whole_s: To its last one.
    """

    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    first_token_s: float
    whole_s: float

    @property
    def pairs(self) -> float:
        """Of a computed token and one before it, or itself."""
        count = self.computed_tokens
        return count * self.cached_tokens + count * (count + 1) / 2


def calibrated(
    observed: Sequence[Observed], store_bytes_per_s: float, load_bytes_per_s: float, idle_s: float = 0.001
) -> EngineRates:
    """Work out rates.

    A step that generates one token takes the median of all. Where prompts differ enough in length, what a
    first token takes whatever is computed, each computed token and each pair take what fits best, none of
    them less than nothing; where they do not, the first is that step, and attention is within the tokens.

    Args:
        observed: Requests that had their prompts computed, some of which generated more than a token.
        store_bytes_per_s: Of copies to host memory.
        load_bytes_per_s: Of copies from there.
        idle_s: Between steps without work.

    Raises:
        ConfigError: They say too little.
    """
    computed = [one for one in observed if one.computed_tokens > 0]
    steps = [
        (one.whole_s - one.first_token_s) / (one.output_tokens - 1)
        for one in observed
        if one.output_tokens > 1
    ]
    if not computed or not steps:
        raise ConfigError("rates", len(observed), "requests, none of which computed a prompt and an answer")
    decode_step_s = max(0.0, median(steps))
    lengths = [one.computed_tokens for one in computed]
    if max(lengths) >= WIDE * min(lengths):
        terms = np.array([[1.0, one.computed_tokens, one.pairs] for one in computed])
        whatever_s, token_s, pair_s = _fitted(terms, np.array([one.first_token_s for one in computed]))
    else:
        whatever_s, pair_s = decode_step_s, 0.0
        token_s = median((one.first_token_s - whatever_s) / one.computed_tokens for one in computed)
    if not token_s > 0:
        raise ConfigError(
            "rates", token_s, "seconds for a prompt token: computing takes no longer than a step"
        )
    step_s = min(decode_step_s, whatever_s)
    return EngineRates(
        1 / token_s,
        pair_s=pair_s,
        step_s=step_s,
        decode_s=decode_step_s - step_s,
        idle_s=idle_s,
        front_s=whatever_s - step_s,
        store_bytes_per_s=store_bytes_per_s,
        load_bytes_per_s=load_bytes_per_s,
        source=f"{len(computed)} requests of the same run that were computed",
    )


def _fitted(terms: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Find numbers from 0 up by which the terms come closest to the seconds.

    Closest in the sum of relative errors, not of squares: on a shared machine some request always took twice
    as long. Least squares, weighted anew by what was left (Schlossmacher 1973), without the terms that would
    be negative.

    Args:
        terms: ``float64[requests, terms]``; that of tokens is always kept.
        seconds: ``float64[requests]``, above 0.
    """
    kept = list(range(terms.shape[1]))
    while True:
        part, weights = terms[:, kept] / seconds[:, None], np.ones(len(seconds))
        for _ in range(ROUNDS):
            found = np.linalg.lstsq(part * weights[:, None], weights, rcond=None)[0]
            weights = 1 / np.sqrt(np.maximum(np.abs(part @ found - 1), 1e-3))
        if found.min() >= 0 or kept == [TOKENS]:
            break
        # Without a pace of tokens there is no engine: rather without anything else.
        kept.remove(min((one for one in kept if one != TOKENS), key=lambda one: found[kept.index(one)]))
    numbers = np.zeros(terms.shape[1])
    numbers[kept] = found
    return [float(number) for number in numbers]
