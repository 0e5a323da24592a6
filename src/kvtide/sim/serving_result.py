"""What a replay of the whole path has shown: hits by tier, times to first token, bytes written.

Counts are of the trace as a whole, its cold beginning included. Knows what was counted; not how.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvtide.sim.serving_engine import Served
from kvtide.sim.serving_media import Media

ENGINE = "engine"
DAY_S = 86400.0
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class ServingResult:
    """Of one trace and one setup. Tiers go by name: ``engine`` is the device's own cache, ``host`` the pool.

    Attributes:
        policy: Of host memory.
        request_count: Requests, all of which have ended.
        prompt_tokens: Of all of them.
        prompt_blocks: Full blocks of all prompts.
        hit_tokens: By tier; what came through host memory from below counts where it came from.
        hit_blocks: The same in blocks.
        computed_tokens: Of prompts, those of preempted requests each time.
        ttft_s: Time to first token by percentile, ``p50`` and so on, and their ``mean``.
        served_s: From the first arrival to the last copy, virtual.
        busy_s: Of these, in steps that computed something.
        written_bytes: By tier.
        read_bytes: By tier.
        evicted_chunks: By tier.
        skipped_chunks: Offered and refused, each time, by reason; below host memory by tier and reason.
        passed_over_chunks: In a tier, and computed all the same: by what was known, that was faster.
        preemptions: Times that a request lost its blocks.
        ttft_by_request_s: In the order of the trace.
        hit_tokens_by_request: Likewise: the engine's own hit, and what was loaded.
    """

    policy: str
    request_count: int
    prompt_tokens: int
    prompt_blocks: int
    hit_tokens: Mapping[str, int]
    hit_blocks: Mapping[str, int]
    computed_tokens: int
    ttft_s: Mapping[str, float]
    served_s: float
    busy_s: float
    written_bytes: Mapping[str, int]
    read_bytes: Mapping[str, int]
    evicted_chunks: Mapping[str, int]
    skipped_chunks: Mapping[str, int]
    passed_over_chunks: Mapping[str, int]
    preemptions: int
    ttft_by_request_s: Sequence[float] = field(repr=False)
    hit_tokens_by_request: Sequence[tuple[int, int]] = field(repr=False)

    @property
    def token_hit_ratio(self) -> float:
        """Share of prompt tokens that were not computed, whatever tier they came from."""
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)

    @property
    def block_hit_ratio(self) -> float:
        """The same of full blocks."""
        return sum(self.hit_blocks.values()) / max(1, self.prompt_blocks)

    def written_per_day(self, tier: str) -> float:
        """Bytes a day that a tier is written, if every day were like this."""
        return self.written_bytes[tier] * DAY_S / self.served_s if self.served_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything but what is per request, and the ratios."""
        found = asdict(self)
        for name in ("ttft_by_request_s", "hit_tokens_by_request"):
            del found[name]
        return found | {
            "token_hit_ratio": self.token_hit_ratio,
            "block_hit_ratio": self.block_hit_ratio,
            "written_bytes_per_day": {tier: self.written_per_day(tier) for tier in self.written_bytes},
        }


def result_of(
    policy: str,
    tiers: Sequence[str],
    served: Served,
    preemptions: int,
    media: Media,
    counted: Mapping[str, float],
) -> ServingResult:
    """Add up.

    Args:
        policy: Of host memory.
        tiers: Names, host memory first.
        served: What happened to requests.
        preemptions: How often one lost its blocks.
        media: What was copied.
        counted: By the production code's own metrics.
    """
    requests = sorted(served.requests, key=lambda one: one.index)
    size = requests[0].asked.block_tokens
    hits = {ENGINE: sum(one.engine_tokens for one in requests)}
    for index, tier in enumerate(tiers):
        hits[tier] = sum(one.loaded_tokens[index] for one in requests)
    times = [(one.first_token_s or 0.0) - one.asked.arrival_s for one in requests]
    spread = dict(zip(PERCENTILES, np.percentile(times, PERCENTILES).tolist(), strict=True))
    below = dict(zip(tiers[1:], media.tiers, strict=True))
    return ServingResult(
        policy=policy,
        request_count=len(requests),
        prompt_tokens=sum(one.num_prompt_tokens for one in requests),
        prompt_blocks=sum(len(one.asked.block_hashes) for one in requests),
        hit_tokens=hits,
        hit_blocks={tier: tokens // size for tier, tokens in hits.items()},
        computed_tokens=served.computed_tokens,
        ttft_s={f"p{at}": value for at, value in spread.items()} | {"mean": float(np.mean(times))},
        served_s=served.now_s - requests[0].asked.arrival_s,
        busy_s=served.busy_s,
        written_bytes={tiers[0]: media.stored_bytes}
        | {name: tier.written_bytes for name, tier in below.items()},
        read_bytes={tiers[0]: media.loaded_bytes} | {name: tier.read_bytes for name, tier in below.items()},
        evicted_chunks={tiers[0]: int(counted.get("evicted_chunks|", 0))}
        | {name: int(counted.get(f"tier_evicted_chunks|{name}", 0)) for name in below},
        skipped_chunks=_counted(counted, "skipped_store_chunks") | _counted(counted, "tier_skipped_chunks"),
        passed_over_chunks=_counted(counted, "tier_passed_over_chunks"),
        preemptions=preemptions,
        ttft_by_request_s=times,
        hit_tokens_by_request=[(one.engine_tokens, sum(one.loaded_tokens)) for one in requests],
    )


def _counted(counted: Mapping[str, float], name: str) -> dict[str, int]:
    """Read a counter by its label."""
    found = (key.partition("|") for key in counted)
    return {label: int(counted[f"{key}|{label}"]) for key, _, label in found if key == name}
