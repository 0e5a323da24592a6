"""What is counted, under which name and in which unit.

Knows definitions and how to add them up in plain types that cross processes. Does not know Prometheus:
``kvtide.vllm.metrics`` turns these into vLLM's metrics. ``docs/metrics.md`` is checked against
``DEFINITIONS``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

HOST = "host"
"""Host memory, where it stands among tiers."""


class Kind(Enum):
    """How values of one metric are added up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.

    Attributes:
        name: Without the ``vllm:kvtide_`` that vLLM and we put before it.
        kind: How it adds up.
        unit: For people; the unit also stands last in the name.
        help: One sentence.
        label: Name of its label, "" without; "tier", or "tier," and another one's name.
        label_values: What that can be, tiers left aside; series exist before the first event.
        buckets: Upper bounds, for a histogram.
        with_host: Host memory is a tier among the others, under the name "host".
        said_at_first: A series exists from the start; else from when there is something to say.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    label: str = ""
    label_values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    with_host: bool = False
    said_at_first: bool = True

    def values_with(self, tier_names: Sequence[str]) -> list[str]:
        """List what the label can be, where there are these tiers; several parts are joined by commas."""
        if not self.label.startswith("tier"):
            return list(self.label_values or ("",))
        if self.with_host:
            tier_names = (HOST, *tier_names)
        if not self.label_values:
            return list(tier_names)
        return [f"{tier},{value}" for tier in tier_names for value in self.label_values]


