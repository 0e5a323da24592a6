"""A tier is left out after trouble, and tried again."""

from kvtide.tiers.breaker import Breaker, BreakerState


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(trouble_limit=3, rest_s=2.0, longest_rest_s=6.0)
    assert [breaker.failed(at_s) for _ in range(3)] == [False, False, True]
    return breaker


def test_trouble_in_a_row_opens_it_and_success_between_does_not() -> None:
    breaker = Breaker(trouble_limit=2)
    for _ in range(5):
        assert not breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.allows(0.0)
    assert not breaker.failed(0.0)
    assert breaker.failed(0.0)
    assert not breaker.allows(0.0)


def test_it_rests_and_lets_one_probe_through() -> None:
    breaker = opened(10.0)
    assert not breaker.allows(11.9)
    assert breaker.state(12.0) is BreakerState.PROBING
    assert breaker.allows(12.0)
    assert not breaker.allows(12.1)
    breaker.succeeded()
    assert breaker.state(12.2) is BreakerState.CLOSED
    assert breaker.allows(12.2)
    assert breaker.allows(12.2)


def test_a_probe_that_fails_doubles_the_rest_up_to_a_limit() -> None:
    breaker, now_s = opened(), 0.0
    for rest_s in (2.0, 4.0, 6.0, 6.0):
        assert not breaker.allows(now_s + rest_s - 0.1)
        now_s += rest_s
        assert breaker.allows(now_s)
        assert not breaker.failed(now_s)
    breaker.succeeded()
    assert [breaker.failed(now_s) for _ in range(3)] == [False, False, True]
    assert breaker.allows(now_s + 2.0)


def test_a_probe_that_never_ends_is_followed_by_another() -> None:
    breaker = opened()
    assert breaker.allows(2.0)
    assert not breaker.allows(3.9)
    assert breaker.allows(4.0)


def test_late_trouble_of_calls_before_it_opened_does_not_prolong_the_rest() -> None:
    breaker = opened()
    assert not breaker.failed(1.9)
    assert breaker.allows(2.0)
