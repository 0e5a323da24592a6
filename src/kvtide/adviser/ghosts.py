"""Ghost caches: what a server would hit if a tier were half, twice or four times as large.

Takes requests as they come and says, in the terms of ``kvtide.metrics``, what each ghost has hit. Below a
thousand requests it says nothing but how many there were. Knows fingerprints, tokens and paces; does not know
a process, a clock or a server: a server has one of these in a child (``child.py``), a replay in its own.
"""

import math
from collections.abc import Sequence

import xxhash

from kvtide.adviser.distinct import DistinctCount
from kvtide.adviser.sessions import SessionPaths
from kvtide.adviser.tier_ghosts import REFERENCE, Asked, TierGhosts, shared_out, sizes_of
from kvtide.adviser.window import BUCKETS
from kvtide.advising import FINGERPRINT_BYTES, Arrival, GhostPlan, Growth, Paces
from kvtide.metrics import GHOST_TIMES as TIMES
from kvtide.metrics import HOST

OPEN_BYTES = 8 << 20
"""Fingerprints of prompts that may grow still; beyond it the oldest are taken to have ended."""

GAUGES = ("ghost_hit_points", "ghost_gain_points", "ghost_error_points", "ghost_first_token_seconds")
"""What is said of each size once there were enough requests."""


class Ghosts:
    """Of all tiers of a plan.

    Args:
        plan: Of what.
    """

    def __init__(self, plan: GhostPlan) -> None:
        self._tokens_per_chunk = plan.tokens_per_chunk
        host_chunks = next((tier.chunk_count for tier in plan.tiers if tier.name == HOST), 0)
        wanted = [sum(sizes_of(tier, host_chunks)) for tier in plan.tiers]
        parts = shared_out(wanted, plan.most_chunks)
        self._tiers = [
            TierGhosts(tier, host_chunks, part) for tier, part in zip(plan.tiers, parts, strict=True)
        ]
        self._sessions = SessionPaths()
        self._distinct = DistinctCount() if any(tier.share < 1.0 for tier in self._tiers) else None
        self._open: dict[int, tuple[bytes, list[TierGhosts]]] = {}
        self._open_bytes = 0
        self._request_count = self._queried_tokens = 0
        self._told = (0, 0)

    # -- what comes -----------------------------------------------------------------------------

    def feed(self, request: Arrival) -> None:
        """Ask every ghost for the prompt of a request, and have them keep it."""
        session = self._session_of(request)
        chunks = split(request.chunks)
        queried = len(chunks) * self._tokens_per_chunk
        self._request_count += 1
        self._queried_tokens += queried
        if self._distinct is not None:
            self._distinct.add(request.chunks)
        host_hits: list[int] | None = None
        takers: list[TierGhosts] = []
        for index, tier in enumerate(self._tiers):
            tier.note_trunk(self._sessions.trunk_count)
            if not tier.takes(session):
                continue
            takers.append(tier)
            hits = [
                count * self._tokens_per_chunk for count in tier.ask(chunks, request.visit, request.now_s)
            ]
            if tier.name == HOST:
                host_hits = hits
            elif host_hits is not None:  # whatever the tier has not got may be in host memory
                hits = [max(hit, host_hits[REFERENCE]) for hit in hits]
            tier.count(session % BUCKETS, request.chunks, queried, hits)
            waits = first_token_s(request, hits, host_hits, index)
            if waits is not None:
                tier.window.add_waits(waits)
        if takers and chunks:
            if request.visit in self._open:
                self._close(request.visit)
            self._open[request.visit] = request.chunks, takers
            self._open_bytes += len(request.chunks)
            while self._open_bytes > OPEN_BYTES:
                self._close(next(iter(self._open)))

    def grown(self, growth: Growth) -> None:
        """Store what a request has added to its prompt; of one that was not taken nothing is."""
        if growth.visit not in self._open:
            return
        prompt, takers = self._close(growth.visit)
        if growth.chunks:
            chunks = split(prompt + growth.chunks)
            for tier in takers:
                tier.keep(chunks, growth.visit)

    def forget(self) -> None:
        """Empty every ghost: the server has emptied its tiers."""
        self._open.clear()
        self._open_bytes = 0
        for tier in self._tiers:
            tier.clear()

    # -- what is said ---------------------------------------------------------------------------

    def answers(self) -> dict[str, float]:
        """Say what is known: a delta of ``MetricsDelta``, counters since this was last asked.

        Hits are scaled up to all requests where only some are seen. Gauges speak of the last requests of the
        sample (``window.py``), and those of ``GAUGES`` are there only once these were enough.
        """
        told_requests, told_tokens = self._told
        self._told = self._request_count, self._queried_tokens
        found: dict[str, float] = {
            "ghost_requests|": self._request_count - told_requests,
            "ghost_queried_tokens|": self._queried_tokens - told_tokens,
            "ghost_sampled_share|": min((tier.share for tier in self._tiers), default=0.0),
            "ghost_judged_requests|": min((tier.window.request_count for tier in self._tiers), default=0),
        }
        everybody = Asked(
            self._queried_tokens // self._tokens_per_chunk,
            0.0 if self._distinct is None else self._distinct.estimate(),
        )
        for tier in self._tiers:
            hits = tier.take_hit_tokens(everybody)
            for times, hit in zip(TIMES, hits.tolist(), strict=True):
                found[f"ghost_hit_tokens|{tier.name},{times}"] = hit
            if tier.window.is_telling:
                found |= _gauges(tier, tier.correction(everybody))
        return found

    @property
    def tiers(self) -> Sequence[TierGhosts]:
        """The ghosts, by tier."""
        return self._tiers

    # -- inside ---------------------------------------------------------------------------------

    def _session_of(self, request: Arrival) -> int:
        if not request.chunks:  # no whole chunk: nobody's, and nothing can be hit
            return xxhash.xxh3_64_intdigest(request.visit.to_bytes(8, "little"))
        # Hashes of a recorded trace may be anything: spread them.
        return xxhash.xxh3_64_intdigest(self._sessions.session_of(request.chunks))

    def _close(self, visit: int) -> tuple[bytes, list[TierGhosts]]:
        prompt, takers = self._open.pop(visit)
        self._open_bytes -= len(prompt)
        return prompt, takers


