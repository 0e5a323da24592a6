"""What a server counts about itself, read from its ``/metrics`` page.

Knows Prometheus' text format and which of vLLM's and kvtide's series the demo needs. Does not know how they
come about. A series that is not there is ``None``, not 0: what was not measured must not look fine.
"""

import re
from dataclasses import dataclass

from kvtide.metrics import BY_NAME, Kind

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

VLLM_EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
"""vLLM's own count of prompt tokens that any connector brought."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of a server's counters.

    Attributes:
        loaded_tokens: Prompt tokens brought back from host memory since the server started.
        loaded_bytes: Bytes copied from host memory.
        stored_bytes: Bytes copied to host memory.
        loaded_s: Seconds spent copying from host memory.
        stored_s: Seconds spent copying to host memory.
        pool_used_bytes: Host memory that holds chunks.
        pool_budget_bytes: Host memory that may be used.
    """

    loaded_tokens: int | None
    loaded_bytes: int | None
    stored_bytes: int | None
    loaded_s: float | None
    stored_s: float | None
    pool_used_bytes: int | None
    pool_budget_bytes: int | None


def read(text: str) -> Scrape:
    """Read one ``/metrics`` page."""
    loaded_tokens = kvtide(text, "hit_tokens", "host")
    if loaded_tokens is None:
        # Another connector in kvtide's place: vLLM counts for every connector.
        loaded_tokens = total(text, VLLM_EXTERNAL_HITS)
    return Scrape(
        loaded_tokens=_whole(loaded_tokens),
        loaded_bytes=_whole(kvtide(text, "transfer_bytes", "load")),
        stored_bytes=_whole(kvtide(text, "transfer_bytes", "store")),
        loaded_s=kvtide(text, "transfer_seconds", "load"),
        stored_s=kvtide(text, "transfer_seconds", "store"),
        pool_used_bytes=_whole(kvtide(text, "pool_used_bytes")),
        pool_budget_bytes=_whole(kvtide(text, "pool_budget_bytes")),
    )


def kvtide(text: str, name: str, label_value: str = "") -> float | None:
    """Read one of kvtide's own series, by its name in ``kvtide.metrics``."""
    definition = BY_NAME[name]
    suffix = "_total" if definition.kind is Kind.COUNTER else ""
    wanted = {definition.label: label_value} if definition.label else {}
    return total(text, f"vllm:kvtide_{name}{suffix}", wanted)


def total(text: str, name: str, labels: dict[str, str] | None = None) -> float | None:
    """Sum the samples called ``name`` that carry ``labels``; ``None`` when there is none."""
    values = [
        float(sample["value"])
        for sample in _SAMPLE.finditer(text)
        if sample["name"] == name
        and (labels or {}).items() <= dict(_LABEL.findall(sample["labels"] or "")).items()
    ]
    return sum(values) if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
