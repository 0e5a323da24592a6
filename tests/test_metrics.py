"""Metric values: counted, merged across ranks and steps, handed out once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.metrics import BY_NAME, DEFINITIONS, Kind, MetricsDelta


def test_names_are_unique_and_labels_have_values() -> None:
    assert len(BY_NAME) == len(DEFINITIONS)
    for one in DEFINITIONS:
        assert bool(one.label) == bool(one.values_with(("disk",)) != [""]), one.name
        assert one.help.endswith("."), one.name
        assert bool(one.buckets) == (one.kind is Kind.HISTOGRAM), one.name
        assert list(one.buckets) == sorted(set(one.buckets)), one.name


def test_counting_adds_up_per_label() -> None:
    delta = MetricsDelta()
    delta.add("transfer_bytes", 10, "store")
    delta.add("transfer_bytes", 5, "store")
    delta.add("transfer_bytes", 1, "load")
    assert delta.data == {"transfer_bytes|store": 15, "transfer_bytes|load": 1}


def test_a_gauge_says_what_was_said_last() -> None:
    delta = MetricsDelta()
    delta.set("pool_used_bytes", 10)
    delta.set("pool_used_bytes", 3)
    assert delta.data == {"pool_used_bytes|": 3}


def test_taking_hands_out_once_and_begins_anew() -> None:
    delta = MetricsDelta()
    delta.add("stored_chunks", 2)
    delta.observe("lookup_seconds", 0.001)
    taken = delta.take()
    assert taken == {"stored_chunks|": 2, "lookup_seconds|": [0.001]}
    assert delta.take() == {}
    delta.add("stored_chunks", 1)
    assert taken == {"stored_chunks|": 2, "lookup_seconds|": [0.001]}


def test_merging_adds_counters_replaces_gauges_and_joins_observations() -> None:
    delta = MetricsDelta({"stored_chunks|": 2, "pool_used_bytes|": 7, "lookup_seconds|": [0.1]})
    delta.merge({"stored_chunks|": 3, "pool_used_bytes|": 4, "lookup_seconds|": [0.2, 0.3]})
    assert delta.data == {"stored_chunks|": 5, "pool_used_bytes|": 4, "lookup_seconds|": [0.1, 0.2, 0.3]}


def test_merging_into_nothing_copies_and_does_not_share() -> None:
    other = {"lookup_seconds|": [0.1], "stored_chunks|": 1}
    delta = MetricsDelta()
    delta.merge(other)
    delta.observe("lookup_seconds", 0.2)
    assert other == {"lookup_seconds|": [0.1], "stored_chunks|": 1}
    assert delta.data == {"lookup_seconds|": [0.1, 0.2], "stored_chunks|": 1}


def test_observations_are_bounded_when_nobody_takes_them() -> None:
    delta = MetricsDelta()
    for _ in range(MetricsDelta.MAX_OBSERVATIONS + 10):
        delta.observe("lookup_seconds", 0.5)
    delta.merge({"lookup_seconds|": [0.1, 0.2]})
    assert len(delta.data["lookup_seconds|"]) == MetricsDelta.MAX_OBSERVATIONS
    almost = MetricsDelta({"lookup_seconds|": [0.5] * (MetricsDelta.MAX_OBSERVATIONS - 1)})
    almost.merge({"lookup_seconds|": [0.1, 0.2]})
    assert almost.data["lookup_seconds|"][-1] == 0.1
    assert len(almost.data["lookup_seconds|"]) == MetricsDelta.MAX_OBSERVATIONS


def test_an_unknown_metric_is_our_bug_and_is_heard() -> None:
    with pytest.raises(KeyError, match="no_such"):
        MetricsDelta().merge({"no_such|": 1})


COUNTERS = [
    f"{one.name}|{label}"
    for one in DEFINITIONS
    if one.kind is Kind.COUNTER
    for label in one.values_with(("disk", "other"))
]


@given(st.lists(st.dictionaries(st.sampled_from(COUNTERS), st.integers(0, 1 << 40)), max_size=8))
def test_counters_merge_to_the_same_sum_in_any_order(deltas: list[dict[str, int]]) -> None:
    forth, back = MetricsDelta(), MetricsDelta()
    for one in deltas:
        forth.merge(one)
    for one in reversed(deltas):
        back.merge(one)
    expected = {key: sum(one.get(key, 0) for one in deltas) for key in {k for one in deltas for k in one}}
    assert forth.data == back.data == expected


def test_what_is_handed_out_survives_json() -> None:
    delta = MetricsDelta()
    delta.add("transfer_seconds", 0.25, "load")
    delta.observe("transfer_latency_seconds", 0.5, "load")
    taken = delta.take()
    assert json.loads(json.dumps(taken)) == taken