def split(chunks: bytes) -> list[bytes]:
    """Part fingerprints that lie one after another."""
    return [chunks[at : at + FINGERPRINT_BYTES] for at in range(0, len(chunks), FINGERPRINT_BYTES)]


def first_token_s(
    request: Arrival, hits: Sequence[int], host_hits: Sequence[int] | None, tier: int
) -> list[float] | None:
    """Estimate a request's time to first token with each ghost of a tier, if nobody else was there.

    Args:
        request: With the server's paces.
        hits: Tokens that each ghost has.
        host_hits: Tokens that those of host memory have; None when they were not asked.
        tier: Index of the tier, 0 for host memory.

    Returns:
        Seconds, or None where a pace is not known.
    """
    paces = request.paces
    read_s = _read_pace(paces, tier)
    if not (paces.compute_s > 0.0 and paces.load_s > 0.0) or math.isnan(read_s):
        return None
    from_host = 0 if tier == 0 or host_hits is None else host_hits[REFERENCE]
    seconds = []
    for hit in hits:
        computed = max(1, request.token_count - hit)  # the last token is computed, whatever was hit
        below = 0 if tier == 0 else max(0, hit - from_host)
        seconds.append(computed * paces.compute_s + hit * paces.load_s + below * read_s)
    return seconds


def _read_pace(paces: Paces, tier: int) -> float:
    if tier == 0:
        return 0.0
    read_s = paces.read_s[tier - 1] if tier <= len(paces.read_s) else 0.0
    return read_s if read_s > 0.0 else math.nan


def _gauges(tier: TierGhosts, correction: float) -> dict[str, float]:
    window = tier.window
    points = [correction * row for row in (window.points(), window.gains(), window.errors())]
    rows = [*points, window.waits_s()]
    return {
        f"{name}|{tier.name},{times}": float(value)
        for name, row in zip(GAUGES, rows, strict=True)
        if row is not None
        for times, value in zip(TIMES, row, strict=True)
        if math.isfinite(value)
    }
