"""Our metrics in vLLM's ``/metrics`` and in its log line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtide.metrics import DEFINITIONS, Definition, Kind, MetricsDelta

PREFIX = "vllm:kvtide_"
"""vLLM unregisters only collectors of its own name when it rebuilds a logger."""


@dataclass
class KVTideStats(KVConnectorStats):  # type: ignore[misc]
    """A delta on its way from a half to the front end; ``data`` is that of ``MetricsDelta``."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTideStats":
        """Add what another half or rank, or a later step, has counted."""
        total = MetricsDelta(self.data)
        total.merge(other.data)
        self.data = total.data
        return self

    def reduce(self) -> dict[str, int | float]:
        """Say it in a line of the log."""
        values = MetricsDelta(self.data)

        def total(name: str, label: str = "") -> float:
            return float(values.data.get(f"{name}|{label}", 0))

        return {
            "loaded MiB": round(total("transfer_bytes", "load") / (1 << 20), 1),
            "stored MiB": round(total("transfer_bytes", "store") / (1 << 20), 1),
            "hit tokens": int(total("hit_tokens", "host")),
            "evicted chunks": int(total("evicted_chunks")),
            "promoted chunks": int(sum(v for k, v in self.data.items() if k.startswith("tier_hit_chunks|"))),
            "pool MiB": round(total("pool_used_bytes") / (1 << 20), 1),
        }

    def is_empty(self) -> bool:
        """Say whether there is nothing to tell."""
        return not self.data


class KVTidePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus series per engine and label value, present from the start where it says so."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        tier_names: Sequence[str] = (),
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._tier_names = tier_names
        self._record: dict[tuple[int, str], Callable[[Any], None]] = {}
        for definition in DEFINITIONS:
            self._bind(definition)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record a delta."""
        for key, value in transfer_stats_data.items():
            record = self._record.get((engine_idx, key))
            if record is not None:
                record(value)

    def _bind(self, definition: Definition) -> None:
        own = definition.label.split(",") if definition.label else []
        labels = [*self._labelnames, *own]
        name = PREFIX + definition.name
        if definition.kind is Kind.HISTOGRAM:
            metric = self._histogram_cls(name, definition.help, labelnames=labels, buckets=definition.buckets)
        elif definition.kind is Kind.GAUGE:
            metric = self._gauge_cls(name, definition.help, labelnames=labels, multiprocess_mode="mostrecent")
        else:
            metric = self._counter_cls(name, definition.help, labelnames=labels)
        for engine, values in self.per_engine_labelvalues.items():
            for value in definition.values_with(self._tier_names):
                child = partial(metric.labels, *values, *(value.split(",") if own else ()))
                record = _recorder(definition.kind, child()) if definition.said_at_first else None
                self._record[engine, f"{definition.name}|{value}"] = record or _Later(definition.kind, child)


class _Later:
    """A series that is there once something was said."""

    def __init__(self, kind: Kind, child: Callable[[], Any]) -> None:
        self._kind = kind
        self._child = child

    def __call__(self, value: Any) -> None:
        _recorder(self._kind, self._child())(value)


def _recorder(kind: Kind, child: Any) -> Callable[[Any], None]:
    if kind is Kind.COUNTER:
        return child.inc  # type: ignore[no-any-return]
    if kind is Kind.GAUGE:
        return child.set  # type: ignore[no-any-return]

    def observe(values: list[float]) -> None:
        for value in values:
            child.observe(value)

    return observe
