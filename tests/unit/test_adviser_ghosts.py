"""Ghost caches: what they say is what replays at those sizes hit."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvtide.adviser.distinct import DistinctCount
from kvtide.adviser.ghosts import GAUGES, Ghosts, first_token_s, split
from kvtide.adviser.tier_ghosts import shared_out
from kvtide.adviser.window import LEAST_REQUESTS
from kvtide.advising import Arrival, GhostPlan, GhostTier, Growth, Paces, fingerprints
from kvtide.manager.alone import ask, keep
from kvtide.metrics import GHOST_TIMES as TIMES
from kvtide.metrics import MetricsDelta
from kvtide.sim.manager_only import manager_of

TOKENS = 16
NO_PACES = Paces()


def chunks_of(*parts: tuple[int, int]) -> list[bytes]:
    """Chained names: ``(seed, count)`` each."""
    named: list[bytes] = []
    for seed, count in parts:
        rng = random.Random(f"{named[-1:]}/{seed}")
        named += [rng.randbytes(8) for _ in range(count)]
    return named


def conversations(count: int, seed: int, together: int = 60) -> Iterator[list[bytes]]:
    """Sessions of one to eight turns, so many of them at a time, all behind the same beginning."""
    rng = random.Random(seed)
    turns = dict.fromkeys(range(together), 0)
    lengths: dict[int, int] = {}
    for new in range(together, together + count):
        session = rng.choice(list(turns))
        turns[session] += 1
        yield chunks_of((0, 3), (session, 3 * turns[session]))
        if turns[session] >= lengths.setdefault(session, rng.randint(1, 8)):
            del turns[session]
            turns[new] = 0


def fed(ghosts: Ghosts, prompts: Iterator[list[bytes]], paces: Paces = NO_PACES) -> Ghosts:
    for visit, chunks in enumerate(prompts, start=1):
        ghosts.feed(Arrival(visit, float(visit), TOKENS * len(chunks) + 1, b"".join(chunks), paces))
    return ghosts


def plan(chunk_count: int, policy: str = "lru", most: int = 10**9) -> GhostPlan:
    return GhostPlan(TOKENS, (GhostTier("host", policy, chunk_count),), most)


def share(answers: dict[str, float], times: str, tier: str = "host") -> float:
    return 100 * answers[f"ghost_hit_tokens|{tier},{times}"] / answers["ghost_queried_tokens|"]


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_unsampled_they_hit_to_the_token_what_a_replay_at_that_size_hits(policy: str) -> None:
    answers = fed(Ghosts(plan(100, policy)), conversations(300, seed=7)).answers()
    assert answers["ghost_sampled_share|"] == 1.0
    for times in TIMES:
        manager, hits = manager_of(policy, int(100 * float(times))), 0
        for visit, chunks in enumerate(conversations(300, seed=7), start=1):
            hits += ask(manager, chunks, visit, float(visit)).hit_count
        assert answers[f"ghost_hit_tokens|host,{times}"] == hits * TOKENS


def test_what_a_request_has_grown_by_is_hit_by_the_next_turn() -> None:
    with_it, without = Ghosts(plan(100)), Ghosts(plan(100))
    first, second = chunks_of((1, 4)), chunks_of((1, 4), (2, 4))
    for ghosts in (with_it, without):
        ghosts.feed(Arrival(1, 0.0, 64, b"".join(first)))
    with_it.grown(Growth(1, b"".join(second[4:7])))
    without.grown(Growth(1, b""))
    for ghosts, hit in ((with_it, 7), (without, 4)):
        ghosts.feed(Arrival(2, 1.0, 128, b"".join(second)))
        assert ghosts.answers()["ghost_hit_tokens|host,1"] == hit * TOKENS


def test_growth_of_a_request_nobody_knows_changes_nothing() -> None:
    ghosts = Ghosts(plan(100))
    ghosts.grown(Growth(9, b"x" * 8))
    assert ghosts.tiers[0].chunk_counts == [0, 0, 0, 0]


def test_a_sample_says_what_all_would_within_its_error() -> None:
    size, count = 300, 3000
    whole = fed(Ghosts(plan(size)), conversations(count, seed=3)).answers()
    part = Ghosts(plan(size, most=int(7.5 * size * 0.4)))
    sampled = fed(part, conversations(count, seed=3)).answers()
    assert sampled["ghost_sampled_share|"] == pytest.approx(0.4)
    assert sampled["ghost_queried_tokens|"] == whole["ghost_queried_tokens|"]
    for times in ("0.5", "2", "4"):
        gains = [share(one, times) - share(one, "1") for one in (whole, sampled)]
        error = sampled[f"ghost_error_points|host,{times}"]
        assert abs(gains[0]) > 5 * error > 0.0
        assert abs(gains[0] - gains[1]) < 2 * error


def test_what_a_sample_has_in_bad_luck_is_made_up_for() -> None:
    """Of a cache that keeps everything it is known what it hits: the sample is held against that."""

    def prompts() -> Iterator[list[bytes]]:
        for turn in range(8):  # a few sessions do most of the asking
            for session in range(300 if turn == 0 else 40):
                yield chunks_of((session, 10 if session >= 40 else 40))

    size = 5000
    whole = fed(Ghosts(plan(size)), prompts()).answers()
    part = Ghosts(plan(size, most=int(7.5 * size * 0.15)))
    sampled = fed(part, prompts()).answers()
    assert abs(part.tiers[0].window.points()[3] - share(whole, "4")) > 3.0
    for times in TIMES:
        assert share(sampled, times) == pytest.approx(share(whole, times), abs=1.0)


@pytest.mark.parametrize("count", [0, 1, 1000, 200_000, 1_500_000])
def test_different_chunks_are_counted_within_a_percent(count: int) -> None:
    chunks = np.random.default_rng(5).bytes(8 * count)
    counter = DistinctCount()
    counter.add(chunks)
    counter.add(chunks)
    assert counter.estimate() == pytest.approx(count, rel=0.01)


def test_the_prefix_rule_holds_inside_a_sample() -> None:
    """Everything fits: then whoever is asked a second time has all of it, in the sample as without one."""
    ghosts = Ghosts(GhostPlan(TOKENS, (GhostTier("host", "lru", 40_000),), 60_000))
    prompts = [chunks_of((0, 6), (session, 8)) for session in range(400)]
    for turn in range(2):
        for session, chunks in enumerate(prompts):
            ghosts.feed(Arrival(400 * turn + session, float(session), 0, b"".join(chunks)))
        answers = ghosts.answers()
    assert ghosts.tiers[0].share < 0.25
    for times in TIMES:
        assert answers[f"ghost_hit_tokens|host,{times}"] == pytest.approx(400 * 14 * TOKENS, rel=0.02)


def test_all_ghosts_together_hold_no_more_than_they_may() -> None:
    tiers = (GhostTier("host", "lru", 1000), GhostTier("disk", "adaptive", 100_000))
    ghosts = fed(Ghosts(GhostPlan(TOKENS, tiers, 9000)), conversations(1500, seed=5))
    held = [count for tier in ghosts.tiers for count in tier.chunk_counts]
    # What most sessions share has room of its own, at most a quarter of a ghost.
    assert 1000 < sum(held) <= 1.25 * 9000
    assert ghosts.tiers[0].share == pytest.approx(0.6)
    assert ghosts.tiers[1].share == pytest.approx(4500 / 750_000)


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [([10, 80], [10, 80]), ([10, 200], [10, 90]), ([300, 200], [50, 50]), ([], []), ([5], [5])],
)
def test_who_wants_little_leaves_the_rest_to_the_others(wanted: list[int], parts: list[float]) -> None:
    assert shared_out(wanted, 100) == parts


def test_below_a_thousand_requests_nothing_is_said() -> None:
    ghosts = Ghosts(plan(100))
    paces = Paces(1e-3, 1e-5)
    fed(ghosts, conversations(LEAST_REQUESTS - 1, seed=1), paces)
    answers = ghosts.answers()
    assert not [key for key in answers if key.partition("|")[0] in GAUGES]
    assert answers["ghost_judged_requests|"] == LEAST_REQUESTS - 1
    ghosts.feed(Arrival(LEAST_REQUESTS, 1e6, 17, b"x" * 8, paces))
    answers = ghosts.answers()
    assert {key.partition("|")[0] for key in answers} >= set(GAUGES)
    assert answers["ghost_requests|"] == 1


def test_answers_are_a_delta_that_metrics_can_take() -> None:
    ghosts, metrics = Ghosts(plan(100)), MetricsDelta()
    for part in range(2):
        for visit, chunks in enumerate(conversations(20, seed=2)):
            ghosts.feed(Arrival(20 * part + visit, float(visit), 0, b"".join(chunks)))
        metrics.merge(ghosts.answers())
    assert metrics.data["ghost_requests|"] == 40


def test_a_tier_below_has_what_is_in_it_or_in_host_memory() -> None:
    tiers = (GhostTier("host", "lru", 100), GhostTier("disk", "lru", 20))
    ghosts = Ghosts(GhostPlan(TOKENS, tiers))
    for visit in range(2):
        ghosts.feed(Arrival(visit, float(visit), 0, b"".join(chunks_of((1, 90)))))
    answers = ghosts.answers()
    assert answers["ghost_hit_tokens|disk,0.5"] == answers["ghost_hit_tokens|host,1"] == 90 * TOKENS


def test_one_that_takes_what_leaves_host_memory_holds_as_much_as_both() -> None:
    tiers = (GhostTier("host", "lru", 60), GhostTier("disk", "lru", 40, extends_host=True))
    ghosts = Ghosts(GhostPlan(TOKENS, tiers))
    assert ghosts.tiers[1].capacities == [80, 100, 140, 220]


def test_a_reset_empties_every_ghost() -> None:
    ghosts = Ghosts(plan(100))
    ghosts.feed(Arrival(1, 0.0, 0, b"".join(chunks_of((1, 4)))))
    ghosts.forget()
    assert ghosts.tiers[0].chunk_counts == [0, 0, 0, 0]
    ghosts.feed(Arrival(2, 0.0, 0, b"".join(chunks_of((1, 4)))))
    assert ghosts.answers()["ghost_hit_tokens|host,4"] == 0


@pytest.mark.parametrize(
    ("tier", "paces", "seconds"),
    [
        (0, Paces(1e-3, 1e-5), [100 * 1e-3, 52 * 1e-3 + 48 * 1e-5]),
        (1, Paces(1e-3, 1e-5, (1e-4,)), [100 * 1e-3, 52 * 1e-3 + 48 * 1e-5 + 16 * 1e-4]),
        (0, Paces(), None),
        (0, Paces(1e-3), None),
        (1, Paces(1e-3, 1e-5), None),
    ],
)
def test_the_first_token_comes_when_the_rest_is_computed(
    tier: int, paces: Paces, seconds: list[float] | None
) -> None:
    request = Arrival(1, 0.0, 100, b"", paces)
    found = first_token_s(request, [0, 48], [0, 32, 32, 32], tier)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_the_last_token_is_computed_whatever_was_hit() -> None:
    assert first_token_s(Arrival(1, 0.0, 32, b"", Paces(1.0, 0.5)), [32], None, 0) == [17.0]


def test_a_fingerprint_is_the_beginning_of_a_hash_and_names_are_hashed() -> None:
    hashes = [bytes([one]) * 8 + b"rest" * 6 for one in range(6)]
    assert split(fingerprints(hashes, 1, 6, 2)) == [hashes[1][:8], hashes[3][:8], hashes[5][:8]]
    names = [b"\0" * 8 + one.to_bytes(4, "big") for one in range(50)]
    assert len(set(split(fingerprints(names, 0, 50, 1)))) == 50
    assert fingerprints([], 0, 9, 1) == fingerprints([b"a" * 8, b"b" * 16], 0, 2, 1) == b""


def test_what_is_kept_is_not_counted_as_asked_for() -> None:
    manager = manager_of("lru", 10)
    assert keep(manager, chunks_of((1, 4)), 1) == (0, 4, 0)
    assert ask(manager, chunks_of((1, 4)), 2, 0.0) == (4, 0, 0)
