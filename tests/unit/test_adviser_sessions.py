"""Whose session a prompt is, what a window remembers, and how sure it is."""

import random

import numpy as np
import pytest

from kvtide.adviser import sessions
from kvtide.adviser.sessions import PATHS, SessionPaths, common_bytes
from kvtide.adviser.window import BLOCK_REQUESTS, BLOCKS, BUCKETS, LEAST_REQUESTS, Window


def path(*parts: tuple[object, int]) -> bytes:
    """Chained fingerprints: ``(seed, count)`` each."""
    found = b""
    for seed, count in parts:
        found += random.Random(f"{found!r}/{seed}").randbytes(8 * count)
    return found


def test_a_conversation_keeps_its_name_however_long_it_grows() -> None:
    paths = SessionPaths()
    names = {paths.session_of(path(("me", 400))[: 8 * turn]) for turn in range(1, 400)}
    assert names == {path(("me", 1))}
    assert paths.trunk_count == 0


def test_what_many_begin_with_names_none_of_them() -> None:
    paths = SessionPaths()
    for user in range(PATHS):
        paths.session_of(path(("system", 5), (user, 3)))
    assert paths.trunk_count == 5
    names = [paths.session_of(path(("system", 5), (user, 9))) for user in range(40)]
    assert len(set(names)) == 40
    assert names[3] == path(("system", 5), (3, 1))[-8:]


def test_two_tools_behind_one_beginning_are_told_apart_from_their_sessions() -> None:
    """No chunk here has 16 different ones after it before the tools are seen to be shared, too."""
    paths = SessionPaths()
    for user in range(3 * PATHS):
        paths.session_of(path(("system", 2), (f"tool {user % 2}", 4), (user, 3)))
    assert paths.trunk_count == 2 + 2 * 4
    name = paths.session_of(path(("system", 2), ("tool 1", 4), (7, 3)))
    assert name == path(("system", 2), ("tool 1", 4), (7, 1))[-8:]


def test_answers_that_were_asked_for_again_are_one_session() -> None:
    paths = SessionPaths()
    names = {paths.session_of(path(("me", 9), (again, 2))) for again in range(PATHS - 1)}
    assert names == {path(("me", 1))}


def test_a_prompt_that_is_nothing_but_trunk_has_a_name() -> None:
    paths = SessionPaths()
    for user in range(PATHS):
        paths.session_of(path(("system", 5), (user, 3)))
    assert paths.session_of(path(("system", 5))) == path(("system", 5))[-8:]
    assert paths.session_of(path(("system", 2))) == path(("system", 2))[-8:]


def test_paths_are_bounded_and_the_longest_unseen_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PATH_BYTES", 8 * 100)
    paths = SessionPaths()
    for user in range(50):
        paths.session_of(path(("mine", 4)))
        paths.session_of(path((user, 10)))
        assert paths.path_bytes <= 800
    assert set(paths._paths) > {path(("mine", 1)), path((49, 1))}
    assert path((30, 1)) not in paths._paths


def test_the_trunk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "TRUNK_CHUNKS", 3)
    paths = SessionPaths()
    for system in range(4):
        for user in range(2 * PATHS):
            paths.session_of(path((system, 2), (user, 2)))
    assert paths.trunk_count == 4


@pytest.mark.parametrize("shared", [0, 1, 7, 8, 9])
def test_where_two_paths_part_is_found(shared: int) -> None:
    one, other = path(("a", shared), ("b", 3)), path(("a", shared), ("c", 9))
    assert common_bytes(one, other) == common_bytes(other, one) == 8 * shared


# -- the window -----------------------------------------------------------------------------------


def filled(count: int, seed: int = 1) -> tuple[Window, list[tuple[int, int, list[int]]]]:
    rng, window, rows = random.Random(seed), Window(3, 1), []
    for _ in range(count):
        hits = sorted(rng.randrange(100) for _ in range(3))
        rows.append((rng.randrange(BUCKETS), 100, hits))
        window.add(*rows[-1])
    return window, rows


def test_a_window_forgets_whole_blocks_and_knows_how_many_it_has() -> None:
    window, rows = filled(BLOCKS * BLOCK_REQUESTS + 1)
    assert window.request_count == (BLOCKS - 1) * BLOCK_REQUESTS + 1
    kept = rows[-window.request_count :]
    assert window.points() == pytest.approx(np.mean([hits for _, _, hits in kept], axis=0))


def test_errors_are_those_of_leaving_each_bucket_out() -> None:
    window, rows = filled(500)
    left_out = []
    for bucket in range(BUCKETS):
        rest = np.array([hits for one, _, hits in rows if one != bucket]).mean(axis=0)
        left_out.append(rest - rest[1])
    spread = np.array(left_out) - np.mean(left_out, axis=0)
    expected = np.sqrt((BUCKETS - 1) / BUCKETS * (spread**2).sum(axis=0))
    assert window.errors() == pytest.approx(expected)
    assert window.gains()[1] == window.errors()[1] == 0.0


def test_one_bucket_says_nothing_of_errors() -> None:
    window = Window(2, 0)
    window.add(3, 100, [1, 2])
    assert np.isnan(window.errors()).all()


def test_a_window_in_which_nothing_was_asked_for_has_hit_nothing() -> None:
    window = Window(2, 0)
    window.add(3, 0, [0, 0])
    assert window.points().tolist() == [0.0, 0.0]


def test_waits_are_told_once_there_are_enough_and_are_the_last_ones() -> None:
    window = Window(2, 0)
    for index in range(LEAST_REQUESTS):
        assert window.waits_s() is None
        window.add_waits([float(index), 1.0])
    found = window.waits_s()
    assert found is not None
    assert found.tolist() == [(LEAST_REQUESTS - 1) / 2, 1.0]
