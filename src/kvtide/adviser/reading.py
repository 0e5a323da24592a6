"""What the ghosts of a server have found, read off its page of metrics.

Knows the names of series and labels (docs/metrics.md). Whoever wrote the page is not trusted: a sample that
makes no sense is one that is not there. Does not know what is said of the figures.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.metrics import GHOST_TIMES, HOST

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

PREFIX = "vllm:kvtide_"

LONGEST_LINE = 4096
MOST_SAMPLES = 200_000
"""A thousand engines with a dozen tiers have fewer."""

_COUNTS = {
    "ghost_requests_total": "requests",
    "ghost_dropped_requests_total": "dropped",
    "ghost_judged_requests": "judged",
    "ghost_sampled_share": "share",
    "ghost_queried_tokens_total": "queried",
}
_FIGURES = {
    "ghost_hit_points": "hit_points",
    "ghost_gain_points": "gain_points",
    "ghost_error_points": "error_points",
    "ghost_first_token_seconds": "first_token_s",
}
_POOL_BYTES = "pool_budget_bytes"
_TIER_BYTES = "tier_capacity_bytes"
_ASKED_FOR = (*_COUNTS, *_FIGURES, _POOL_BYTES, _TIER_BYTES)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a tier of some size would do.

    Attributes:
        times: Its size, as a multiple of the one it has.
        hit_points: Of 100 prompt tokens, those that were hits there.
        gain_points: The same, less those of the size it has.
        error_points: Standard error of the gain.
        first_token_s: Time to first token, median, without queueing; None where no pace is known.
    """

    times: float
    hit_points: float
    gain_points: float
    error_points: float
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierEstimates:
    """One tier at several sizes.

    Attributes:
        tier: ``host``, or its name.
        size_bytes: What it has; None where that is not known.
        estimates: By ascending size, the one it has among them; none while it is too early.
    """

    tier: str
    size_bytes: int | None
    estimates: tuple[Estimate, ...] = ()

    @property
    def now(self) -> Estimate | None:
        """The estimate for the size it has."""
        return next((one for one in self.estimates if one.times == 1), None)


