"""How fast a tier brings chunks, as its lane sees it; and what is computed because it has been too slow."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from fakes import FakeRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from probed import GROUP, Half, promoted

from kvtide.geometry import GroupGeometry, GroupKind
from kvtide.transfer.read_pace import HALVED_S, LEAST_S, LONGEST_HALVED_S, WEIGHT, ReadPace

PROMPT = tuple(range(17))
"""Four chunks of four tokens, and the token that is always computed."""

WINDOW = GroupGeometry(1, GroupKind.SLIDING_WINDOW, 4, 1, 4, window_tokens=9)


# -- how fast it is ------------------------------------------------------------------------------------------


def test_of_a_tier_that_was_never_read_nothing_is_known() -> None:
    pace = ReadPace(4)
    assert pace.chunk_s(0.0) == pace.chunk_s(1e9) == 0.0


def test_a_call_for_many_chunks_counts_for_each_and_calls_side_by_side_share_the_time() -> None:
    for call_count, expected_s in ((1, 1.0), (2, 0.5), (4, 0.25)):
        pace = ReadPace(call_count)
        pace.note(8.0, 8, 5.0)
        assert pace.chunk_s(5.0) == expected_s


def test_it_is_told_in_powers_of_two_so_that_it_is_seldom_told_anew() -> None:
    pace = ReadPace(1)
    told = set()
    for seconds in (0.9, 1.0, 1.1, 0.95, 1.05):
        pace.note(seconds, 1, 0.0)
        told.add(pace.chunk_s(0.0))
    assert told == {1.0}


def test_one_slow_call_among_many_says_little_and_many_say_it_all() -> None:
    pace = ReadPace(1)
    for _ in range(20):
        pace.note(0.001, 1, 0.0)
    pace.note(1.0, 1, 0.0)
    assert pace.chunk_s(0.0) == 2.0 ** round(math.log2(WEIGHT * 1.0 + (1 - WEIGHT) * 0.001))
    for _ in range(30):
        pace.note(1.0, 1, 0.0)
    assert pace.chunk_s(0.0) == 1.0


def test_what_was_slow_is_half_forgotten_whenever_nothing_was_read_for_so_long() -> None:
    pace = ReadPace(1)
    pace.note(16.0, 1, 100.0)
    assert [pace.chunk_s(100.0 + HALVED_S * times) for times in range(4)] == [16.0, 8.0, 4.0, 2.0]
    assert pace.chunk_s(100.0 + HALVED_S * 60) == 0.0, "in the end it is as if nobody had ever seen it"
    pace.note(4.0, 1, 100.0 + HALVED_S * 60)
    assert pace.chunk_s(100.0 + HALVED_S * 60) == 4.0


WORTH_S = 1 / 64
"""A tier is used where a chunk takes no longer."""


def tried(pace: ReadPace, call_s: float, from_s: int, until_s: int) -> list[int]:
    """Read, with calls of one length, in each second in which that seems worth it; returns these seconds."""
    found = []
    for now_s in range(from_s, until_s):
        if pace.chunk_s(float(now_s)) <= WORTH_S:
            found.append(now_s)
            for _ in range(8):
                pace.note(call_s, 1, float(now_s))
    return found


def test_a_tier_that_stays_too_slow_is_tried_ever_more_seldom_but_never_forgotten() -> None:
    seconds = tried(ReadPace(4), 0.2, 0, 3600)
    pauses_s = [after - before for before, after in pairwise(seconds)]
    assert pauses_s[0] <= 1.5 * HALVED_S
    assert pauses_s == sorted(pauses_s)
    assert 3 * pauses_s[0] <= pauses_s[-1] <= 1.5 * LONGEST_HALVED_S
    assert len(seconds) < 90, "a pause of always ten seconds would be 300 times in vain"


def test_a_tier_that_has_become_fast_is_used_at_the_next_try_and_forgiven() -> None:
    pace = ReadPace(4)
    last_s = tried(pace, 0.2, 0, 3600)[-1]
    fast = tried(pace, 0.001, 3600, 4000)
    assert fast[0] - last_s <= 1.5 * LONGEST_HALVED_S
    assert fast == list(range(fast[0], 4000))
    slow = tried(pace, 0.2, 4000, 4100)
    assert slow[1] - slow[0] <= 1.5 * HALVED_S, "as of a tier that was never slow"


def test_a_time_before_the_last_call_forgets_nothing() -> None:
    pace = ReadPace(1)
    pace.note(1.0, 1, 100.0)
    assert pace.chunk_s(90.0) == 1.0


@settings(deadline=None)
@given(
    call_s=st.floats(1e-7, 1e4),
    chunk_count=st.integers(1, 4096),
    call_count=st.integers(1, 64),
    times=st.integers(1, 30),
)
def test_at_a_steady_pace_it_is_right_within_a_power_of_two(
    call_s: float, chunk_count: int, call_count: int, times: int
) -> None:
    pace = ReadPace(call_count)
    for at in range(times):
        pace.note(call_s, chunk_count, float(at) * 1e-3)
    told, actual = pace.chunk_s(times * 1e-3), call_s / chunk_count / call_count
    if told:
        assert 2**-0.51 <= told / actual <= 2**0.51
    else:
        assert actual < LEAST_S * 1.01


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(1, 1000), st.floats(0.0, 1e6)), max_size=20))
def test_whatever_is_noted_it_is_a_time(calls: Sequence[tuple[float, int, float]]) -> None:
    pace = ReadPace(3)
    for seconds, chunk_count, now_s in calls:
        pace.note(seconds, chunk_count, now_s)
        assert 0.0 <= pace.chunk_s(now_s) < math.inf


# -- what is computed instead --------------------------------------------------------------------------------


def half_at(
    token_count: int, seconds: float = 1.0, tiers: str = "s", groups: tuple[GroupGeometry, ...] = (GROUP,)
) -> Half:
    """An engine that has been seen to compute so many tokens in such a time."""
    half = Half(tiers, groups, promotion_share=1.0)
    half.step(somebody=token_count)
    half.now_s += seconds
    half.report()
    return half


def told(half: Half, tier: int, *present: bool, group: int = 0) -> None:
    """Have the books of a tier know of some chunks of the prompt."""
    run = half.geometry.groups[group].run(FakeRequest("x", list(PROMPT)).block_hashes, 0, len(present))
    half.tiers[tier - 1].note_presence(run, present, 0)


@pytest.mark.parametrize(
    ("chunk_read_s", "is_brought"),
    [(0.0, True), (0.125, True), (0.2, True), (0.25, False), (8.0, False)],
)
def test_what_comes_later_than_it_would_be_computed_is_passed_over(
    chunk_read_s: float, is_brought: bool
) -> None:
    half = half_at(64, seconds=4.0)  # the four chunks in a second, and so long is expected for five
    told(half, 1, *(True,) * 4)
    half.serve(1, chunk_read_s=chunk_read_s)
    request = half.arrive("a", PROMPT)
    assert promoted(half.step()) == ([(1, 0, 4)] if is_brought else [])
    assert half.asks(request) == (None if is_brought else 0)
    half.finish(request)
    assert half.count("tier_passed_over_chunks") == (0 if is_brought else 4)


def test_before_the_engine_has_computed_anything_it_is_brought() -> None:
    half = Half()
    told(half, 1, *(True,) * 4)
    half.serve(1, chunk_read_s=64.0)
    half.arrive("a", PROMPT)
    assert promoted(half.step()) == [(1, 0, 4)]


def test_one_that_is_slow_no_more_is_read_again_for_those_who_wait_still() -> None:
    half = half_at(1000)
    told(half, 1, *(True,) * 4)
    half.serve(1, chunk_read_s=1.0)
    request = half.arrive("a", PROMPT)
    assert half.asks(request) == 0
    for seconds in (0.5, 0.25, 0.125):
        half.serve(1, chunk_read_s=seconds)  # as time passes without a read
        assert half.asks(request) == 0
    half.serve(1, chunk_read_s=0.002)
    assert half.asks(request) is None
    assert promoted(half.step()) == [(1, 0, 4)]


def test_who_waits_on_is_counted_once_and_not_at_all_if_it_is_brought_in_the_end() -> None:
    half = half_at(1000)
    told(half, 1, *(True,) * 4)
    half.serve(1, chunk_read_s=1.0)
    waits, computes = half.arrive("a", PROMPT), half.arrive("b", [*PROMPT, 99])
    for _ in range(5):
        half.manager.residency_epoch += 1  # others store and read
        assert (half.asks(waits), half.asks(computes)) == (0, 0)
    half.scheduler.update_state_after_alloc(computes, ([1, 2, 3, 4, 5],), 0, half.now_s)
    assert half.count("tier_passed_over_chunks") == 4
    half.serve(1, chunk_read_s=0.0)
    assert half.asks(waits) is None
    half.finish(waits)
    half.finish(computes)
    assert half.count("tier_passed_over_chunks") == 4


def test_what_follows_one_that_is_passed_over_is_not_brought_either() -> None:
    half = half_at(1000, tiers="ss")
    told(half, 1, True, True, False, False)
    told(half, 2, *(True,) * 4)
    half.serve(1, chunk_read_s=1.0)
    request = half.arrive("a", PROMPT)
    assert promoted(half.step()) == [], "chunks behind a gap are of no use"
    half.finish(request)
    assert (half.count("tier_passed_over_chunks"), half.count("tier_passed_over_chunks", "s2")) == (2, 0)


def test_what_comes_before_one_that_is_passed_over_is_brought() -> None:
    half = half_at(1000, tiers="ss")
    told(half, 1, True, True, False, False)
    told(half, 2, *(True,) * 4)
    half.serve(2, chunk_read_s=1.0)
    half.arrive("a", PROMPT)
    assert promoted(half.step()) == [(1, 0, 2)]


@pytest.mark.parametrize(("slow", "brought"), [(1, []), (2, []), (None, [(1, 0, 4), (2, 2, 4)])])
def test_beside_a_window_all_that_a_point_needs_is_brought_or_nothing(
    slow: int | None, brought: list
) -> None:
    half = half_at(1000, tiers="ss", groups=(GROUP, WINDOW))
    told(half, 1, *(True,) * 4)
    told(half, 2, False, False, True, True, group=1)
    if slow is not None:
        half.serve(slow, chunk_read_s=1.0)
    request = half.arrive("a", PROMPT)
    assert promoted(half.step()) == brought
    half.finish(request)
    assert half.count("tier_passed_over_chunks") == (4 if slow == 1 else 0)
    assert half.count("tier_passed_over_chunks", "s2") == (2 if slow == 2 else 0)


def test_a_reset_forgets_who_was_passed_over() -> None:
    half = half_at(1000)
    told(half, 1, *(True,) * 4)
    half.serve(1, chunk_read_s=1.0)
    request = half.arrive("a", PROMPT)
    assert half.asks(request) == 0
    half.scheduler.reset_cache()
    half.finish(request)
    assert half.count("tier_passed_over_chunks") == 0
