"""Ghosts in ``/metrics``: a series is there once there is something to say, and not before."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtide.vllm.metrics import KVTidePromMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> KVTidePromMetrics:
    def of(kind: Any) -> Any:
        return lambda *args, **kwargs: kind(*args, **kwargs, registry=registry)

    kinds = {Gauge: of(Gauge), Counter: of(Counter), Histogram: of(Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return KVTidePromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]}, ("disk",))


def said(registry: CollectorRegistry, name: str) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if line.startswith(f"vllm:kvtide_{name}{{")]


def test_nothing_is_said_of_a_size_before_it_is_known(
    metrics: KVTidePromMetrics, registry: CollectorRegistry
) -> None:
    assert said(registry, "ghost_hit_points") == said(registry, "ghost_hit_tokens_total") == []
    assert len(said(registry, "ghost_requests_total")) == 2
    metrics.observe({"ghost_hit_points|host,2": 41.5, "ghost_hit_tokens|disk,0.5": 7.0}, 1)
    assert said(registry, "ghost_hit_points") == [
        'vllm:kvtide_ghost_hit_points{engine="1",tier="host",times="2"} 41.5'
    ]
    metrics.observe({"ghost_hit_tokens|disk,0.5": 3.0}, 1)
    assert said(registry, "ghost_hit_tokens_total") == [
        'vllm:kvtide_ghost_hit_tokens_total{engine="1",tier="disk",times="0.5"} 10.0'
    ]


def test_a_size_of_a_tier_nobody_has_is_not_heard(
    metrics: KVTidePromMetrics, registry: CollectorRegistry
) -> None:
    metrics.observe({"ghost_hit_points|tape,2": 1.0, "ghost_hit_points|host,3": 1.0}, 0)
    assert said(registry, "ghost_hit_points") == []