_DIRECTIONS = ("store", "load")
_TIER_DIRECTIONS = ("read", "write")
TIER_SKIP_REASONS = ("queue_full", "full", "bypassed")
TIER_ERRORS = ("miss", "corrupt", "full", "late", "cancelled", "out", "queue_full", "unavailable")
TIER_ANSWERS = ("there", "absent")
SKIP_REASONS = ("pool_full", "queue_full", "below_threshold", "pool_not_ready", "bypassed")
GHOST_TIMES = ("0.5", "1", "2", "4")
"""Sizes of ghost caches, as multiples of a tier's own."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_MICROSECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)

DEFINITIONS: tuple[Definition, ...] = (
    Definition("transfer_bytes", Kind.COUNTER, "bytes", "Bytes copied.", "direction", _DIRECTIONS),
    Definition("transfer_seconds", Kind.COUNTER, "seconds", "Time spent copying.", "direction", _DIRECTIONS),
    Definition("transfers", Kind.COUNTER, "copies", "Copies that ended well.", "direction", _DIRECTIONS),
    Definition("transfer_failures", Kind.COUNTER, "copies", "Copies that failed or were cancelled.",
               "direction", _DIRECTIONS),
    Definition("transfer_latency_seconds", Kind.HISTOGRAM, "seconds", "From submission to the last byte.",
               "direction", _DIRECTIONS, _SECONDS),
    Definition("hit_tokens", Kind.COUNTER, "tokens", "Prompt tokens brought back, by medium.",
               "medium", ("host",)),
    Definition("queried_tokens", Kind.COUNTER, "tokens",
               "Prompt tokens of admitted requests beyond the engine's own hit."),
    Definition("stored_chunks", Kind.COUNTER, "chunks", "Chunks that became ready in host memory."),
    Definition("evicted_chunks", Kind.COUNTER, "chunks", "Chunks that left host memory to make room."),
    Definition("skipped_store_chunks", Kind.COUNTER, "chunks", "Chunks offered and not stored, by reason.",
               "reason", SKIP_REASONS),
    Definition("failed_load_requests", Kind.COUNTER, "requests",
               "Requests whose load failed and that were recomputed."),
    Definition("write_only_alarms", Kind.COUNTER, "alarms",
               "Times it was noticed that host memory is written and never read: 0 or 1."),
    Definition("flushed_stores", Kind.COUNTER, "copies", "Stores a step had to wait for."),
    Definition("flush_seconds", Kind.COUNTER, "seconds", "Time steps waited for stores."),
    Definition("deferred_lookups", Kind.COUNTER, "lookups",
               "Lookups answered with 'ask again' because another request brings the prefix."),
    Definition("lookup_seconds", Kind.HISTOGRAM, "seconds", "Time of one get_num_new_matched_tokens.",
               buckets=_MICROSECONDS),
    Definition("pool_capacity_bytes", Kind.GAUGE, "bytes", "Host memory that can be used so far."),
    Definition("pool_budget_bytes", Kind.GAUGE, "bytes",
               "Host memory that may be used: the setting, in whole slots."),
    Definition("pool_used_bytes", Kind.GAUGE, "bytes", "Host memory that holds chunks, ready or on the way."),
    Definition("pool_pinned_bytes", Kind.GAUGE, "bytes", "Host memory that open loads are reading."),
    Definition("open_jobs", Kind.GAUGE, "jobs", "Copies planned or under way.", "direction",
               (*_DIRECTIONS, "promote", "demote")),
    Definition("open_store_bytes", Kind.GAUGE, "bytes", "Bytes of stores planned or under way."),
    Definition("tier_bytes", Kind.COUNTER, "bytes", "Bytes read from and written to a tier.",
               "tier,direction", _TIER_DIRECTIONS),
    Definition("tier_seconds", Kind.COUNTER, "seconds", "Time its threads spent reading and writing.",
               "tier,direction", _TIER_DIRECTIONS),
    Definition("tier_hit_chunks", Kind.COUNTER, "chunks", "Chunks brought back to host memory.", "tier"),
    Definition("tier_stored_chunks", Kind.COUNTER, "chunks", "Chunks that became ready there.", "tier"),
    Definition("tier_evicted_chunks", Kind.COUNTER, "chunks", "Chunks that left it to make room.", "tier"),
    Definition("tier_lost_chunks", Kind.COUNTER, "chunks", "Chunks that were missing or damaged when read.",
               "tier"),
    Definition("tier_found_chunks", Kind.COUNTER, "chunks", "Chunks of an earlier life, found after a start.",
               "tier"),
    Definition("tier_skipped_chunks", Kind.COUNTER, "chunks", "Chunks not written, by reason.",
               "tier,reason", TIER_SKIP_REASONS),
    Definition("tier_passed_over_chunks", Kind.COUNTER, "chunks",
               "Chunks that were computed instead: it has been slower than that lately.", "tier"),
    Definition("tier_probes", Kind.COUNTER, "questions", "Questions of what a shared tier has.", "tier"),
    Definition("tier_probes_late", Kind.COUNTER, "questions", "Of these, given up while a request waited.",
               "tier"),
    Definition("tier_probed_chunks", Kind.COUNTER, "chunks", "Chunks it was asked for, by answer.",
               "tier,answer", TIER_ANSWERS),
    Definition("tier_errors", Kind.COUNTER, "errors", "Chunks whose read or write failed, by kind.",
               "tier,error", TIER_ERRORS),
    Definition("tier_in_service", Kind.GAUGE, "flag", "1 while it is read from, 0 while it is left out.",
               "tier"),
    Definition("tier_takes_writes", Kind.GAUGE, "flag", "1 while it is written to, else 0: full or out.",
               "tier"),
    Definition("tier_used_bytes", Kind.GAUGE, "bytes", "What each rank has taken there.", "tier"),
    Definition("tier_capacity_bytes", Kind.GAUGE, "bytes", "What each rank may take there.", "tier"),
    Definition("tier_open_write_bytes", Kind.GAUGE, "bytes", "Bytes of writes planned or under way.", "tier"),
    Definition("ghost_requests", Kind.COUNTER, "requests", "Requests that ghost caches were told of."),
    Definition("ghost_dropped_requests", Kind.COUNTER, "requests",
               "Requests they were not told of: too many were waiting."),
    Definition("ghost_queried_tokens", Kind.COUNTER, "tokens",
               "Prompt tokens in whole chunks of the requests they were told of."),
    Definition("ghost_hit_tokens", Kind.COUNTER, "tokens",
               "Of these, those that a tier of so many times its size would have had, or host memory.",
               "tier,times", GHOST_TIMES, with_host=True, said_at_first=False),
    Definition("ghost_hit_points", Kind.GAUGE, "points",
               "The same of the last requests: tokens of 100. Said from 1,000 requests on.",
               "tier,times", GHOST_TIMES, with_host=True, said_at_first=False),
    Definition("ghost_gain_points", Kind.GAUGE, "points",
               "How many more of 100 than at the tier's own size. Said from 1,000 requests on.",
               "tier,times", GHOST_TIMES, with_host=True, said_at_first=False),
    Definition("ghost_error_points", Kind.GAUGE, "points", "Standard error of that gain.",
               "tier,times", GHOST_TIMES, with_host=True, said_at_first=False),
    Definition("ghost_first_token_seconds", Kind.GAUGE, "seconds",
               "Median time to first token at that size, waiting for other requests left aside.",
               "tier,times", GHOST_TIMES, with_host=True, said_at_first=False),
    Definition("ghost_sampled_share", Kind.GAUGE, "share",
               "Of all sessions, those that ghost caches see; of the tier with the fewest."),
    Definition("ghost_judged_requests", Kind.GAUGE, "requests",
               "Requests that the gauges speak of; of the tier with the fewest."),
)  # fmt: skip

BY_NAME = {definition.name: definition for definition in DEFINITIONS}

Series = tuple[str, str]
"""Metric name and label value ("" without a label)."""


class MetricsDelta:
    """Values since the last time they were handed out, in plain types.

    ``data`` maps ``"name|label"`` to a number (counters, gauges) or a list of observations (histograms):
    it crosses process borders as msgpack, which knows no tuples as keys.
    """

    MAX_OBSERVATIONS = 4096  # per series and hand-out: an idle front end must not grow us

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {} if data is None else data

    def add(self, name: str, amount: float, label: str = "") -> None:
        """Count up."""
        key = f"{name}|{label}"
        self.data[key] = self.data.get(key, 0) + amount

    def set(self, name: str, value: float, label: str = "") -> None:
        """Say how much it is now."""
        self.data[f"{name}|{label}"] = value

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Add one observation."""
        seen = self.data.setdefault(f"{name}|{label}", [])
        if len(seen) < self.MAX_OBSERVATIONS:
            seen.append(value)

    def merge(self, other: dict[str, Any]) -> None:
        """Take in a later delta."""
        for key, value in other.items():
            kind = BY_NAME[key.split("|", 1)[0]].kind
            if kind is Kind.GAUGE or key not in self.data:
                self.data[key] = list(value) if isinstance(value, list) else value
            elif kind is Kind.COUNTER:
                self.data[key] += value
            else:
                room = self.MAX_OBSERVATIONS - len(self.data[key])
                self.data[key].extend(value[:room])

    def take(self) -> dict[str, Any]:
        """Hand out and begin anew."""
        data, self.data = self.data, {}
        return data