@dataclass(frozen=True, slots=True)
class EngineEstimates:
    """What the ghosts of one engine say, or of several taken together.

    Attributes:
        model: As it is served.
        engines: Numbers of the engines.
        requests: That have come.
        dropped_requests: Of these, those that the ghosts could not take in time.
        judged_requests: Those that the estimates are made of.
        sampled_share: Of the sessions, those that are followed; None where that is not known.
        queried_tokens: Prompt tokens of what was judged.
        tiers: In the order of the page.
    """

    model: str
    engines: tuple[str, ...]
    requests: int = 0
    dropped_requests: int = 0
    judged_requests: int = 0
    sampled_share: float | None = None
    queried_tokens: float = 0.0
    tiers: tuple[TierEstimates, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether there is anything to be said."""
        return any(tier.now is not None and len(tier.estimates) > 1 for tier in self.tiers)


def is_ours(text: str) -> bool:
    """Whether a page has metrics of kvtide on it."""
    return any(line.startswith(PREFIX) for line in text.splitlines())


def engines_on(text: str) -> list[EngineEstimates]:
    """Read a page.

    Args:
        text: The page, whoever wrote it.

    Returns:
        Each engine that has ghosts, in the order of the page; none where nobody has any.

    Raises:
        ConfigError: There are more samples than any server has.
    """
    counts: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    sizes: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    figures: dict[tuple[str, str], dict[str, dict[str, dict[str, float]]]] = defaultdict(dict)
    for sample in _samples(text):
        name, labels = sample.name.removeprefix(PREFIX), sample.labels
        engine = labels.get("model_name", ""), labels.get("engine", "0")
        tier, times = labels.get("tier", ""), labels.get("times", "")
        if name in _COUNTS:
            counts[engine][_COUNTS[name]] = sample.value
        elif name == _POOL_BYTES:
            sizes[engine][HOST] = sample.value
        elif name == _TIER_BYTES and tier:
            sizes[engine][tier] = sample.value
        elif name in _FIGURES and tier and times in GHOST_TIMES:
            figures[engine].setdefault(tier, {}).setdefault(times, {})[_FIGURES[name]] = sample.value
    return [
        _engine(engine, counts[engine], sizes.get(engine, {}), figures.get(engine, {}))
        for engine in {**counts, **figures}
    ]


def _samples(text: str) -> Iterator["Sample"]:
    """Give our samples that make sense: finite, and below 0 only where a gain is."""
    from prometheus_client.parser import text_string_to_metric_families  # a third of a verb's start

    names = tuple(PREFIX + name for name in _ASKED_FOR)
    seen = 0
    for line in text.splitlines():
        if not line.startswith(names) or len(line) > LONGEST_LINE:
            continue
        seen += 1
        if seen > MOST_SAMPLES:
            raise ConfigError("URL", "…", f"more than {MOST_SAMPLES:,} samples: no server has so many")
        try:
            found = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except (ValueError, IndexError, KeyError, AttributeError, TypeError):
            continue  # half a line, or none
        for sample in found:
            signed = sample.name == f"{PREFIX}ghost_gain_points"
            if math.isfinite(sample.value) and (signed or sample.value >= 0) and sample.value < 2**63:
                yield sample


def _engine(
    engine: tuple[str, str],
    counts: Mapping[str, float],
    sizes: Mapping[str, float],
    figures: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> EngineEstimates:
    model, number = engine
    share = counts.get("share")
    return EngineEstimates(
        model,
        (number,),
        int(counts.get("requests", 0)),
        int(counts.get("dropped", 0)),
        int(counts.get("judged", 0)),
        share if share is not None and 0 < share <= 1 else None,
        counts.get("queried", 0.0),
        tuple(
            TierEstimates(tier, int(sizes.get(tier, 0)) or None, _estimates(by_times))
            for tier, by_times in figures.items()
        ),
    )


def _estimates(figures: Mapping[str, Mapping[str, float]]) -> tuple[Estimate, ...]:
    """Put those together that are whole; without the size it has the others mean nothing."""
    found = []
    for times in GHOST_TIMES:
        one = figures.get(times, {})
        if "hit_points" not in one or not 0 <= one["hit_points"] <= 100:
            continue
        if times == "1":
            gain, error = 0.0, 0.0
        elif "gain_points" in one and "error_points" in one and -100 <= one["gain_points"] <= 100:
            gain, error = one["gain_points"], one["error_points"]
        else:
            continue
        found.append(Estimate(float(times), one["hit_points"], gain, error, one.get("first_token_s")))
    return tuple(found) if any(one.times == 1 for one in found) else ()


def together(engines: Sequence[EngineEstimates]) -> list[EngineEstimates]:
    """Take the engines of a model together, as one that has the memory of each.

    What each says counts by the prompt tokens it was asked for; errors of engines are independent of each
    other. Of medians of times the mean is taken, by the same weights. An engine that says nothing yet of a
    tier or of a size of it is left aside there.
    """
    by_model: dict[str, list[EngineEstimates]] = defaultdict(list)
    for engine in engines:
        by_model[engine.model].append(engine)
    return [_pooled(model, found) if found[1:] else found[0] for model, found in by_model.items()]


def _pooled(model: str, engines: Sequence[EngineEstimates]) -> EngineEstimates:
    shares = [one.sampled_share for one in engines if one.sampled_share is not None]
    names = dict.fromkeys(tier.tier for engine in engines for tier in engine.tiers)
    return EngineEstimates(
        model,
        tuple(number for one in engines for number in one.engines),
        sum(one.requests for one in engines),
        sum(one.dropped_requests for one in engines),
        sum(one.judged_requests for one in engines),
        min(shares) if shares else None,
        sum(one.queried_tokens for one in engines),
        tuple(_pooled_tier(name, engines) for name in names),
    )


def _pooled_tier(name: str, engines: Sequence[EngineEstimates]) -> TierEstimates:
    found = [
        (engine.queried_tokens, tier) for engine in engines for tier in engine.tiers if tier.tier == name
    ]
    weight = {
        index: tokens for index, (tokens, tier) in enumerate(found) if tier.estimates and tokens > 0
    }  # fmt: skip
    sizes = {tier.size_bytes for _, tier in found}
    estimates = []
    for times in map(float, GHOST_TIMES):
        parts = [
            (weight[index], one)
            for index in weight
            for one in found[index][1].estimates
            if one.times == times
        ]
        # One size is compared with another of the same engines only.
        if parts and len(parts) == len(weight):
            estimates.append(_mean(times, parts))
    size = sizes.pop() if len(sizes) == 1 else None
    return TierEstimates(name, size, tuple(estimates))


def _mean(times: float, parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    total = sum(weight for weight, _ in parts)
    shares = [(weight / total, one) for weight, one in parts]
    first = [(share, one.first_token_s) for share, one in shares if one.first_token_s is not None]
    return Estimate(
        times,
        sum(share * one.hit_points for share, one in shares),
        sum(share * one.gain_points for share, one in shares),
        math.hypot(*(share * one.error_points for share, one in shares)),
        sum(share * value for share, value in first) if len(first) == len(shares) else None,
    )
