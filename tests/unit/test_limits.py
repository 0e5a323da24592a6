"""What a request allows: numbers that limit, words that forbid, and values nobody can read."""

import logging
from typing import Any

import pytest
from fakes import FakeRequest
from test_work_per_step import Half, decode, done, stored_chunks

from kvtide.scheduler.limits import NO_LIMIT, RequestLimits, limits_of

TOKENS = list(range(41))


@pytest.mark.parametrize(
    ("params", "load", "offload"),
    [
        (None, NO_LIMIT, NO_LIMIT),
        ({}, NO_LIMIT, NO_LIMIT),
        ({"remote_host": "somebody else's"}, NO_LIMIT, NO_LIMIT),
        ({"max_load_tokens": 0, "max_offload_tokens": 8}, 0, 8),
        ({"max_load_tokens": None, "no_read": False}, NO_LIMIT, NO_LIMIT),
        ({"no_read": True}, 0, NO_LIMIT),
        ({"no_write": True, "max_offload_tokens": 100}, NO_LIMIT, 0),
    ],
)
def test_limits_are_read_as_they_were_sent(params: dict[str, Any] | None, load: int, offload: int) -> None:
    assert limits_of("r", params) == RequestLimits(load, offload)


@pytest.mark.parametrize("value", ["8", 8.0, -1, True, [8], {}])
@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
def test_a_wrong_number_narrows_to_nothing_and_is_told(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvtide"):
        limits = limits_of("r", {name: value})
    assert getattr(limits, name) == 0
    assert name in caplog.text
    assert repr(value) in caplog.text


@pytest.mark.parametrize("value", ["false", 0, 1, "no"])
@pytest.mark.parametrize(
    ("name", "limited"), [("no_read", "max_load_tokens"), ("no_write", "max_offload_tokens")]
)
def test_a_wrong_flag_forbids(name: str, limited: str, value: object) -> None:
    assert getattr(limits_of("r", {name: value}), limited) == 0


def stored(half: Half) -> None:
    half.admit("first", TOKENS)
    half.answer(done(half.step(first=41)))


@pytest.mark.parametrize(
    ("params", "hit"), [({"max_load_tokens": 10}, 8), ({"max_load_tokens": 3}, 0), ({"no_read": True}, 0)]
)
def test_no_more_is_brought_back_than_is_allowed(params: dict[str, Any], hit: int) -> None:
    half = Half()
    stored(half)
    request = FakeRequest("r", TOKENS, kv_transfer_params=params)
    half.scheduler.on_new_request(request)
    assert half.scheduler.get_num_new_matched_tokens(request, 0, 0.0) == (hit, hit > 0)
    # The limit counts from the engine's own hit on.
    deeper = half.scheduler.get_num_new_matched_tokens(request, 16, 0.0)
    assert deeper == (hit, hit > 0)


def test_no_more_is_stored_than_is_allowed_also_at_the_end() -> None:
    half = Half()
    for name, params, chunks in (("a", {"max_offload_tokens": 14}, 3), ("b", {"no_write": True}, 0)):
        request = half.admit(name, [ord(name)] * 11, kv_transfer_params=params)
        assert sum(stored_chunks(half.step(**{name: 11}))) == min(chunks, 2)
        request.num_computed_tokens = 11
        assert not any(stored_chunks(decode(half, request)) for _ in range(30))
        half.scheduler.request_finished_all_groups(request, (list(range(1, 12)),), 0.0)
        assert sum(stored_chunks(half.step())) == max(0, chunks - 2)
