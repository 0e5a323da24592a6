"""The figures that what was asked comes down to.

Knows exchanges, percentiles and sums. Does not know limits (``kvtide.demo.bars``) or how figures look.
A figure that could not be taken is ``None``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtide.demo.ask import Reply
from kvtide.demo.exactness import MIN_LOADED_TOKENS, Answer, Record, Verdict, judge
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE, Asked, Exchange, Rush
from kvtide.demo.scrape import Scrape


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one kind of time, in milliseconds; ``None`` of nothing."""

    p50: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the prompt tokens of one server came from; the three add up to all of them."""

    computed: int
    engine_hit: int
    loaded: int


@dataclass(frozen=True, slots=True)
class RushFigures:
    """All users at once on one server.

    Attributes:
        output_tokens_per_s: Generated tokens of all users by the time all were done.
    """

    requests: int
    wall_s: float
    output_tokens_per_s: float
    ttft_ms: Spread


@dataclass(frozen=True, slots=True)
class Figures:
    """What the report states.

    Attributes:
        verdict: Of the judge, over the first phase.
        ttft_ms: ``recompute``, ``host_hit`` and ``engine_hit``: the same prompts, on the three servers.
        sources: By server name, over the requests that all three were asked.
        rushes: By server name.
        last: Counters of kvtide's server at the end.
        host_bytes_used: The most seen in use, by kvtide's own account.
        resident_bytes: By server name, the system's account: with kvtide it includes the whole pool.
    """

    verdict: Verdict
    ttft_ms: Mapping[str, Spread]
    sources: Mapping[str, Sources]
    rushes: Mapping[str, RushFigures]
    last: Scrape
    host_bytes_used: int | None
    resident_bytes: Mapping[str, int | None]

    @property
    def host_bytes_budget(self) -> int | None:
        """Host memory that kvtide may use, by its own account."""
        return self.last.pool_budget_bytes


def figures_of(asked: Asked) -> Figures:
    """Work out every figure."""
    return Figures(
        verdict=judge([record_of(exchange) for exchange in asked.exchanges]),
        ttft_ms={
            "recompute": spread(ttft_ms_of(asked.exchanges, RECOMPUTE)),
            "host_hit": spread(ttft_ms_of(asked.exchanges, KVTIDE)),
            "engine_hit": spread(ttft_ms_of(asked.exchanges, REFERENCE)),
        },
        sources={name: sources_of(asked.exchanges, name) for name in (RECOMPUTE, KVTIDE, REFERENCE)},
        rushes={name: _rush_figures(rush) for name, rush in asked.rushes.items()},
        last=asked.last,
        host_bytes_used=asked.used_bytes,
        resident_bytes=asked.resident_bytes,
    )


def record_of(exchange: Exchange) -> Record:
    """Turn an exchange into what the judge reads."""

    def answer(name: str, loaded_tokens: int) -> Answer | None:
        reply = exchange.replies.get(name)
        if reply is None:
            return None
        return Answer(
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            loaded_tokens=loaded_tokens,
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
        )

    return Record(exchange.user, exchange.turn, answer(KVTIDE, exchange.loaded_tokens), answer(REFERENCE, 0))


def ttft_ms_of(exchanges: Sequence[Exchange], name: str) -> list[float]:
    """List the times of server ``name`` for the prompts that were a host hit on kvtide's server."""
    hits = [exchange for exchange in exchanges if exchange.loaded_tokens >= MIN_LOADED_TOKENS]
    return [exchange.replies[name].ttft_ms for exchange in hits if name in exchange.replies]


def spread(values: Sequence[float]) -> Spread:
    """Take the median and the 95th percentile."""
    return Spread(percentile(values, 50), percentile(values, 95))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile by linear interpolation between the two nearest ranks (numpy's default)."""
    if not values:
        return None
    ranked = sorted(values)
    position = (len(ranked) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (position - below)


def sources_of(exchanges: Sequence[Exchange], name: str) -> Sources:
    """Add up where the prompt tokens of server ``name`` came from, over what all three were asked."""
    everywhere = [exchange for exchange in exchanges if RECOMPUTE in exchange.replies]
    replies: list[Reply] = [exchange.replies[name] for exchange in everywhere]
    loaded = sum(exchange.loaded_tokens for exchange in everywhere) if name == KVTIDE else 0
    cached = sum(reply.cached_tokens for reply in replies)
    computed = sum(reply.prompt_tokens for reply in replies) - cached
    return Sources(computed=computed, engine_hit=cached - loaded, loaded=loaded)


def _rush_figures(rush: Rush) -> RushFigures:
    return RushFigures(
        requests=len(rush.replies),
        wall_s=rush.wall_s,
        output_tokens_per_s=sum(len(reply.token_ids) for reply in rush.replies) / rush.wall_s,
        ttft_ms=spread([reply.ttft_ms for reply in rush.replies]),
    )
